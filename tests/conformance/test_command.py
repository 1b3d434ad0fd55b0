"""`mixassay check`, its records and table, and the same checks as tests of pytest."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mixassay.errors import UserError
from mixassay.runners import cli, pytest_plugin
from mixassay.runners.conformance.records import table

HERE = Path(__file__).parent
BROKEN = HERE / "broken.py"


def run(*words: str) -> Result:
    cli.load_verbs()
    return CliRunner().invoke(cli.app, ["check", *words])


def test_lines_and_exit_code() -> None:
    said = run(f"{BROKEN}:LooksAhead", "--only", "causality,batch,lengths,packed")
    assert said.exit_code == 1
    lines = [line.split() for line in said.output.splitlines()]
    assert lines[1][:6] == ["fail", "causality", "y[0,", "15]", "moves", "by"]
    assert lines[2] == ["smallest", "failing", "input:", "x", "[1,", "17,", "16]", "=", "0"]
    assert lines[3] == ["not", "judged", "lengths", "needs", "causality"]
    assert lines[4] == ["pass", "batch"]
    assert run(f"{BROKEN}:Sound", "--only", "causality,batch").exit_code == 0


def test_json_records_and_the_table(tmp_path: Path) -> None:
    said = run("base_conv", "conv=5", "--json", "--only", "state_size,packed", "--out", str(tmp_path))
    assert said.exit_code == 0
    records = [json.loads(line) for line in said.stdout.splitlines()]
    assert [(r["check"], r["status"]) for r in records] == [("packed", "not offered"), ("state_size", "pass")]
    assert records[1]["args"] == {"conv": 5}
    assert records[1]["measured"] == {"law": "constant", "bytes at T=128": 4 * 4 * 16}
    assert [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()] == records
    written = (tmp_path / "TABLE.md").read_text()
    assert written == table(records)
    assert "| packed | – |" in written
    assert "law constant, bytes at T=128 256" in written


def test_mistakes_are_one_line() -> None:
    for words, message in [
        (("nothing",), 'unknown mixer "nothing"'),
        (("attention", "--device", "tpu"), "cpu, cuda or cuda:N, got tpu"),
        (("all", "heads=2"), "all: arguments are for one mixer"),
        (("attention", "--only", "speed"), 'unknown check "speed"'),
    ]:
        problem = run(*words).exception
        assert isinstance(problem, UserError)
        assert message in str(problem)


def pytest_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pytest", "-p", "mixassay.runners.pytest_plugin", "-q", *words]
    path = os.pathsep.join([str(HERE.parents[1] / "src"), str(folder)])
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": path}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(BROKEN.read_text())
    (tmp_path / "test_own.py").write_text("def test_own(): pass\n")
    return tmp_path


def test_pytest_runs_the_checks_beside_other_tests(folder: Path) -> None:
    said = pytest_in(folder, "--mixassay-mixer", "mine:LooksAhead", "-k", "causality or packed or own", "-rfs")
    assert said.returncode == 1, said.stdout + said.stderr
    assert "mine:LooksAhead::causality" in said.stdout
    assert "smallest failing input: x [1, 17, 16] = 0" in said.stdout
    assert "forward has no argument cu_seqlens" in said.stdout
    assert "1 failed, 1 passed, 1 skipped" in said.stdout


def test_pytest_without_the_option_imports_nothing(folder: Path) -> None:
    (folder / "test_own.py").write_text("import sys\ndef test_own(): assert 'torch' not in sys.modules\n")
    said = pytest_in(folder)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "1 passed" in said.stdout


def test_pytest_names_a_mixer_that_is_not_there() -> None:
    options = {"mixassay_mixer": [f"{BROKEN}:Nothing"], "mixassay_device": "cpu"}
    config: Any = SimpleNamespace(getoption=options.__getitem__)
    with pytest.raises(pytest.UsageError, match="name one of the mixers of"):
        pytest_plugin.pytest_collection_modifyitems(Any, config, [])  # type: ignore[arg-type]


def test_the_committed_table_is_that_of_the_committed_records() -> None:
    folder = HERE.parents[1] / "results" / "conformance"
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    assert (folder / "TABLE.md").read_text() == table(records)
    assert not [r for r in records if r["status"] in ("fail", "not judged")]
