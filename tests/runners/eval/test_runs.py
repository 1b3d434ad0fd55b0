"""`mixassay eval --model runs:FILE`: every run of a sweep's table whose weights are kept, and no other."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mixassay.runners.eval import session
from mixassay.runners.store import Store

SWEEP = """
version: 1
name: two
task: {name: text, files: [text], tokenizer: bytes, seq_len: 32, valid_examples: 1, test_examples: 1}
model: {n_layers: 1, d_model: 8, block: swiglu}
train: {loop: lm, steps: 1, batch_size: 2, lr: 0.001}
sweep: {grid: {mixer: [mamba2, linear_attention]}}
seeds: [0, 1]
run: {keep_weights: true}
"""
ASKED = ("--suite", "niah", "--tasks", "niah_single_1", "--lengths", "640", "--limit", "1", "--engine", "direct")


def lay_out(folder: Path) -> None:
    (folder / "text").mkdir()
    (folder / "text/a.txt").write_text("".join(f"Line {n} of {n * n}, the other one.\n" for n in range(200)))
    (folder / "two.yaml").write_text(SWEEP)


@pytest.fixture
def swept(place: Any) -> Any:
    lay_out(place.folder)
    return place


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of SWEEP, to be copied."""
    lay_out(folder := tmp_path_factory.mktemp("trained"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-P", "-m", "mixassay", "run", "two.yaml"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "results"


def test_tuning_runs_keep_no_weights(swept: Any) -> None:
    few = ("seeds=[0]", "sweep.grid.mixer=[linear_attention]")
    said = swept.run(
        "run", "two.yaml", *few, "sweep.select={axes: {train.lr: [1e-3, 1e-2]}, by: valid/loss, seeds: [9]}"
    )
    assert said.code == 0, said.err
    records = swept.records("two")
    assert sorted(r.role for r in records) == ["report", "tune", "tune"]
    kept = [path.stem for path in (swept.folder / "results/two/.weights").glob("*.safetensors")]
    assert kept == [r.key for r in records if r.role == "report"]


def test_all_kept_runs_of_a_sweep(swept: Any, trained: Path) -> None:
    none = swept.run("eval", "--model", "runs:two.yaml", *ASKED)
    assert (none.code, "no run of it is stored; `mixassay run two.yaml run.keep_weights=true`" in none.err) == (2, True)
    shutil.copytree(trained, swept.folder / "results")
    (lost,) = [r for r in swept.records("two") if (r.config["mixer"]["name"], r.seed) == ("linear_attention", 1)]
    (swept.folder / f"results/two/.weights/{lost.key}.safetensors").unlink()
    said = swept.run("eval", "--model", "runs:two.yaml", *ASKED)
    assert said.code == 0, said.err
    assert "mixer=linear_attention seed 1: left out, since its weights are not kept" in said.err
    found = [(r.config["mixer"]["name"], r.seed) for r in Store(swept.folder / "results").read("niah").records]
    assert sorted(found) == [("linear_attention", 0), ("mamba2", 0), ("mamba2", 1)]
    assert "niah_single_1" in said.out
    again = swept.run("eval", "--model", "runs:two.yaml", *ASKED)
    assert again.err.count("stored before") == 3


PLUGIN = """
import torch
from mixassay.mixers import Mixer, mixer

@mixer("stepless")
class Stepless(Mixer):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(d_model))

    def forward(self, x):
        return x.cumsum(1) * self.gain

@mixer("counting")
class Counting(Stepless):
    def init_state(self, batch):
        return self.gain.new_zeros(batch, len(self.gain)), 0

    def step(self, x, state):
        S, n = state
        return (S + x) * self.gain, (S + x, n + 1)
"""


def test_models_that_cannot_write_are_told_and_the_others_asked(swept: Any) -> None:
    swept.write(PLUGIN, "mine.py")
    few = ("seeds=[0]", "sweep.grid.mixer=[stepless,counting,mamba2]", "plugins=[mine.py]")
    assert swept.run("run", "two.yaml", *few).code == 0
    swept.write(
        SWEEP.replace("[mamba2, linear_attention]", "[stepless, counting, mamba2]") + "plugins: [mine.py]\n",
        "three.yaml",
    )
    said = swept.run("eval", "--model", "runs:three.yaml", *ASKED)
    assert said.code == 3
    assert "mixer=stepless seed 0: stepless has no recurrent form (init_state and step)" in said.err
    assert "mixer=counting seed 0: the state of counting holds int" in said.err
    assert "Traceback" not in said.err
    assert [r.config["mixer"]["name"] for r in Store(swept.folder / "results").read("niah").records] == ["mamba2"]


def test_ctrl_c_says_how_to_go_on(swept: Any, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(trained, swept.folder / "results")
    monkeypatch.setattr(session, "jobs", lambda *_: signal.raise_signal(signal.SIGINT))
    said = swept.run("eval", "--model", "runs:two.yaml", *ASKED)
    assert said.code == 130
    assert "stopped: all sets before are kept, and the same command goes on behind them" in said.err


def test_stored_runs_of_other_settings_are_not_denied(swept: Any, trained: Path) -> None:
    shutil.copytree(trained, swept.folder / "results")
    swept.write(SWEEP.replace("steps: 1", "steps: 2"), "two.yaml")
    said = swept.run("eval", "--model", "runs:two.yaml", *ASKED)
    assert said.code == 2
    assert "none of the 4 stored runs of it has the file's settings (--model run:KEY takes any)" in said.err
