"""The benchmark of training steps: checked before it is timed, in a table and in verdicts."""

import json
from typing import Any

import pytest
import torch

from mixassay.mixers import mixer
from mixassay.runners import bench_report, bench_train, diff_bench
from mixassay.runners.bench_train import Setting
from mixassay.runners.training import Training

TINY = bench_train.QUICK | {"T": 8, "pairs": (1,), "budget": 1e-4}


def setting(*names: str, **more: Any) -> Setting:
    return Setting(torch.device("cpu"), names, **TINY | more)


@pytest.mark.parametrize("name", ["attention", "mamba2", "gated_deltanet", "base_conv"])
def test_ours_and_the_plain_loop_are_measured(name):
    ours, loop = list(bench_train.bench_train(setting(name)))
    assert json.loads(json.dumps([ours, loop], allow_nan=False)) == [ours, loop]
    assert (ours["ours"], loop["ours"]) == (True, False)
    assert not bench_train.failed(ours), ours
    assert [*bench_report.stacks_of(ours)] == [1, 2]
    for part in (ours["stack 1"], ours["stack 2"], loop["step"]):
        assert part["status"] == "ok", part["reason"]
        assert part["ms"] > 0
    assert all(error < 1e-4 for error in ours["stack 2"]["errors"].values())


@pytest.mark.parametrize("name", mixer.names())
def test_every_mixer_has_a_model(name):
    for d_model in (16, 64):
        (spec,) = bench_train.specs(setting(name), name, d_model, 1, 1)
        assert spec.model.d_model == d_model
    Training(bench_train.specs(setting(name), name, 16, 1, 1), "cpu")


def shifted(loss: torch.Tensor) -> torch.Tensor:
    return loss + 0.1


def scaled(loss: torch.Tensor) -> torch.Tensor:
    """The same loss with another gradient."""
    return loss.detach() + 1.1 * (loss - loss.detach())


@pytest.mark.parametrize(("wrong", "name"), [(shifted, "loss"), (scaled, "gradient")])
def test_what_is_wrong_is_not_timed(wrong, name, monkeypatch):
    usual = bench_train.usual_loss
    monkeypatch.setattr(bench_train, "usual_loss", lambda *given: wrong(usual(*given)))
    (ours,) = bench_train.bench_train(setting("attention", stacks=(1,), baseline=False))
    assert ours["stack 1"]["status"] == "wrong"
    assert f"{name} differs from the plain model's" in ours["stack 1"]["reason"]
    assert bench_train.failed(ours)


def record(ours: bool, **parts: float) -> dict[str, Any]:
    def part(ms: float) -> dict[str, Any]:
        return {"status": "ok", "reason": None, **dict.fromkeys(("ms", "ms_min", "ms_p20", "ms_p80"), ms), "n": 5}

    env = {"class": "GPU X", "device": "GPU X", "cpu": "Y", "torch": "2.11.0", "triton": "3.6.0", "id": "e"}
    code = {"commit": "c" * 40, "dirty": False, "patch": None, "source": "s" * 16, "version": "0.1.0"}
    about = {"mixer": "attention", "d_model": 64, "pairs": 4, "T": 256, "B": 256, "vocab_size": 8192, "time": "t"}
    told = {"implementation": "mixassay" if ours else "plain loop", "precision": "bf16" if ours else "fp32"}
    measured = {name.replace("_", " "): part(ms) for name, ms in parts.items()}
    return {"bench": "train", "schema": 1, "ours": ours, "code": code, "env": env, **about, **told, **measured}


def test_the_table_has_the_ratio_to_the_plain_loop():
    (grid,) = bench_report.tables([record(True, stack_1=2.0, stack_20=0.5), record(False, step=10.0)])
    assert [head[0] for head in grid.heads] == ["mixer", "d_model", "plain loop", "stack of 1", "stack of 20"]
    ((name, width, loop, one, twenty),) = grid.rows
    assert (name.text, width.text, loop.text, one.text, twenty.text) == ("attention", "64", "10", "2", "0.5")
    assert (one.mark, twenty.mark) == ("(5)", "(20)")


def test_the_table_keeps_what_a_later_run_left_out():
    """A run of other stacks once hid what an earlier one had measured."""
    later = record(True, stack_20=0.4, stack_40=0.3) | {"time": "u"}
    runs = [later, record(True, stack_1=2.0, stack_20=0.5), record(False, step=10.0)]
    (grid,) = bench_report.tables(runs)
    assert [cell.text for cell in grid.rows[0][2:]] == ["10", "2", "0.4", "0.3"]


def test_a_table_for_each_precision():
    runs = [record(True, stack_1=2.0), record(True, stack_1=3.0) | {"precision": "tf32"}, record(False, step=9.0)]
    half, tf32 = bench_report.tables(runs)
    assert (half.rows[0][-1].text, tf32.rows[0][-1].text) == ("2", "3")
    assert "tf32" in tf32.title
    assert tf32.rows[0][-1].mark == "(3)"


def test_no_ratio_to_a_loop_of_other_code():
    loop = record(False, step=10.0)
    loop["code"] = loop["code"] | {"commit": "d" * 40}
    (grid,) = bench_report.tables([record(True, stack_1=2.0), loop])
    assert [(cell.text, cell.mark) for cell in grid.rows[0][2:]] == [("10", ""), ("2", "")]


def test_a_slower_stack_is_a_regression():
    base = [record(True, stack_20=0.5), record(False, step=10.0)]
    head = [record(True, stack_20=0.6), record(False, step=10.0)]
    (change,) = diff_bench.compare(base, head)
    assert change.verdict == "regressed"
    assert change.about[-1] == "stack 20"


def test_on_the_command_line(place):
    words = ["--mixer", "attention", "--quick", "--device", "cpu"]
    said = place.run("bench", "train", *words)
    assert said.code == 0, said.err
    assert "stack of 2" in said.out
    assert len((place.folder / "results/train/cpu-quick.jsonl").read_text().splitlines()) == 2
    assert 'Did you mean "attention"?' in place.run("bench", "train", "--mixer", "atention").err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", mixer.names())
def test_on_a_gpu(name):
    tiny: dict[str, Any] = bench_train.QUICK | {"precision": "bf16"}
    ours, loop = list(bench_train.bench_train(Setting(torch.device("cuda"), (name,), **tiny)))
    assert not bench_train.failed(ours), ours
    assert loop["step"]["status"] == "ok"
