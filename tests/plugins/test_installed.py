"""Two packages as their authors would install them: a toy mixer and task, and the layers of flash-linear-attention."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GPU_LAYERS = {
    "GatedLinearAttention": {"num_heads": 2},
    "DeltaNet": {"num_heads": 2},
    "GatedDeltaNet": {"num_heads": 2, "head_dim": 32},
    "MultiScaleRetention": {"num_heads": 2},
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both packages, installed by pip into a folder of their own, without the network."""
    copy, site = tmp_path_factory.mktemp("packages"), tmp_path_factory.mktemp("site-packages") / "site-packages"
    for name in ("toy", "fla_layers"):
        shutil.copytree(HERE / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--target", str(site), str(copy / "toy"), str(copy / "fla_layers")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return site


def run(site: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(site)])
    env = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-P", "-m", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


SWEEP = """\
version: 1
name: toy
task: {name: toy_echo}
model: {d_model: 8, n_layers: 1}
train: {steps: 20, batch_size: 8}
mixer: {name: toy_gate, open: 1}
"""


def test_a_sweep_finds_them_by_name_and_checks_their_arguments(site: Path, tmp_path: Path) -> None:
    (tmp_path / "toy.yaml").write_text(SWEEP)
    said = run(site, tmp_path, "mixassay", "run", "toy.yaml")
    assert said.returncode == 0, said.stdout + said.stderr
    (file,) = (tmp_path / "results" / "toy").rglob("*.jsonl")
    (record,) = map(json.loads, file.read_text().splitlines())
    assert record["data"] == "toy_echo/3"
    assert record["state_bytes"] == {"6": 4 * 8}

    # Another file of the package is part of what the run depends on; a file that it does not import is not.
    (site / "toy_mixers" / "unrelated.py").write_text("x = 1\n")
    again = run(site, tmp_path, "mixassay", "run", "toy.yaml", "--plan")
    assert "0 runs to do" in again.stdout, again.stdout + again.stderr
    scan = site / "toy_mixers" / "scan.py"
    before = scan.read_text()
    scan.write_text(before + "\n# edited\n")
    edited = run(site, tmp_path, "mixassay", "run", "toy.yaml", "--plan")
    scan.write_text(before)
    assert "1 runs to do" in edited.stdout, edited.stdout + edited.stderr

    (tmp_path / "toy.yaml").write_text(SWEEP.replace("open: 1", "open: wide, outptu: none"))
    said = run(site, tmp_path, "mixassay", "validate", "toy.yaml")
    assert said.returncode == 2
    assert 'toy.yaml:6:31: toy_gate: mixer.open should be a number, got "wide"' in said.stderr
    assert 'unknown key "mixer.outptu". Did you mean "output"?' in said.stderr


def test_they_are_listed_and_the_toy_passes_every_check(site: Path, tmp_path: Path) -> None:
    listed = run(site, tmp_path, "mixassay", "list", "mixers")
    assert "toy_gate" in listed.stdout
    assert "plug-in of mixassay-toy" in listed.stdout
    said = run(site, tmp_path, "mixassay", "check", "toy_gate", "output=none", "--json", "--d-model", "8")
    results = {(r := json.loads(line))["check"]: r for line in said.stdout.splitlines()}
    wrong = {name: r for name, r in results.items() if r["status"] != "pass"}
    assert not wrong, "a mixer that offers everything passes everything"
    assert said.returncode == 0


FLA = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the kernels of flash-linear-attention need a GPU, and there is none"
)


@FLA
@pytest.mark.gpu
@pytest.mark.parametrize("layer", GPU_LAYERS)
def test_layers_of_flash_linear_attention(site: Path, tmp_path: Path, layer: str) -> None:
    pytest.importorskip("fla.layers", reason="needs flash-linear-attention: pip install 'mixassay[peers]'")
    arguments = f"arguments={json.dumps(GPU_LAYERS[layer])}"
    words = ("check", "fla", f"layer={layer}", arguments, "--d-model", "64", "--device", "cuda", "--json")
    said = run(site, tmp_path, "mixassay", *words, "--only", "shape,causality,batch,recurrent,prefill,stack,state_size")
    results = {(r := json.loads(line))["check"]: r for line in said.stdout.splitlines()}
    assert {name: r["status"] for name, r in results.items() if r["status"] != "pass"} == {"stack": "not offered"}


@pytest.mark.skipif(importlib.util.find_spec("fla") is not None, reason="flash-linear-attention is here")
def test_without_flash_linear_attention_one_mixer_is_missing_and_says_so(site: Path, tmp_path: Path) -> None:
    said = run(site, tmp_path, "mixassay", "check", "fla")
    assert said.returncode == 2
    assert "mixer fla: ModuleNotFoundError: No module named 'fla'" in said.stderr
