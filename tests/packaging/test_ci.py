"""CI runs what the README tells people to run, and the constraints pin what is asked for."""

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_ci_runs_the_readmes_test_command_as_it_is_written() -> None:
    readme = (ROOT / "README.md").read_text()
    commands = [line for block in re.findall(r"```sh\n(.*?)```", readme, re.S) for line in block.splitlines()]
    (command,) = [line for line in commands if re.search(r"\bpytest\b", line)]
    ci = (ROOT / ".ci/run").read_text()
    assert [line for line in ci.splitlines() if line == command], f"not a line of .ci/run: {command}"


def test_ci_is_sound_bash_that_can_be_run() -> None:
    script = ROOT / ".ci/run"
    assert script.stat().st_mode & 0o111
    assert "set -euo pipefail" in script.read_text()
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0


def test_every_direct_dependency_is_pinned_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    pins = re.findall(r"^([\w.-]+)==\S+$", (ROOT / "constraints.txt").read_text(), re.M)

    def names(words: list[str]) -> list[str]:
        return sorted(re.split(r"[<>=;\[ ]", word)[0].lower() for word in words)

    assert names(pins) == names(asked)
    assert "torch==2.13.0\n" in (ROOT / "constraints.txt").read_text()


def test_what_tests_want_is_installed_where_they_count() -> None:
    """A package that is not asked for skips its tests everywhere, and nobody sees it: what `importorskip` names is a
    development dependency, or its tests need a GPU."""
    wanted = {
        word.split(".")[0].replace("_", "-")
        for file in (ROOT / "tests").rglob("*.py")
        for word in re.findall(r"""importorskip\(\s*["']([\w.]+)""", file.read_text())
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {re.split(r"[<>=;\[ ]", word)[0] for word in project["optional-dependencies"]["dev"]}
    assert wanted - asked == {"fla", "mixassay"}
