"""`mixassay audit-bias`: what cuts of the past into slots cost, without training anything."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from mixassay.runners import export, render
from mixassay.runners.cli import RESULTS, Overrides, Results, app
from mixassay.runners.cli.files import find, texts

Format = Literal["rich", "md", "latex", "csv", "json"]


@app.command("audit-bias")
def audit_bias(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="An audit file, or the name of a shipped one: audit/noise.")
    ],
    overrides: Overrides = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", metavar="SEEDS", help="These seeds instead of the file's: 0-9 or [0, 7]")
    ] = None,
    format: Annotated[Format, typer.Option(help="csv and json hold every seed's own number.")] = "rich",
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="A picture of it: .svg, .png or .pdf.")
    ] = None,
    results: Results = RESULTS,
    write: Annotated[
        bool, typer.Option("--write", help="Keep the records and TABLE.md, under DIR/audit/<name>/.")
    ] = False,
) -> None:
    """Measure the bias of reading from slots, next to its bound and to the best cut there is.

    Cuts by policies (one slot, fixed blocks, Fenwick tree, window, dynamic linear attention, the true changes, the
    optimum) of streams whose regimes are known. No model, no training: minutes on two cores.
    """
    from mixassay.runners.audit import plot as picture
    from mixassay.runners.audit.config import Audit
    from mixassay.runners.audit.records import write as keep
    from mixassay.runners.audit.run import run
    from mixassay.runners.audit.table import flat, long_form, tables
    from mixassay.runners.plot import check

    audit = Audit.load(find(file, audits=True), texts(overrides, seeds))
    if plot is not None:
        check(plot)
    errors = Console(stderr=True)
    with errors.status("") as status:
        records = list(run(audit, lambda said: status.update(said, spinner_style="dim")))
    title = audit.head.title or audit.head.name
    grids = tables(records, title)
    if format == "rich":
        console = Console()
        for grid in grids:
            console.print(render.rich(grid, console.width))
    elif format == "json":
        print(json.dumps({"title": title, "std": "sample, ddof=1", "numbers": long_form(records)}, indent=1))
    elif format == "csv":
        print(export.csv_text(flat(long_form(records))), end="")
    else:
        write_text = render.markdown if format == "md" else render.latex
        print("\n".join(write_text(grid) for grid in grids), end="")
    if plot is not None:
        picture.plot(records, plot, title)
    if write:
        folder = results / "audit" / audit.head.name
        keep(folder / "records.jsonl", records)
        (folder / "TABLE.md").write_text("\n".join(render.markdown(grid) for grid in grids))
        errors.print(f"written to {folder}", highlight=False)
