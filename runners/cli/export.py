"""`mixassay export`: records and tasks in other programs' formats."""

from pathlib import Path
from typing import Annotated

import typer

from mixassay.errors import UserError
from mixassay.runners import export_records
from mixassay.runners.cli import RESULTS, File, Only, Overrides, Results, app
from mixassay.runners.cli.files import load
from mixassay.runners.store import Store

export = typer.Typer(
    help="Write records or a task in other programs' formats.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(export, name="export")


@export.command()
def records(
    file: File,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="records.csv or records.parquet.")],
    results: Results = RESULTS,
) -> None:
    """Write all stored runs of a sweep as a table, a row for each: CSV or Parquet.

    The column `record` holds the whole record as JSON, learning curve and all. Parquet needs the extra `export`.
    """
    export_records.check(out)
    sweep = load(file, None, None, None)
    stored = Store(results).read(sweep.name)
    for warning in stored.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if not stored.records:
        raise UserError(f"nothing is stored under {results / sweep.name} for {file}; `mixassay run {file}` makes it")
    export_records.write(stored.records, out)
    typer.echo(f"{len(stored.records)} runs written to {out}", err=True)


@export.command("task")
def task_(
    file: File,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A new folder.")],
    overrides: Overrides = None,
    only: Only = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the training rows. [the sweep's first]")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Training rows of each cell. [all of a fixed set]")] = None,
) -> None:
    """Write a sweep's task as a Hugging Face dataset: train, validation and test rows.

    Made with the library `datasets` (extra `export`), read with `datasets.load_from_disk(DIR)`. What was written is
    read back and compared.
    """
    sweep = load(file, overrides, only, None)
    tasks = {cell.sections.task.model_dump_json(): cell for cell in sweep.cells()}
    if len(tasks) > 1:
        raise UserError(
            f"{file} has {len(tasks)} different tasks, a dataset holds one: choose with --only task.KEY=VALUE"
        )
    from mixassay.check import check  # imports torch, and a fault of the file itself should not wait for that
    from mixassay.runners import export_task

    check(sweep)
    (cell,) = tasks.values()
    counted = export_task.write(cell.sections.task, out, seed=sweep.seeds[0] if seed is None else seed, rows=rows)
    typer.echo(f"{', '.join(f'{n:,} {name}' for name, n in counted.items())} rows written to {out}", err=True)
