"""Weights that were kept are the trained model: it answers the test questions as the run did, to the last bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import mixassay
from mixassay.errors import UserError
from mixassay.record import RunRecord
from mixassay.runners import train
from mixassay.runners.evaluate import evaluate, questions
from mixassay.runners.stack import Stack
from mixassay.runners.store import Store
from mixassay.spec import RunSpec, Sections

TINY = Path(__file__).with_name("tiny.yaml").read_text()

SWEEP = (
    TINY.replace("mixer: attention\n", "").replace("slots: 1", "slots: 1, keep_weights: true")
    + "plugins: [noise.py]\nsweep: {grid: {mixer: [mamba2, noise], model.positions: [none, learned]}}\n"
)

NOISE = """\
import torch
from torch import nn
from mixassay.mixers import Mixer, mixer


@mixer("noise")
class Noise(Mixer):
    \"\"\"A mixer with random buffers, one of which is no part of the state dict.\"\"\"

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.proj = nn.Linear(d_model, d_model)
        self.register_buffer("kept", torch.randn(d_model))
        self.register_buffer("left_out", torch.randn(d_model), persistent=False)

    def forward(self, x):
        return self.proj(x.cumsum(1) * self.kept + self.left_out)
"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept")
    (folder / "tiny.yaml").write_text(SWEEP)
    (folder / "noise.py").write_text(NOISE)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-P", "-m", "mixassay", "run", "tiny.yaml"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def runs(folder: Path) -> list[RunRecord]:
    return Store(folder / "results").read("tiny").records


def test_the_model_of_every_run_answers_as_it_did(kept: Path) -> None:
    assert len(runs(kept)) == 8
    for record in runs(kept):
        model = mixassay.load(record.key, kept / "results", plugins=[str(kept / "noise.py")])
        assert not model.training
        stack = Stack([model], mode="loop")  # type: ignore[list-item]
        assert stack.weights_digest(0) == record.weights
        task = Sections.model_validate(record.config, strict=False).task
        (valid,) = evaluate(stack, questions(task, "valid", "cpu"), "valid", [0])
        (test,) = evaluate(stack, questions(task, "test", "cpu"), "test", [0])
        for measured, stored in zip(valid + test, record.eval, strict=True):
            assert measured["accuracy"] == stored.accuracy
            assert measured["loss"] == pytest.approx(stored.loss, rel=1e-6)  # side by side, sums differ in last bits


def test_a_file_and_the_start_of_a_key_will_do(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = next(run for run in runs(kept) if run.config["mixer"]["name"] == "mamba2")
    monkeypatch.chdir(kept)
    state = torch.random.get_rng_state()
    models = [mixassay.load(run) for run in (record.key[:10], f"results/tiny/.weights/{record.key}.safetensors")]
    assert torch.equal(torch.random.get_rng_state(), state), "loading draws from nobody's generator"
    for name, tensor in models[0].state_dict().items():
        assert torch.equal(tensor, models[1].state_dict()[name])
    tokens = torch.arange(12).view(2, 6)
    assert models[0](tokens).shape == (2, 6, 64)
    assert (kept / "results/tiny/.weights/.gitignore").read_text() == "*\n"


def test_a_run_of_a_plug_in_names_what_is_missing(kept: Path) -> None:
    record = next(run for run in runs(kept) if run.config["mixer"]["name"] == "noise")
    code = f"import mixassay; mixassay.load({record.key!r}, {str(kept / 'results')!r})"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True)
    assert 'its mixer "noise" is not registered; name the file or module' in done.stderr


def test_what_cannot_be_loaded_is_told(kept: Path, tmp_path: Path) -> None:
    results = kept / "results"
    for run, message in [
        ("nowhere.safetensors", "no such file; give one, or at least 4 letters of a run's key"),
        ("ffffffff", r"no weights of such a run under .*run.keep_weights=true"),
    ]:
        with pytest.raises(UserError, match=message):
            mixassay.load(run, results)
    noise = next(run for run in runs(kept) if run.config["mixer"]["name"] == "noise")
    whole = (results / "tiny/.weights" / f"{noise.key}.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-10])
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        mixassay.load(tmp_path / "cut.safetensors")


def test_code_that_has_changed_is_a_warning_and_another_model_an_error(kept: Path, tmp_path: Path) -> None:
    record = next(run for run in runs(kept) if run.config["mixer"]["name"] == "mamba2")
    path = kept / "results/tiny/.weights" / f"{record.key}.safetensors"
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["mixassay"])

    def with_header(text: str) -> Path:
        save_file(load_file(path), tmp_path / "edited.safetensors", {"mixassay": text})
        return tmp_path / "edited.safetensors"

    with pytest.warns(UserWarning, match="was trained by other code than this"):
        mixassay.load(with_header(json.dumps(about | {"source": "0123"})))
    wider = json.loads(json.dumps(about))
    wider["config"]["model"]["d_model"] = 16
    with pytest.raises(UserError, match=r"12 tensors differ, .* is \[272\] in the file and \[288\] here"):
        mixassay.load(with_header(json.dumps(wider)))
    save_file(load_file(path), tmp_path / "bare.safetensors")
    with pytest.raises(UserError, match="was not written by `mixassay run`"):
        mixassay.load(tmp_path / "bare.safetensors")


def test_weights_are_kept_before_a_checkpoint_forgets_them(tmp_path: Path) -> None:
    """A member that has finished is in no later checkpoint: whenever the process dies, its weights were written."""
    spec = RunSpec.model_validate_json(
        '{"suite": "t", "seed": 0, "mixer": {"name": "attention"}, "model": {"d_model": 8},'
        ' "task": {"name": "mqar", "vocab_size": 32, "seq_len": 16, "num_kv": 2},'
        ' "train": {"steps": 4, "batch_size": 4}}'
    )
    seen: list[tuple[RunSpec, bool]] = []
    state = tmp_path / "ck/state.json"

    def keep(spec: RunSpec, tensors: dict[str, torch.Tensor]) -> None:
        seen.append((spec, state.exists()))
        assert tensors["embedding.weight"].shape == (32, 8)

    (outcome,) = train.run([spec], checkpoint=tmp_path / "ck", keep=keep)
    assert seen == [(outcome.spec, False)]
