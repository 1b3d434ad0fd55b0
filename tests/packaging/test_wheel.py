"""The built wheel holds what the tree holds, and works from anywhere."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("tasks", "mixers", "kernels", "runners", "configs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, without the network, so that the tree stays as it is."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    without = shutil.ignore_patterns("__pycache__", "*.egg-info", ".checkpoints")
    for name in ("src", *FOLDERS, "results/published"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=without)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_what_the_tree_holds(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tree = {f"mixassay/{path.name}" for path in (ROOT / "src/mixassay").iterdir() if path.is_file()}
    for folder in (*FOLDERS, "published"):
        kind = ".yaml" if folder in ("configs", "published") else ".py"
        inside = ROOT / ("results/published" if folder == "published" else folder)
        tree |= {f"mixassay/{folder}/{path.relative_to(inside)}" for path in inside.rglob(f"*{kind}")}
    page = [*ROOT.glob("runners/page/*.css"), *ROOT.glob("runners/page/*.js")]
    assert len(page) == 2
    tree |= {f"mixassay/{path.relative_to(ROOT)}" for path in page}
    tree |= {f"mixassay/{path.relative_to(ROOT)}" for path in ROOT.glob("runners/**/*.y*ml")}
    texts = [*ROOT.glob("tasks/ruler/data/*.txt")]
    assert len(texts) == 6
    tree |= {f"mixassay/{path.relative_to(ROOT)}" for path in texts}
    assert "mixassay/py.typed" in tree
    assert "mixassay/configs/quickstart.yaml" in tree
    assert held == tree


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel unpacked as an installer would, to be used with this environment's dependencies and no checkout."""
    site = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(site)
    return site


def mixassay(site: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    code = "import sys, mixassay; print(mixassay.__file__); from mixassay.runners.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(site), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[0].startswith(str(site)), done.stderr
    return done


def test_the_wheel_works_from_another_folder(site: Path, tmp_path: Path) -> None:
    entry = (site / next(site.glob("*.dist-info")) / "entry_points.txt").read_text()
    assert "mixassay = mixassay.runners.cli:main" in entry
    assert "mixassay.runners.pytest_plugin = mixassay.runners.pytest_plugin" in entry
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for words, expected in ((["list", "configs"], "quickstart"), (["--version"], f"mixassay {version}")):
        done = mixassay(site, tmp_path, *words)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout


def test_a_newcomers_mixer_is_checked_and_trained(site: Path, tmp_path: Path) -> None:
    """One file outside of any repository."""
    assert mixassay(site, tmp_path, "new", "mixer", "mine").returncode == 0
    done = mixassay(site, tmp_path, "check", "./mine.py:Mine", "--only", "shape,causality,recurrent")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  pass  ") == 3
    done = mixassay(site, tmp_path, "run", "mine.yaml", "train.steps=2", "--only", "mixer=mine", "--seeds", "0-1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mine decay=0.5" in done.stdout
