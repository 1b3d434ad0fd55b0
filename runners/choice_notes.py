"""What must be said of tuned settings for a table to mean something: how they were chosen, and how far to trust it."""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from mixassay.record import RunRecord
from mixassay.runners import stats
from mixassay.runners.labels import find, pairs, spans
from mixassay.runners.runs import Runs, values
from mixassay.spec import Args
from mixassay.sweep import Sweep

Tuning = Mapping[str, Sequence[RunRecord]]
"""Tuning runs by cell."""


def rule(sweep: Sweep, all_runs: Sequence[Runs]) -> str:
    if sweep.select is not None:
        grid = ", ".join(f"{path} of {len(values)}" for path, values in sweep.tuned.items())
        seeds = spans(sweep.select.seeds)
        return f"Chosen for each cell on {sweep.select.by} with tuning seeds {seeds}, then frozen: {grid} values."
    one_each = [runs.records[0] for runs in all_runs if runs.records]  # without selection the cell fixes the rate
    rates = sorted({rate for record in one_each if isinstance(rate := find(record.config, "train.lr"), float)})
    fixed = f" at {rates[0]:g}" if len(rates) == 1 else ", not tuned"
    return f"Learning rate fixed by the configuration{fixed}."


def at_the_end(sweep: Sweep, all_runs: Sequence[Runs]) -> Iterator[str]:
    """Where a choice is the least or the greatest of those tried, and not all seeds solve the task with it."""
    metric, enough = sweep.report.metric, sweep.report.compare.solved_at
    for path, tried in sweep.tuned.items():
        if len(tried) < 3 or not all(isinstance(value, float) for value in tried):
            continue
        at = [runs for runs in all_runs if runs.ok and runs.ok[0].tuned.get(path) in (min(tried), max(tried))]
        names = [str(runs.cell) for runs in at if not _all_solve(runs, metric, enough)]
        if names:
            yield f"{path} is at an end of its values, and a better one may lie beyond: {'; '.join(names)}."


def close_calls(sweep: Sweep, all_runs: Sequence[Runs], tuning: Tuning) -> Iterator[str]:
    """Where the second best is within a standard error of the choice, so that other tuning seeds might turn them round.

    The deviation of a run is pooled over a cell's settings: each alone has two seeds or so. Cells whose reported seeds
    all solve the task do not count, since nothing hangs on the choice there.
    """
    if sweep.select is None:
        return
    judged = close = 0
    for runs in all_runs:
        tried = _by_setting(tuning.get(runs.cell.cell, ()), sweep.select.by)
        choice = tried.pop(json.dumps(runs.records[0].tuned, sort_keys=True), None) if runs.records else None
        repeated = [v for v in [choice or [], *tried.values()] if len(v) > 1]
        solved = _all_solve(runs, sweep.report.metric, sweep.report.compare.solved_at)
        if not choice or not tried or not repeated or solved:
            continue
        variance = sum(statistics.variance(v) * (len(v) - 1) for v in repeated) / sum(len(v) - 1 for v in repeated)
        sign = -1 if sweep.select.by.endswith("loss") else 1
        behind = [sign * (statistics.fmean(choice) - statistics.fmean(v)) for v in tried.values()]
        errors = [math.sqrt(variance * (1 / len(choice) + 1 / len(v))) for v in tried.values()]
        judged, close = judged + 1, close + any(d < error for d, error in zip(behind, errors, strict=True))
    if close:
        yield (
            f"In {close} of {judged} cells another value was within a standard error of the chosen one: other tuning "
            "seeds might choose otherwise."
        )


def _all_solve(runs: Runs, metric: str, enough: float) -> bool:
    return metric.endswith("accuracy") and (
        stats.solved([*values(runs, metric, None).values()], enough) == len(runs.seeds)
    )


def _by_setting(records: Sequence[RunRecord], metric: str) -> dict[str, list[float]]:
    """Settings, as text -> what runs with them ended at; those that a run diverged with are left out.

    Of each seed the newest run: older code may have been wrong, and a seed that is there twice is no second seed.
    """
    newest = {(json.dumps(r.tuned, sort_keys=True), r.seed): r for r in sorted(records, key=lambda r: r.time.start)}
    found: dict[str, list[float]] = {}
    lost = set()
    for (setting, _), record in newest.items():
        value = record.metrics.get(metric)
        if record.status == "ok" and value is not None:
            found.setdefault(setting, []).append(value)
        else:
            lost.add(setting)
    return {setting: values for setting, values in found.items() if setting not in lost}


def none_ended(all_runs: Sequence[Runs], tuning: Tuning) -> Iterator[str]:
    """Cells whose setting is no choice, since no tuning run with any of them ended well."""
    names = [
        str(runs.cell)
        for runs in all_runs
        if (tried := tuning.get(runs.cell.cell)) and all(r.status != "ok" for r in tried)
    ]
    if names:
        yield f"no setting was chosen, since tuning runs diverged with all of them: {'; '.join(names)}"


def by_fewer(sweep: Sweep, all_runs: Sequence[Runs], tuning: Tuning) -> Iterator[str]:
    """Cells whose choice is older than the file's list of tuning seeds."""
    if sweep.select is None:
        return
    found: dict[str, list[str]] = {}
    for runs in all_runs:
        seeds = {r.seed for r in tuning.get(runs.cell.cell, ()) if runs.records and r.tuned == runs.records[0].tuned}
        if seeds and not set(sweep.select.seeds) <= seeds:
            found.setdefault(spans(sorted(seeds)), []).append(str(runs.cell))
    now = spans(sweep.select.seeds)
    for seeds_used, names in found.items():
        which = named(names, len(all_runs))
        yield f"chosen with tuning seeds {seeds_used}, not {now} as the file has it now: {which}"


def other_grids(all_runs: Sequence[Runs], tuning: Tuning) -> Iterator[str]:
    """Grids of different size: the best of many looks better than the best of few."""
    grids = {
        str(runs.cell): len({json.dumps(r.tuned, sort_keys=True) for r in tuning[runs.cell.cell]})
        for runs in all_runs
        if runs.cell.cell in tuning
    }
    if len(set(grids.values())) > 1:
        sizes = "; ".join(f"{name}: {size}" for name, size in grids.items())
        yield f"cells were tuned over grids of different size, which favours the larger: {sizes}"


def not_chosen(all_runs: Sequence[Runs], chosen: Mapping[str, Args]) -> Iterator[str]:
    """Cells that were chosen for again, and whose runs with the new choice are still to come."""
    for runs in all_runs:
        choice = chosen.get(runs.cell.cell)
        if choice is not None and runs.records and runs.records[0].tuned != choice:
            used = pairs(runs.records[0].tuned or {})
            yield f"{runs.cell}: trained with {used}, where {pairs(choice)} is chosen now; run the sweep to go on"


def named(cells: Sequence[str], of: int) -> str:
    """A few cells by their names, many by their number."""
    return "; ".join(cells) if len(cells) < 4 else f"{len(cells)} of {of} cells"
