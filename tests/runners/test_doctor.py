"""What doctor says of good and bad machines."""

import importlib.metadata
import json
import shutil
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from mixassay.runners import doctor


def states(folder: Path) -> dict[str, str]:
    return {finding.what: finding.state for finding in doctor.examine(folder)}


def test_a_sound_installation(place: Any) -> None:
    said = place.run("doctor", "--json", "--results", "new/results")
    found = {finding["what"]: finding for finding in json.loads(said.out)}
    assert {"python", "torch", "cpu", "results", "disk", "git"} <= set(found)
    assert said.code == (1 if any(finding["state"] == "wrong" for finding in found.values()) else 0)
    assert found["torch"]["state"] == found["results"]["state"] == "ok"
    assert not (place.folder / "new").exists(), "looking leaves nothing behind"


def test_results_that_cannot_be_written_and_how_to_mend_it(place: Any) -> None:
    (place.folder / "results").write_text("a file\n")
    said = place.run("doctor")
    assert said.code == 1
    assert "cannot be written" in said.out
    assert "--results" in said.out


def test_a_disk_that_is_nearly_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 2**40 - 2**20, 2**20))
    assert states(tmp_path)["disk"] == "wrong"


def test_a_torch_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    (finding,) = [finding for finding in doctor.examine(tmp_path) if finding.what == "torch"]
    assert finding == ("wrong", "torch", "2.9.1+cpu", "pip install 'torch>=2.10'")


def test_a_torch_that_cannot_be_imported(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # `import torch` then raises ImportError
    said = place.run("doctor")
    assert said.code == 1
    assert "cannot be imported" in said.out
    assert "pip install torch" in said.out


def test_a_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name == "scipy":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    (finding,) = [finding for finding in doctor.examine(tmp_path) if finding.what == "scipy"]
    assert finding == ("wrong", "scipy", "not installed", "pip install scipy")


def test_a_device_that_torch_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "accelerator_possible", lambda: True)
    assert states(tmp_path)["cuda"] == "wrong"


def test_large_checkpoints_left_behind(tmp_path: Path) -> None:
    left = tmp_path / "tiny/.checkpoints/abc/state"
    left.mkdir(parents=True)
    (left / "step-1.safetensors").write_bytes(b"x" * 2**21)
    (finding,) = [finding for finding in doctor.examine(tmp_path) if finding.what == "checkpoints"]
    assert "2 MiB" in finding.found
    assert str(tmp_path / "tiny/.checkpoints") in finding.mend
