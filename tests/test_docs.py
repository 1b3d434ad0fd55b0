"""What a page shows works as it stands there: its blocks are run in order, in one empty folder for the page.

    ```sh                       run by bash, which stops at the first command that fails
    ```console                  `$ ` in front of a command, its output below
    ```yaml tiny.yaml           written to that file, as is ```python ema.py; without a name: parsed
    ```python                   run; the blocks of a page are one session. A ```text block behind is what it prints
    ```sh not-run: needs Ray    shown only, for that reason, and parsed: what takes a network, a GPU or minutes; rare

In an output `...` stands for any text within a line. Other kinds of blocks are texts.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parents[1]
RUN = ("sh", "console", "python", "yaml")
MOST_NOT_RUN = 2
FENCED = re.compile(r"^```(\w+)[ ]*([^\n]*)\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.M | re.S)
INTERPRETER = """
import contextlib, io, json, sys, traceback
names = {"__name__": "__main__"}
for line in sys.stdin:
    said, ok = io.StringIO(), True
    with contextlib.redirect_stdout(said):
        try:
            exec(json.loads(line), names)
        except BaseException:
            ok = False
            traceback.print_exc(file=sys.stdout)
    print(json.dumps([ok, said.getvalue()]), flush=True)
"""


class Block(NamedTuple):
    kind: str
    rest: str
    text: str
    line: int
    printed: str | None = None

    @property
    def shown_only(self) -> bool:
        return self.rest.startswith("not-run")


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    return [Block(m[1], m[2], m[3], text[: m.start()].count("\n") + 1, m[4]) for m in FENCED.finditer(text)]


ALL_PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
PAGES = [page for page in ALL_PAGES if any(block.kind in RUN for block in blocks(page))]


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


class Session:
    """A page's folder, its commands, and its Python, which starts with the first block that wants it."""

    def __init__(self, folder: Path, commands: Path) -> None:
        self.folder, self.commands = folder, commands
        self.python: subprocess.Popen[str] | None = None

    def execute(self, text: str) -> tuple[bool, str]:
        """Whether Python got through the text, and what was printed."""
        if self.python is None:
            self.python = subprocess.Popen(
                [sys.executable, "-P", "-c", INTERPRETER],
                cwd=self.folder,
                env=environment(self.commands),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self.python.stdin
        assert self.python.stdout
        print(json.dumps(text), file=self.python.stdin, flush=True)
        ok, said = json.loads(self.python.stdout.readline())
        return ok, said


@contextmanager
def session(folder: Path, commands: Path) -> Iterator[Session]:
    opened = Session(folder, commands)
    try:
        yield opened
    finally:
        if opened.python is not None:
            opened.python.communicate()


@pytest.mark.parametrize("page", PAGES)
def test_the_page_works_as_it_stands(page: str, tmp_path: Path, commands: Path) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    with session(folder, commands) as opened:
        for block in blocks(page):
            if block.kind in RUN:
                run(block, f"{page}:{block.line}", opened)


@pytest.mark.parametrize("page", PAGES)
def test_few_blocks_are_not_run_and_it_is_said_why(page: str) -> None:
    found = [block for block in blocks(page) if block.kind in RUN]
    shown_only = [block for block in found if block.shown_only]
    assert len(shown_only) <= MOST_NOT_RUN
    for block in shown_only:
        assert re.fullmatch(r"not-run: \w.+", block.rest), f"{page}:{block.line}: why not?"
        assert block.kind != "sh" or subprocess.run(["bash", "-n", "-c", block.text]).returncode == 0


def commands_in(text: str) -> Iterator[tuple[str, list[str]]]:
    """(verb and next word, options) of every `mixassay ...` in blocks, code spans and indented lines."""
    text = text.replace("\\\n", " ")
    fences = re.compile(r"^```.*?^```$", re.M | re.S)
    prose = fences.sub("", text)
    code = [*fences.findall(text), *re.findall(r"`([^`\n]+)`", prose), *re.findall(r"^ {4}(.+)", prose, re.M)]
    for line in (line for part in code for line in part.splitlines()):
        for words in re.findall(r"(?:^|[$&|] |srun )mixassay +([a-z][^|&;#]*)", line):
            words = words.split("  ")[0].split()
            yield " ".join(words[:2]), [word.split("=")[0] for word in words if word.startswith("--")]


def manual() -> dict[str, str]:
    """Verb -> what `--help` says of it."""
    parts = re.split(r"^## mixassay(?: |$)", (ROOT / "docs/cli.md").read_text(), flags=re.M)[1:]
    return {part.partition("\n")[0].strip(): part for part in parts}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *ALL_PAGES])
def test_commands_that_are_named_exist_with_their_options(page: str) -> None:
    helps = manual()
    wrong = [found for found in commands_in((ROOT / page).read_text()) if not known(*found, helps)]
    assert not wrong


def known(command: str, options: list[str], helps: dict[str, str]) -> bool:
    said = helps.get(command) or helps.get(command.split(" ")[0])
    return said is not None and all(re.search(rf"{re.escape(option)}\b", said) for option in options)


def run(block: Block, where: str, session: Session) -> None:
    folder, commands = session.folder, session.commands
    if block.shown_only:
        return
    if block.kind == "sh":
        said = shell(block.text, folder, commands)
        assert said.returncode == 0, f"{where}\n{said.stdout}"
    elif block.kind == "console":
        for command, shown in dialogue(block.text):
            compare(shell(command, folder, commands).stdout, shown, f"{where}: {command}")
    elif block.rest:
        (folder / block.rest).write_text(block.text)
    elif block.kind == "yaml":
        yaml.safe_load(block.text)
    else:
        ok, printed = session.execute(block.text)
        assert ok, f"{where}\n{printed}"
        if block.printed is not None:
            compare(printed, block.printed, where)


def compare(said: str, shown: str, where: str) -> None:
    said, shown = said.rstrip("\n"), shown.rstrip("\n")
    assert alike(said, shown), f"{where}\n--- said\n{said}\n--- shown\n{shown}"


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
    """A reader's: without the interpreter that the tests choose for Triton."""
    path = os.pathsep.join([str(commands), os.environ["PATH"]])
    mine = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**mine, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "100", "TERM": "dumb"}


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
    found = list(
        commands_in("`mixassay run FILE --plan`\n```sh\nmixassay diff a b --margni 1  # x\n```\nmixassay is\n")
    )
    assert found == [("diff a", ["--margni"]), ("run FILE", ["--plan"])]
    assert [known(*each, manual()) for each in (*found, ("rnu", list[str]()))] == [False, True, False]
    with session(tmp_path, commands) as opened:
        for block in (
            Block("sh", "", "false\ntrue\n", 1),
            Block("console", "", "$ echo 1\n2\n", 1),
            Block("python", "", "assert False\n", 1),
            Block("python", "", "print(1)\n", 1, printed="2\n"),
        ):
            with pytest.raises(AssertionError, match=r"page\.md:1"):
                run(block, "page.md:1", opened)
        run(Block("python", "", "a = 1\n", 1), "page.md:1", opened)
        run(Block("python", "", "print(a)\n", 1, printed="1\n"), "page.md:1", opened)
        with pytest.raises(yaml.YAMLError):
            run(Block("yaml", "", "a: [\n", 1), "page.md:1", opened)


def test_the_mixer_shown_is_the_one_that_new_writes() -> None:
    (shown,) = (block.text for block in blocks("docs/your-mixer.md") if block.rest == "my_mixer.py")
    assert shown == (ROOT / "runners/scaffold/my_mixer.py").read_text()
