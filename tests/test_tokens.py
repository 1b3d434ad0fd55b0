"""Tokenizers: counts, ids and texts of both kinds."""

import os
import sys
from pathlib import Path

import pytest

from mixassay.errors import UserError
from mixassay.tokens import Bytes, HuggingFace, load

TEXT = "jalapeño\n  two\tspaces; 三 "


@pytest.fixture(scope="session")
def data() -> Path:
    """MIXASSAY_DATA, or shared/data beside the checkout."""
    folder = Path(os.environ.get("MIXASSAY_DATA", Path(__file__).parents[2] / "shared/data"))
    if not folder.is_dir():
        pytest.skip(f"no data at {folder}; set MIXASSAY_DATA")
    return folder


def test_bytes_there_and_back() -> None:
    bytes_ = load("bytes")
    ids = bytes_.encode(TEXT)
    assert (len(ids), max(ids) < 256, bytes_.end, bytes_.vocab_size) == (bytes_.count(TEXT), True, 256, 257)
    assert bytes_.decode([*ids, 256]) == TEXT
    assert bytes_.decode(ids[:7]) == "jalape\ufffd"


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


@pytest.mark.parametrize(("name", "end"), [("byte257", 0), ("bpe2048-shakespeare", 0), ("smollm2-135m", 0)])
def test_hugging_face_there_and_back(data: Path, name: str, end: int) -> None:
    pytest.importorskip("tokenizers")
    tokenizer = load(data / "tokenizers" / name)
    ids = tokenizer.encode(TEXT)
    assert (len(ids), tokenizer.end) == (tokenizer.count(TEXT), end)
    assert max(ids) < tokenizer.vocab_size
    assert tokenizer.decode([*ids, end]) == TEXT


def test_a_file_without_an_end_of_text_is_refused_when_it_is_asked_for(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    with pytest.raises(UserError, match="names no token for the end of a text"):
        _ = tokenizer.end


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
