"""The command line's own help as one page: `python -P -m mixassay.runners.cli.manual > docs/cli.md`."""

from collections.abc import Iterator
from typing import Any

import typer
from typer.testing import CliRunner

from mixassay.runners import cli


def text() -> str:
    """`docs/cli.md`."""
    head = (
        "# The command line\n\nWhat `mixassay VERB --help` prints, made by `python -m mixassay.runners.cli.manual`.\n"
    )
    cli.load_verbs()
    pages = (f"## {' '.join(words)}\n\n```text\n{help_of(words[1:])}\n```\n" for words in verbs())
    return "\n".join([head, *pages])


def verbs() -> Iterator[tuple[str, ...]]:
    """The command, its verbs, and theirs."""

    def below(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield words
        for name, inner in getattr(command, "commands", {}).items():
            yield from below(inner, (*words, name))

    yield from below(typer.main.get_command(cli.app), ("mixassay",))


def help_of(words: tuple[str, ...]) -> str:
    result = CliRunner().invoke(
        cli.app, [*words, "--help"], prog_name="mixassay", env={"COLUMNS": "100", "TERM": "dumb"}
    )
    return result.output.strip()


if __name__ == "__main__":
    print(text(), end="")
