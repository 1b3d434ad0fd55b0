"""A model of the Hugging Face library through the whole path; skipped where transformers is not installed."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = [pytest.mark.usefixtures("offline"), pytest.mark.filterwarnings("default")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama of one layer over bytes, with positions for 1024 tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({sign: i for i, sign in enumerate(["</s>", *alphabet])}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="</s>")
    fast.save_pretrained(tmp_path / "llama")
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=1024, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_needles(place: Any, folder: Path) -> None:
    words = ["--suite", "niah", "--tasks", "niah_single_1", "--limit", "2", "--seeds", "1,2", "--json"]
    said = place.run("eval", "--model", f"hf:{folder}", *words, "--lengths", "1K")
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert [(one["model"], one["seed"], one["samples"]) for one in found] == [("hf:llama", 1, 2), ("hf:llama", 2, 2)]
    said = place.run("eval", "--model", f"hf:{folder}", *words, "--lengths", "2K")
    assert said.code == 4
    assert "are more than the model's length 1024" in said.err
