"""`mixassay run`: trains what is missing, then prints the table."""

import json
import re
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mixassay.errors import UserError
from mixassay.runners import render
from mixassay.runners.cli import RESULTS, AsJson, File, Only, Overrides, Results, Seeds, app
from mixassay.runners.cli.files import load, texts
from mixassay.runners.plan import Mode, steps_of
from mixassay.runners.progress import clock, place
from mixassay.runners.session import Engine, Options, Session, table
from mixassay.settings import seconds


@app.command()
def run(
    file: File,
    overrides: Overrides = None,
    only: Only = None,
    seeds: Seeds = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only say what would be done, and what it would cost.")] = False,
    shard: Annotated[str, typer.Option(metavar="I/N", help="Part I of N of the cells, for N machines.")] = "1/1",
    results: Results = RESULTS,
    mode: Annotated[
        Mode,
        typer.Option(
            help="cached: runs without a record, and those that were killed, timed out or out of memory. any-code: the"
            " same, but records of other versions of the code count, and the table marks them. retry: those that failed"
            " with an error, too. force: all. read-only: none."
        ),
    ] = "cached",
    max_time: Annotated[str | None, typer.Option(metavar="TIME", help="Stop after so long: 8h, 45m. Exit 75.")] = None,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first failure; show tracebacks.")] = False,
    device: Annotated[str | None, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")] = None,
    engine: Annotated[
        Engine, typer.Option(help="Where workers run: on this machine, or on the nodes of a Ray cluster.")
    ] = "local",
    as_json: AsJson = False,
) -> None:
    """Train what is missing from the results, then print the table.

    Running it again continues where it stopped; what is stored is not trained again. Ctrl-C once writes checkpoints
    and stops, twice kills.

    Exit code: 0 all runs ended well; 2 a mistake in the file or the command; 3 some failed, diverged or are missing;
    75 stopped by --max-time or SIGTERM, run it again; 130 stopped by Ctrl-C.
    """
    sweep = load(file, overrides, only, seeds)
    options = Options(
        results,
        texts(overrides, seeds),
        checked(device),
        mode,
        part(shard),
        duration(max_time),
        fail_fast,
        as_json,
        engine,
    )
    console = Console(stderr=as_json)
    session = Session(sweep, options)
    for warning in session.warnings:
        Console(stderr=True).print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    if plan:
        print_plan(session, console)
        session.crew.close()
        return
    ending = session.run(console)
    stored = session.store.read(sweep.name)
    if as_json:
        print(json.dumps({"event": "end", "reason": ending.reason, "exit": session.exit_code(ending)}), flush=True)
    elif stored.records:
        console.print(render.rich(render.grid(table(sweep, stored.records, results)), console.width))
    if ending.reason != "refused":
        summarise(session, Console(stderr=True))
    if ending.message:
        Console(stderr=True).print(ending.message, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(session.exit_code(ending))


def summarise(session: Session, console: Console) -> None:
    """What did not end well, and how to go on."""
    failures, missing = session.plan.failures(), session.plan.missing()
    alike: dict[str, list[str]] = {}
    for record in failures:
        said = record.error.message if record.error else ""
        alike.setdefault(f"{record.status}: {said}", []).append(place(record))
    for said, places in alike.items():
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        console.print(
            f"{said}: {'; '.join(places[:3])}{more}", style="red", markup=False, highlight=False, soft_wrap=True
        )
    if any(record.status == "error" for record in failures):
        console.print("stored errors are not tried again; to do so: --mode retry --fail-fast (shows the traceback)")
    if missing:
        console.print(f"{missing} reported run(s) missing; run the same command again to go on", highlight=False)


def print_plan(session: Session, console: Console) -> None:
    """Cells, what is stored, what is to do, and its cost where step times are known."""
    shown = Table("to run", "runs", "steps", "ms/step", "time", box=None, pad_edge=False)
    total, runs, guessed = 0.0, 0, False
    for name, spec, n in session.plan.summary():
        ms, cost = session.costs.known(spec), session.costs.seconds(spec, n * steps_of(spec))
        timed = (f"{ms:.1f}", clock(cost)) if ms is not None and cost is not None else ("?", "?")
        shown.add_row(escape(name), str(n), str(steps_of(spec)), *timed)
        total, runs, guessed = total + (cost or 0.0), runs + n, guessed or ms is None
    cells, slots = session.plan.cells.values(), session.settings.slots
    done = sum(session.plan.finished(state) for state in cells)
    if runs:
        console.print(shown)
    console.print(f"{len(cells)} cells, {done} done; {runs} runs to do in {slots} slot(s)", highlight=False)
    if runs:
        note = " (shapes marked ? are guessed like the others)" if guessed else ""
        said = f"about {clock(total / slots)}{note}" if total else "unknown: no step of these shapes was ever timed"
        console.print(f"time: {said}", highlight=False)


def part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--shard should be I/N with I from 1 to N, such as 2/4, got {text}")
    return int(match[1]), int(match[2])


def duration(text: str | None) -> float | None:
    if text is None:
        return None
    found = seconds(text)
    if not isinstance(found, float):
        raise UserError(f"--max-time should be a time such as 90s, 45m or 8h, got {text}")
    return found


def checked(device: str | None) -> str | None:
    if device is not None and not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", device):
        raise UserError(f"--device should be auto, cpu, cuda or cuda:N, got {device}")
    return device
