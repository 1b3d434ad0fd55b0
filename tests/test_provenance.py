import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mixassay import provenance
from mixassay.errors import UserError
from mixassay.spec import RunSpec


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A small package in the place of ours."""
    files = {
        "__init__.py": "",
        "model.py": "import mixassay.parts.norm",
        "runners/__init__.py": "",
        "runners/train.py": "from mixassay import model",
        "parts/__init__.py": "",
        "parts/norm.py": "",
        "parts/late.py": "",
        "tasks/__init__.py": "",
        "tasks/copying.py": "",
        "mixers/__init__.py": "",
        "mixers/one.py": "from ..parts import norm\nimport os, torch.nn",
        "mixers/two.py": "def f():\n    from mixassay.parts.late import g",
    }
    root = tmp_path / "src" / "mixassay"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(provenance, "PACKAGE", root)
    return root


def spec(mixer: str, task: str = "copying", hybrid: str | None = None) -> RunSpec:
    model = {"hybrid": {"name": hybrid}} if hybrid else {}
    parts = {"task": {"name": task}, "mixer": {"name": mixer}, "model": model, "train": {"steps": 1}}
    return RunSpec.model_validate({"suite": "s", "seed": 0, **parts})


def test_the_closure_follows_imports_in_functions_relative_ones_and_parents(package):
    assert list(provenance.closure(["mixassay.mixers.one"])) == [
        "mixassay",
        "mixassay.mixers",
        "mixassay.mixers.one",
        "mixassay.parts",
        "mixassay.parts.norm",
    ]
    assert "mixassay.parts.late" in provenance.closure(["mixassay.mixers.two"])


def test_an_edit_moves_the_hash_of_the_cells_that_use_the_file_and_no_others(package):
    def hashes() -> dict[str, str]:
        runs = {"one": spec("one"), "two": spec("two"), "hybrid": spec("one", hybrid="two")}
        return {name: provenance.source_of(run) for name, run in runs.items()}

    def moved(file: str) -> set[str]:
        before = hashes()
        (package / file).write_text((package / file).read_text() + "\n# edited")
        after = hashes()
        return {name for name in before if before[name] != after[name]}

    assert hashes() == hashes()
    assert moved("mixers/two.py") == {"two", "hybrid"}
    assert moved("parts/late.py") == {"two", "hybrid"}
    assert moved("parts/norm.py") == {"one", "two", "hybrid"}  # the model imports it
    assert moved("tasks/copying.py") == {"one", "two", "hybrid"}
    (package / "mixers" / "three.py").write_text("")
    assert moved("mixers/three.py") == set()


def test_plugins_count_by_content_and_only_where_they_are_used(package, tmp_path):
    plugins = [tmp_path / "ema.py", tmp_path / "other.py"]
    plugins[0].write_text("import beside\n@mixer('ema')\nclass EMA: ...")
    plugins[1].write_text("@mixers.mixer('other')\nclass Other: ...")
    beside = tmp_path / "beside.py"
    beside.write_text("")
    before = [provenance.source_of(spec(name), plugins) for name in ("one", "ema", "other", "computed")]
    beside.write_text("x = 1")
    after = [provenance.source_of(spec(name), plugins) for name in ("one", "ema", "other", "computed")]
    assert [a != b for a, b in zip(before, after, strict=True)] == [False, True, False, True]


def test_a_root_that_does_not_exist_is_an_error(package):
    with pytest.raises(UserError, match="no such module"):
        provenance.source_hash(["mixassay.mixers.nowhere"])


def test_our_own_trainer_can_be_hashed():
    files = provenance.closure(provenance.HARNESS["stack"])
    assert {"mixassay.model", "mixassay.runners.train", "mixassay.registry"} <= set(files)
    assert not any(re.search(r"mixers\.(attention|mamba2)$", name) for name in files), "the trainer imports a mixer"


def git(folder: Path, *args: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", folder, *identity, *args], check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_dirty_flag_and_patch_of_the_packages_own_checkout(package, tmp_path):
    def checkout() -> tuple[str, str | None]:
        provenance._checkout.cache_clear()
        return provenance._checkout()

    try:
        assert checkout() == ("none", None)
        git(tmp_path, "init", "-q")
        assert checkout() == ("none", None), "a repository around an untracked package is not its checkout"
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-qm", "first")
        commit, patch = checkout()
        assert re.fullmatch("[0-9a-f]{40}", commit)
        assert patch is None
        (tmp_path / "results").mkdir()
        (tmp_path / "results" / "new.jsonl").write_text("{}")
        (tmp_path / "README.md").write_text("text")
        assert checkout() == (commit, None), "results and texts do not make code dirty"
        (package / "model.py").write_text("x = 1")
        first = checkout()
        assert first[0] == commit
        assert first[1] is not None
        (package / "mixers" / "new.py").write_text("")
        assert checkout()[1] not in (None, first[1]), "a new file of code is part of the patch"
        (package / "mixers" / "new.py").unlink()
        assert checkout() == first, "the same state has the same hash"
        (package / "model.py").unlink()
        assert checkout()[1] not in (None, first[1])
    finally:
        provenance._checkout.cache_clear()


def test_the_environment_names_versions_and_itself():
    env = provenance.environment("cpu", threads=1)
    assert env["class"] == provenance.env_class("cpu")
    assert re.fullmatch(r"cpu, torch \d+\.\d+", str(env["class"]))
    assert re.fullmatch("[0-9a-f]{8}", str(env["id"]))
    assert env["threads"] == 1
    assert env["python"] == ".".join(map(str, sys.version_info[:3]))
    assert env["id"] != provenance.environment("cpu", threads=2)["id"]
    assert env["id"] == provenance.environment("cpu", threads=1)["id"]


def test_reading_and_reporting_import_nothing_heavy():
    names = "record provenance runners.store runners.stats runners.report runners.render runners.export"
    imports = "; ".join(f"import mixassay.{name}" for name in [*names.split(), "runners.published"])
    work = "from mixassay.runners import published, stats; published.load('log-linear-mqar'); stats.quantile(4)"
    heavy = "print(sorted({'torch', 'numpy', 'scipy', 'triton'} & set(sys.modules)))"
    command = [sys.executable, "-P", "-c", f"import sys; {imports}; {work}; {heavy}"]
    source = str(Path(provenance.__file__).parent.parent)
    done = subprocess.run(command, env={"PYTHONPATH": source}, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
