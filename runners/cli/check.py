"""`mixassay check`: is this mixer what it claims to be?"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from mixassay.errors import UserError
from mixassay.runners.cli import AsJson, app
from mixassay.source import Problems, assignment

Record = dict[str, Any]

STYLES = {"pass": "green", "fail": "bold red", "not offered": "dim", "not judged": "yellow"}


@app.command()
def check(
    mixer: Annotated[
        str,
        typer.Argument(metavar="MIXER", help="A name, FILE.py:Class or package.module:Class; all: the built-in ones."),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Its arguments: heads=2.", show_default=False)
    ] = None,
    d_model: Annotated[int, typer.Option("--d-model", min=1, help="The width.")] = 16,
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="cpu or cuda.")] = "cpu",
    only: Annotated[str | None, typer.Option("--only", metavar="CHECK,...", help="These checks only.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Longer sequences, the real compiler: a minute or two.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Keep records.jsonl and TABLE.md there.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check what a mixer claims: causality, equal forms, gradients, the size of its state, and more.

    Each line says pass, fail with the smallest failing input that was found, or not offered. A claim that says nothing
    without another that failed is not judged.

    Exit code: 0 nothing failed; 1 something did; 2 a mistake in the command, or the mixer cannot be made.
    """
    from mixassay.mixers import mixer as registry
    from mixassay.runners.conformance import records, subject, table

    found = Problems()
    args = {path: node.plain() for path, node in (assignment(text, found) for text in arguments or ())}
    found.raise_any()
    checks = table.chosen(only.split(",") if only else [])
    if mixer == "all" and args:
        raise UserError("all: arguments are for one mixer")
    names = registry.built_in() if mixer == "all" else [mixer]
    console, kept = Console(stderr=as_json, highlight=False), []
    for name in names:
        one = subject.find(name, args, d_model=d_model, device=subject.device(device), full=full)
        about = records.described(name, args, d_model, subject.device_name(one.device), full)
        console.print(name, style="bold", markup=False)
        for result in table.run(one, checks):
            kept.append(records.record(about, result))
            if as_json:
                print(json.dumps(kept[-1], ensure_ascii=False), flush=True)
            show(console, kept[-1])
    if out is not None:
        records.write(out, kept)
    raise typer.Exit(1 if any(r["status"] == "fail" for r in kept) else 0)


def show(console: Console, record: Record) -> None:
    """One line, and where something is wrong the smallest input for which it is."""
    from mixassay.runners.conformance.records import shown

    text = Text(f"  {record['status']:<11}", style=STYLES[record["status"]])
    said = record.get("message") or shown(record.get("measured", {}))
    text.append(f"  {record['check']:<17} {said}", style="default")
    console.print(text, soft_wrap=True)
    if "smallest" in record:
        console.print(f"{'':>31} smallest failing input: {record['smallest']}", markup=False, soft_wrap=True)
