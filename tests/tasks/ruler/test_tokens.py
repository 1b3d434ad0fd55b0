"""Tokenizers by their count."""

import sys
from pathlib import Path

import pytest

from mixassay.errors import UserError
from mixassay.tasks.ruler.tokens import Bytes, HuggingFace


def test_bytes_are_counted_in_utf8() -> None:
    assert Bytes().count("jalapeño") == 9


def test_hugging_face(data: Path) -> None:
    pytest.importorskip("tokenizers")
    folder = data / "tokenizers/byte257"
    tokenizer = HuggingFace(folder)
    assert tokenizer.count("jalapeño " * 1000) == 10_000
    assert tokenizer.special == 0
    assert tokenizer.identity == HuggingFace(folder / "tokenizer.json").identity
    assert tokenizer.identity != HuggingFace(data / "tokenizers/smollm2-135m").identity


def test_special_tokens_are_counted_apart_and_no_text_is_cut(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[BOS]": 0, "a": 1, "[UNK]": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 0)])
    made.enable_truncation(8)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFace(tmp_path)
    assert (tokenizer.count("a " * 100), tokenizer.special) == (100, 1)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tokenizer at .*tokenizer\.json"):
        HuggingFace(tmp_path)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r'needs the package tokenizers: pip install "mixassay\[ruler\]"'):
        HuggingFace(tmp_path)
