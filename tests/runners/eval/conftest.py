"""Tiny language models as kept runs, and what they may be asked without any data."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mixassay.model import Model, build
from mixassay.provenance import source_of
from mixassay.runners import weights
from mixassay.spec import MixerSpec, ModelSpec, RunSpec

SPEC = {"n_layers": 2, "d_model": 16, "block": "swiglu", "init_std": 0.5}
Kept = Callable[..., str]


@pytest.fixture
def tiny() -> Callable[..., Model]:
    """A model of 257 tokens and two layers. Its embeddings are large enough for answers that are not one letter."""

    def make(mixer: str, positions: int = 0, seed: int = 0, **args: Any) -> Model:
        learned = {"positions": "learned"} if positions else {}
        torch.manual_seed(seed)
        spec = ModelSpec.model_validate({**SPEC, **learned})
        return build(spec, MixerSpec.model_validate({"name": mixer, **args}), 257, positions or 1)

    return make


@pytest.fixture
def kept(tmp_path: Path, tiny: Callable[..., Model]) -> Kept:
    """Keeps a tiny model's weights under tmp_path/results, as a training run does; returns its key."""

    def keep(mixer: str, seed: int = 0, positions: int = 0) -> str:
        learned = {"positions": "learned"} if positions else {}
        spec = RunSpec.model_validate(
            {
                "suite": "lm",
                "seed": seed,
                "task": {"name": "text", "files": ["text.txt"], "tokenizer": "bytes"},
                "mixer": {"name": mixer},
                "model": {**SPEC, **learned},
                "train": {"steps": 1},
            }
        )
        model = tiny(mixer, positions, seed)
        key = f"{mixer.replace('_', '')}{seed:04d}"
        weights.save(tmp_path / "results", spec, key, source_of(spec), dict(model.named_parameters()))
        return key

    return keep


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever opens a connection fails."""

    def refuse(*_: Any) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of data with questions for qa_1 and qa_2, short enough for 2048 bytes."""
    folder = tmp_path / "data"
    paragraphs = [
        {"context": f"Number {i} is green.", "qas": [{"question": f"What is {i}?", "answers": [{"text": "green"}]}]}
        for i in range(100)
    ]
    items = [
        {
            "question": f"Which one is about {i}3?",
            "answer": f"Document {i}3",
            "context": [[f"Title {i}{j}", [f"Document {i}{j} is about {i}{j}."]] for j in range(10)],
            "supporting_facts": [[f"Title {i}3", 0]],
        }
        for i in range(9)
    ]
    for name, content in (("squad", {"data": [{"paragraphs": paragraphs}]}), ("hotpotqa", items)):
        (folder / name).mkdir(parents=True)
        (folder / name / "some.json").write_text(json.dumps(content))
    return folder
