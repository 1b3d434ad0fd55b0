"""The verbs that look and change nothing: list, show, validate, schema, doctor."""

import ast
import json
import re
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mixassay import plugins
from mixassay.errors import UserError
from mixassay.origins import resolved_text
from mixassay.provenance import PACKAGE
from mixassay.runners.cli import RESULTS, AsJson, File, Only, Overrides, Results, Seeds, app
from mixassay.runners.cli.files import find, load, shipped
from mixassay.runners.store import Store
from mixassay.source import Problems, read
from mixassay.texts import unreadable


@app.command("list")
def list_(
    what: Annotated[Literal["tasks", "mixers", "configs"], typer.Argument(help="What to list.")],
    as_json: AsJson = False,
) -> None:
    """List what there is: name, what it is, and its file (where there is room, and with --json)."""
    rows = list(configs() if what == "configs" else parts(what))
    if as_json:
        print(json.dumps([dict(zip(("name", "about", "file"), row, strict=True)) for row in rows], indent=1))
        return
    console = Console()
    heads = ("name", "about", "file") if console.width >= 120 else ("name", "about")
    table = Table(*heads, box=None, pad_edge=False)
    for name, about, file in rows:
        table.add_row(*map(escape, (name, about, shown(file))[: len(heads)]))
    console.print(table)


def configs() -> Iterator[tuple[str, str, str]]:
    for name, path in (*shipped(), *shipped(audits=True)):
        written = read(path, Problems())
        title = written.find("report.title") or written.find("title")
        comment = takewhile(lambda line: line.startswith("# "), path.read_text().splitlines())
        about = str(title.value) if title is not None else sentence(line.removeprefix("# ") for line in comment)
        yield name, about, str(path)


def parts(kind: str) -> Iterator[tuple[str, str, str]]:
    """Tasks or mixers, by their files: nothing is imported, so one that is broken is listed like the others."""
    for path in sorted((PACKAGE / kind).glob("[!_]*.py")):
        text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
        yield path.stem, sentence(text.split("\n\n")[0].splitlines()), str(path)
    for entry in plugins.installed(kind.removesuffix("s")).values():
        yield entry.name, f"plug-in of {entry.dist.name if entry.dist else '?'}", entry.value


def sentence(lines: Iterable[str]) -> str:
    """The first one of a paragraph. Abbreviations ("et al. 2023") are followed by no capital."""
    return re.split(r"(?<=[^.]{3}\.)\s+(?=[A-Z])", " ".join(lines))[0]


def shown(file: str) -> str:
    """A path as short as it can be from here."""
    path = Path(file).absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


@app.command()
def show(
    file: Annotated[
        str, typer.Argument(metavar="FILE|ID", help="A sweep file or name, or the start of a run's key or cell.")
    ],
    overrides: Overrides = None,
    only: Only = None,
    seeds: Seeds = None,
    results: Results = RESULTS,
) -> None:
    """Show a sweep as it will really run, each value with its origin; or the stored records of a run or cell."""
    try:
        path = find(file)
    except UserError:
        records = found(file, results)
        if not records:
            raise
        print(json.dumps(records if len(records) > 1 else records[0], indent=1, ensure_ascii=False))
        return
    print(resolved_text(load(str(path), overrides, only, seeds)), end="")


def found(start: str, results: Path) -> list[dict[str, Any]]:
    """Records whose key or cell begins so."""
    if len(start) < 4 or not results.is_dir():
        return []
    suites = sorted(path.name for path in results.iterdir() if path.is_dir() and not path.name.startswith("."))
    records = [record for suite in suites for record in Store(results).read(suite).records]
    return [r.model_dump(mode="json") for r in records if r.key.startswith(start) or r.cell.startswith(start)]


@app.command()
def validate(file: File, overrides: Overrides = None, only: Only = None, seeds: Seeds = None) -> None:
    """Check a sweep file and every cell in it, down to the arguments of its tasks and mixers. Trains nothing."""
    sweep = load(file, overrides, only, seeds)
    from mixassay.check import check  # imports torch, and a fault of the file itself should not wait for that

    absent = unreadable(sweep)
    check(sweep, ask=not absent)
    for at, message in absent:  # no fault of the file
        note = f"note: {at}: {message}; a run needs it"
        Console(stderr=True).print(note, markup=False, highlight=False, soft_wrap=True)
    cells = sweep.cells()
    tuning = sum(len(sweep.tuning(cell)) for cell in cells)
    print(f"{sweep.path}: valid; {len(cells)} cells, {tuning} tuning + {len(cells) * len(sweep.seeds)} reported runs")


@app.command()
def schema() -> None:
    """Print the JSON schema of sweep files, for editors."""
    from mixassay.schema import json_schema

    print(json.dumps(json_schema(), indent=1))


@app.command()
def doctor(results: Results = RESULTS, as_json: AsJson = False) -> None:
    """Look at this machine and this installation: what is wrong, and how to mend it. Exit code 1 if anything is."""
    from mixassay.runners.doctor import examine

    findings = examine(results)
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings], indent=1))
    else:
        table = Table(box=None, pad_edge=False, show_header=False)
        for finding in findings:
            style = {"ok": "green", "note": "yellow", "wrong": "red"}[finding.state]
            table.add_row(f"[{style}]{finding.state}[/]", escape(finding.what), escape(finding.found))
            if finding.mend:
                table.add_row("", "", f"[bold]-> {escape(finding.mend)}[/]")
        Console().print(table)
    raise typer.Exit(1 if any(finding.state == "wrong" for finding in findings) else 0)
