"""`mixassay report`: the table of what is stored."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from mixassay.errors import UserError
from mixassay.expand import is_wanted, none_of
from mixassay.record import RunRecord
from mixassay.runners import bench_plot, bench_records, bench_report, export, figures, page, published, render, session
from mixassay.runners import plot as pictures
from mixassay.runners import tried as settings
from mixassay.runners.cli import RESULTS, File, Only, Overrides, Results, Seeds, app
from mixassay.runners.cli.files import load, texts
from mixassay.runners.eval import table as evaluations
from mixassay.runners.labels import find
from mixassay.runners.marks import Kind
from mixassay.runners.store import Store, read_shards, shards
from mixassay.sweep import conditions

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
    tried: Annotated[
        bool, typer.Option("--tried", help="Also print what every setting gave that `select` chose among.")
    ] = False,
    results: Results = RESULTS,
    write: Annotated[bool, typer.Option("--write", help="Also write DIR/<name>/TABLE.md.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write table and figures as one page.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Also draw a figure: .svg, .png, .pdf.")
    ] = None,
    figure: Annotated[
        Kind | None,
        typer.Option(
            help="What --plot draws. metric: every seed, against the first numeric column, or row by row. seeds: the"
            " table's own numbers, row by row. state: against bytes of state. curves: while training. heatmap: over two"
            " numeric columns or evaluation cells. positions: a language model's loss by position."
            "  [default: metric; of a benchmark, time against T]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print the table of a sweep from what is stored, of a benchmark's records (FILE.jsonl), or of the evaluations in a
    folder of results (results/niah; --only mixer=mamba2,task.length=4096, --plot draws depth by length). Trains
    nothing."""
    if Path(file).is_dir():
        if overrides or write or tried or any(option is not None for option in (seeds, against, html, figure)):
            raise UserError(f"{file} holds evaluations, to which --only, --format and --plot apply")
        report_evaluations(Path(file), only, format, plot)
        return
    if file.endswith(".jsonl"):
        given = (only, seeds, against, html, figure)
        if overrides or write or tried or any(option is not None for option in given):
            raise UserError(f"{file} holds records of benchmarks, to which only --format and --plot apply")
        report_bench(Path(file), format, plot)
        return
    if plot is not None:
        pictures.check(plot)
    elif figure is not None:
        raise UserError("--figure says what --plot draws: give --plot FILE too")
    if tried and format in ("csv", "json"):
        raise UserError(f"--tried is a table for people: --format rich, md or latex, not {format}")
    sweep = load(file, overrides, only, seeds)
    stored = Store(results).read(sweep.name)
    errors = Console(stderr=True)
    for warning in stored.warnings:
        errors.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    if not any(cell.cell in {record.cell for record in stored.records} for cell in sweep.cells()):
        raise UserError(f"nothing is stored under {results / sweep.name} for {file}; `mixassay run {file}` makes it")
    table = session.table(sweep, stored.records, results)
    theirs = published.load(against) if against is not None else None
    grids = [render.grid(table), *(published.grids(table, theirs) if theirs is not None else [])]
    if tried:
        grids.append(settings.grid(sweep, table, stored.records))
    if format == "json":
        print(export.to_json(table, published.long_form(table, theirs) if theirs is not None else None), end="")
    elif format == "csv":
        print(export.to_csv(table), end="")
    else:
        print_grids(grids, format)
    if write:
        path = results / sweep.name / "TABLE.md"
        write_text(path, "\n".join(render.markdown(grid) for grid in grids))
        errors.print(f"written to {path}", highlight=False)
    if html is not None:
        words = [file, *texts(overrides, None), *(["--results", str(results)] if results != RESULTS else [])]
        write_text(html, page.html(table, sweep, words, grids[1:]))
        errors.print(f"written to {html}", highlight=False)
    if plot is not None:
        pictures.plot(figures.figure(table, figure or "metric"), plot)
        errors.print(f"drawn to {plot}", highlight=False)


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as problem:
        raise UserError(f"cannot write to {path}: {problem.strerror}") from problem


def report_bench(path: Path, format: Format, plot: Path | None) -> None:
    records, warnings = bench_records.read(path)
    if not records:
        raise UserError(f"{path}: no record of a benchmark; `mixassay bench` makes them")
    if format == "json":
        print(bench_report.to_json(records), end="")
    elif format == "csv":
        print(bench_report.to_csv(records), end="")
    else:
        print_grids(bench_report.tables(records, warnings), format)
    if plot is not None:
        bench_plot.plot(records, plot)
        Console(stderr=True).print(f"drawn to {plot}", highlight=False)


def report_evaluations(folder: Path, only: str | None, format: Format, plot: Path | None) -> None:
    if plot is not None:
        pictures.check(plot)
    stored = read_shards(shards(folder))
    found = evaluations.collect(chosen(stored.records, conditions(only)) if only else stored.records)
    if format == "json":
        print(json.dumps(evaluations.long_form(found), indent=1))
    elif format == "csv":
        print(export.csv_text(evaluations.long_form(found)), end="")
    else:
        print_grids([evaluations.grid(found)], format)
    for warning in stored.warnings:
        Console(stderr=True).print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    if plot is not None:
        pictures.plot(evaluations.heatmap(found), plot)
        Console(stderr=True).print(f"drawn to {plot}", highlight=False)


def chosen(records: Sequence[RunRecord], wanted: Mapping[str, Any]) -> list[RunRecord]:
    """The evaluations of these models, tasks and lengths: {"mixer": "mamba2", "task.length": [1024, 4096]}."""
    records = [record for record in records if evaluations.is_evaluation(record)]
    values = {path: [find(record.config, path) for record in records] for path in wanted}
    for path in wanted:
        if records and all(value is None for value in values[path]):
            raise UserError(f'--only: no evaluation has a field "{path}"')
    kept = [record for i, record in enumerate(records) if all(is_wanted(values[p][i], v) for p, v in wanted.items())]
    if records and not kept:
        raise UserError(f"--only: {none_of(values, wanted)}")
    return kept


def print_grids(grids: Sequence[render.Grid], format: Format) -> None:
    if format == "rich":
        console = Console()
        for grid in grids:
            console.print(render.rich(grid, console.width))
    else:
        write_text = render.markdown if format == "md" else render.latex
        print("\n".join(write_text(grid) for grid in grids), end="")
