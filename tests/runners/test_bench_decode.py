"""The benchmark of decoding: states after T tokens that were never stepped to, and steps that were found right."""

import json
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from mixassay.mixers import Mixer, mixer
from mixassay.runners import bench_decode
from mixassay.runners.bench_decode import Setting

CPU = torch.device("cpu")


def setting(*names: str, **more: Any) -> Setting:
    return Setting(CPU, names, **{"lengths": (8, 32), "d_model": 16, "batch": 2, "budget": 1e-4, **more})


@pytest.mark.parametrize("name", mixer.names())
def test_a_state_that_was_made_is_like_one_that_was_stepped_to(name: str) -> None:
    model, x = bench_decode.build(name, setting(name)), torch.zeros(2, 16)
    stepped = model.init_state(2)
    for _ in range(13):
        _, stepped = model.step(x, stepped)
    made = bench_decode.state_after(model, 13, 2)
    leaves, structure = pytree.tree_flatten(made)
    others, same = pytree.tree_flatten(stepped)
    assert structure == same
    for a, b in zip(leaves, others, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if not a.is_floating_point() and a.dim() == 1:  # one a sequence; what slots count depends on the tokens
            assert torch.equal(a, b), "counters stand where they would"


def test_a_window_is_cut_to_its_width() -> None:
    model = mixer["attention"](16, window=4, rope=True).requires_grad_(False)
    state = bench_decode.state_after(model, 9, 1)
    assert state["k"].shape[1] == 4
    assert state["position"].tolist() == [9]


@pytest.mark.parametrize("name", mixer.names())
def test_every_mixer_is_measured(name: str) -> None:
    records = list(bench_decode.bench_decode(setting(name)))
    assert json.loads(json.dumps(records, allow_nan=False)) == records
    assert [record["T"] for record in records] == [8, 32]
    model = bench_decode.build(name, setting(name))
    for record in records:
        assert record["status"] == "ok", record["reason"]
        assert record["error"] < bench_decode.LIMIT
        assert record["eager"]["ms"] > 0
        assert record["cuda_graph"]["status"] == "unsupported"
        assert record["state_bytes"] == model.state_bytes(record["T"])
        assert record["live_state_bytes"] == model.live_state_bytes(record["T"])


class Wrong(Mixer):
    """Its step forgets what its forward remembers."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model
        self.gain = torch.nn.Parameter(torch.ones(d_model))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * x.cumsum(1)

    def init_state(self, batch: int) -> torch.Tensor:
        return self.gain.new_zeros(batch, self.d_model)

    def step(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gain * x, state


def test_a_wrong_step_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_decode, "build", lambda *_: Wrong(16).requires_grad_(False))
    for record in bench_decode.bench_decode(setting("attention")):
        assert record["status"] == "wrong"
        assert "differs from forward" in record["reason"]
        assert "eager" not in record


def test_a_mixer_that_cannot_be_built_is_a_record() -> None:
    (record,) = bench_decode.bench_decode(setting("attention", d_model=200, lengths=(8,)))
    assert record["status"] == "unsupported"
    assert "heads" in record["reason"]


def test_heads_have_64_channels_where_a_mixer_asks() -> None:
    assert bench_decode.arguments("attention", 1024) == {"heads": 16}
    assert bench_decode.arguments("attention", 16) == {"heads": 1}
    assert bench_decode.arguments("mamba2", 1024) == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", mixer.names())
def test_on_a_gpu_steps_are_captured(name: str) -> None:
    chosen = Setting(torch.device("cuda"), (name,), **bench_decode.QUICK)
    for record in bench_decode.bench_decode(chosen):
        assert record["status"] == "ok", record["reason"]
        assert record["cuda_graph"]["status"] == "ok", record["cuda_graph"]
