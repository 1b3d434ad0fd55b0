"""`mixassay report`: the table of what is stored."""

from typing import Annotated, Literal

import typer
from rich.console import Console

from mixassay.errors import UserError
from mixassay.runners import export, published, render, session
from mixassay.runners.cli import RESULTS, File, Only, Overrides, Results, Seeds, app
from mixassay.runners.cli.files import load
from mixassay.runners.store import Store

Format = Literal["rich", "md", "latex", "csv", "json"]


@app.command()
def report(
    file: File,
    overrides: Overrides = None,
    only: Only = None,
    seeds: Seeds = None,
    format: Annotated[Format, typer.Option(help="csv and json hold every seed's own number.")] = "rich",
    against: Annotated[
        str | None, typer.Option(metavar="TABLE", help="Set a published table beside it: a name, or a YAML file.")
    ] = None,
    results: Results = RESULTS,
    write: Annotated[bool, typer.Option("--write", help="Also write DIR/<name>/TABLE.md.")] = False,
) -> None:
    """Print the table of a sweep from what is stored. Trains nothing."""
    sweep = load(file, overrides, only, seeds)
    stored = Store(results).read(sweep.name)
    errors = Console(stderr=True)
    for warning in stored.warnings:
        errors.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    if not any(cell.cell in {record.cell for record in stored.records} for cell in sweep.cells()):
        raise UserError(f"nothing is stored under {results / sweep.name} for {file}; `mixassay run {file}` makes it")
    table = session.table(sweep, stored.records)
    theirs = published.load(against) if against is not None else None
    grids = [render.grid(table), *([published.grid(table, theirs)] if theirs is not None else [])]
    if format == "rich":
        console = Console()
        for grid in grids:
            console.print(render.rich(grid, console.width))
    elif format == "json":
        print(export.to_json(table, published.long_form(table, theirs) if theirs is not None else None), end="")
    elif format == "csv":
        print(export.to_csv(table), end="")
    else:
        write_text = render.markdown if format == "md" else render.latex
        print("\n".join(write_text(grid) for grid in grids), end="")
    if write:
        path = results / sweep.name / "TABLE.md"
        path.write_text("\n".join(render.markdown(grid) for grid in grids))
        errors.print(f"written to {path}", highlight=False)
