"""`mixassay diff`: what changed between two commits, or two sets of results."""

from typing import Annotated, Literal

import typer
from rich.console import Console

from mixassay.errors import UserError
from mixassay.registry import suggest
from mixassay.runners.cli import RESULTS, AsJson, Results, app


@app.command()
def diff(
    base: Annotated[str, typer.Argument(metavar="BASE", help="A git ref, a folder of results, or a file of records.")],
    head: Annotated[
        str | None,
        typer.Argument(
            metavar="HEAD", help="The same. [HEAD, or with --allow-dirty the working tree]", show_default=False
        ),
    ] = None,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="Train five fresh seeds of every suspect on both sides, and decide.")
    ] = False,
    fail_on: Annotated[
        str, typer.Option("--fail-on", metavar="VERDICT,...", help="Verdicts that make exit code 1.")
    ] = "regressed,failed",
    metric: Annotated[Literal["test/accuracy", "valid/accuracy"], typer.Option(help="What is compared.")] = (
        "test/accuracy"
    ),
    margin: Annotated[float, typer.Option(min=0, max=1, help="The least change that matters: 0.01 is a point.")] = 0.01,
    suite: Annotated[str | None, typer.Option("--suite", metavar="NAME", help="This sweep's records only.")] = None,
    across_env: Annotated[
        bool, typer.Option("--across-env", help="Compare results of different kinds of machine, too.")
    ] = False,
    allow_dirty: Annotated[
        bool, typer.Option("--allow-dirty", help="Count records of code with uncommitted changes, too.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Show identical cells, too.")] = False,
    format: Annotated[Literal["rich", "md"], typer.Option(help="md for a pull request.")] = "rich",
    results: Results = RESULTS,
    as_json: AsJson = False,
) -> None:
    """Compare the stored results of two commits, folders or files, cell by cell, with a verdict for each mixer.

    Runs pair by configuration and seed. A change needs p <= 0.05 after Holm's correction over all cells, by Welch's or
    the paired t test, and the margin; a false alarm comes in at most one diff of twenty (docs/diff-power.md).
    Benchmarks' records are compared by ratios within one run. Trains nothing without --confirm.

    Exit code: 0 nothing of --fail-on; 1 something; 2 a mistake in the command.
    """
    from mixassay.runners import diff as verdicts  # imports numpy and scipy
    from mixassay.runners import diff_bench, diff_report, refs, render

    fatal = {one_verdict(name, verdicts.VERDICTS) for name in fail_on.split(",") if name}
    before = refs.resolve(base, results, suite=suite, dirty=allow_dirty)
    if head is None and allow_dirty:
        after = refs.working_tree(results, suite=suite)
    else:
        after = refs.resolve(head or "HEAD", results, suite=suite, dirty=allow_dirty)
    for side in (before, after):
        if not side.records and not side.benches:
            raise UserError(
                "\n".join([*side.warnings, f"{side.name}: no records of it; `mixassay run` there makes them"])
            )
    rule = verdicts.Rule(metric=metric, margin=margin, across_env=across_env)
    found = verdicts.compare(before.records, after.records, rule)
    if confirm and found.suspects:
        from mixassay.runners.confirm import fresh_runs

        found = verdicts.confirmed(found, fresh_runs(found, before, after, results))
    benches = diff_bench.compare(before.benches, after.benches, across_env) if before.benches and after.benches else []
    names = before.name, after.name
    warnings = list(dict.fromkeys([*before.warnings, *after.warnings, *found.warnings]))
    if as_json:
        print(diff_report.to_json(found, benches, names, warnings), end="")
    else:
        grids = list(diff_report.grids(found, names, everything=everything))
        grids += [diff_report.of_benches(benches, names, everything=everything)] if benches else []
        if format == "md":
            print("\n".join(render.markdown(grid) for grid in grids), end="")
        else:
            console = Console()
            for grid in grids:
                console.print(render.rich(grid, console.width))
    for warning in warnings:
        Console(stderr=True).print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    given = found.verdicts | {change.verdict for change in benches}
    raise typer.Exit(1 if fatal & given else 0)


def one_verdict(name: str, known: tuple[str, ...]) -> str:
    if name not in known:
        raise UserError(f'--fail-on: unknown verdict "{name}".{suggest(name, list(known))}')
    return name
