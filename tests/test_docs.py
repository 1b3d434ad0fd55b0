"""What a page shows works as it stands there: its blocks are run in order, in one empty folder for the page.

    ```sh              run by bash, which stops at the first command that fails
    ```console         `$ ` in front of a command, its output below; `...` stands for any text within a line
    ```python, yaml    with a file's name behind (```python ema.py): written there; without: run, or parsed
    ```sh not-run      shown only: for what takes a network or a GPU, and rare

Other kinds of blocks are texts.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGES = ("docs/your-mixer.md",)
RUN = ("sh", "console", "python", "yaml")
MOST_NOT_RUN = 2


class Block(NamedTuple):
    kind: str
    rest: str
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    found = re.finditer(r"^```(\w+)[ ]*([^\n]*)\n(.*?)^```$", text, re.M | re.S)
    return [Block(m[1], m[2], m[3], text[: m.start()].count("\n") + 1) for m in found]


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder with the commands that a reader has, `mixassay`, `python` and `pytest`, of this checkout."""
    folder = tmp_path / "bin"
    folder.mkdir()
    plugin = "-m pytest -p mixassay.runners.pytest_plugin -p no:cacheprovider"
    for name, words in (("mixassay", "-P -m mixassay"), ("python", "-P"), ("pytest", f"-P {plugin}")):
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_the_page_works_as_it_stands(page: str, tmp_path: Path, commands: Path) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    for block in blocks(page):
        if block.kind in RUN and block.rest != "not-run":
            run(block, f"{page}:{block.line}", folder, commands)


@pytest.mark.parametrize("page", PAGES)
def test_few_blocks_are_not_run(page: str) -> None:
    found = [block for block in blocks(page) if block.kind in RUN]
    assert sum(block.rest == "not-run" for block in found) <= MOST_NOT_RUN < len(found)


def run(block: Block, where: str, folder: Path, commands: Path) -> None:
    if block.kind == "sh":
        said = shell(block.text, folder, commands)
        assert said.returncode == 0, f"{where}\n{said.stdout}"
    elif block.kind == "console":
        for command, shown in dialogue(block.text):
            said = shell(command, folder, commands)
            found = said.stdout.rstrip("\n")
            assert alike(found, shown), f"{where}: {command}\n--- said\n{found}\n--- shown\n{shown}"
    elif block.rest:
        (folder / block.rest).write_text(block.text)
    elif block.kind == "yaml":
        yaml.safe_load(block.text)
    else:
        said = subprocess.run(
            [sys.executable, "-P", "-c", block.text],
            cwd=folder,
            env=environment(commands),
            capture_output=True,
            text=True,
        )
        assert said.returncode == 0, f"{where}\n{said.stdout}{said.stderr}"


def shell(text: str, folder: Path, commands: Path) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-euo", "pipefail", "-c", text]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(commands),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def environment(commands: Path) -> dict[str, str]:
    path = os.pathsep.join([str(commands), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "100", "TERM": "dumb"}


def dialogue(text: str) -> list[tuple[str, str]]:
    """(command, output shown below it) of a console block."""
    parts = re.split(r"^\$ ", text, flags=re.M)
    assert not parts[0].strip(), "a console block begins with a command"
    return [(command, shown.rstrip("\n")) for command, _, shown in (part.partition("\n") for part in parts[1:])]


def alike(found: str, shown: str) -> bool:
    """Whether every line is as shown; a part of a line that is shown as `...` may be anything, nothing included."""
    pattern = "\n".join(".*".join(map(re.escape, re.split(r" ?\.\.\.", line))) for line in shown.split("\n"))
    return re.fullmatch(pattern, "\n".join(line.rstrip() for line in found.split("\n"))) is not None


def test_the_mechanism_can_fail(tmp_path: Path, commands: Path) -> None:
    assert alike("a 1 b\nc", "a ... b\nc")
    assert alike("pass shape", "pass shape ...")
    assert not alike("a 1 b\nd", "a ... b\nc")
    assert not alike("a\nb", "a ...")
    assert dialogue("$ echo 1\n1\n$ true\n") == [("echo 1", "1"), ("true", "")]
    for block in (
        Block("sh", "", "false\ntrue\n", 1),
        Block("console", "", "$ echo 1\n2\n", 1),
        Block("python", "", "assert False\n", 1),
    ):
        with pytest.raises(AssertionError, match=r"page\.md:1"):
            run(block, "page.md:1", tmp_path, commands)
    with pytest.raises(yaml.YAMLError):
        run(Block("yaml", "", "a: [\n", 1), "page.md:1", tmp_path, commands)


def test_the_mixer_shown_is_the_one_that_new_writes() -> None:
    (shown,) = (block.text for block in blocks("docs/your-mixer.md") if block.rest == "my_mixer.py")
    assert shown == (ROOT / "runners/scaffold/my_mixer.py").read_text()
