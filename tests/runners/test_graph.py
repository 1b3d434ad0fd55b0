"""Steps that a GPU replays are the steps as written."""

import logging

import pytest
import torch

from mixassay.runners import graph
from mixassay.runners.graph import Replay
from mixassay.runners.training import End, Training
from mixassay.spec import RunSpec

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def spec(mixer: str, seed: int) -> RunSpec:
    given = {
        "task": {"name": "mqar", "vocab_size": 64, "seq_len": 32, "num_kv": 4, "valid_examples": 8, "test_examples": 8},
        "mixer": {"name": mixer},
        "model": {"d_model": 16, "hybrid": {"name": "base_conv"}, "dropout": 0.1},
        "train": {"steps": 12, "batch_size": 8, "lr": 0.01, "warmup": 0.2},
        "seed": seed,
        "suite": "test",
    }
    return RunSpec.model_validate(given)


def test_on_a_cpu_the_step_is_simply_called():
    seen = []
    Replay(lambda x, y: seen.append((x, y)), "cpu")(torch.ones(2), None)
    assert len(seen) == 1
    assert Replay(lambda x: x + 1, "cpu")(torch.ones(2)).tolist() == [2, 2]


def test_a_replay_says_when_its_inputs_may_be_overwritten():
    order = []
    Replay(lambda x: order.append("step"), "cpu")(torch.ones(2), taken=lambda: order.append("taken"))
    assert order == ["step", "taken"]


@gpu
@pytest.mark.gpu
def test_rows_drawn_ahead_are_those_of_their_step(monkeypatch):
    """Also when a member ends early, and its rows with it."""
    judge, ends = Training._judge, []

    def early(self, i, valid):
        end = judge(self, i, valid)
        return End(self.step, "early") if self.members[i].spec.seed == 1 and self.step == 6 else end

    monkeypatch.setattr(Training, "_judge", early)
    for ahead in (True, False):
        training = Training([spec("attention", seed) for seed in range(3)], "cuda")
        training.eval_every = 6
        if not ahead:
            training.ahead.stream = None
        while training.members:
            training.advance()
            training.settle()
        ends.append([(o.spec.seed, o.stopped, o.weights) for o in training.finished])
    assert ends[0] == ends[1]
    assert [stopped["step"] for _, stopped, _ in ends[0]] == [6, 12, 12]


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("mixer", ["attention", "linear_attention", "mamba2", "gated_deltanet"])
def test_training_by_graphs_is_training_as_written(mixer, monkeypatch):
    ends = []
    for warm in (graph.WARM, 1000):
        monkeypatch.setattr(graph, "WARM", warm)
        training = Training([spec(mixer, seed) for seed in range(3)], "cuda")
        for _ in range(12):
            training.advance()
        assert any(shape.graph for shape in training.replay.shapes.values()) == (warm < 1000)
        ends.append(training.stack.params.clone())
    assert torch.equal(*ends)


@gpu
@pytest.mark.gpu
def test_a_step_that_waits_for_the_device_runs_as_written(caplog):
    total = torch.zeros((), device="cuda")

    def step(x: torch.Tensor) -> None:
        if x.sum().item() > 0:
            total.add_(1)

    replay = Replay(step, "cuda")
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            replay(torch.ones(2, device="cuda"))
    assert total.item() == 6
    assert "runs as written" in caplog.text
