"""Records to a table: mean and deviation over seeds, honestly.

A cell of the table is one configuration. Its number comes from runs of one version of the code, the data and the
tuning, never from a mixture; seeds that are missing, diverged or failed are counted where the number stands. The
table is plain data; `render.py` writes it down.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mixassay.errors import UserError
from mixassay.record import SETTLED, RunRecord
from mixassay.registry import suggest
from mixassay.runners import stats
from mixassay.runners.labels import find, pairs, short, show, spans

EVAL = "eval"
"""As a column: one column for each evaluation cell, after their mean."""


class Cell(Protocol):
    """One configuration of a sweep: its hash, and path -> value for what was swept."""

    @property
    def cell(self) -> str: ...
    @property
    def axes(self) -> Mapping[str, Any]: ...


class Compare(Protocol):
    @property
    def solved_at(self) -> float: ...


class Settings(Protocol):
    @property
    def metric(self) -> str: ...
    @property
    def rows(self) -> str | Sequence[str] | None: ...
    @property
    def columns(self) -> str | Sequence[str] | None: ...
    @property
    def compare(self) -> Compare: ...
    @property
    def title(self) -> str | None: ...
    @property
    def notes(self) -> str | Sequence[str] | None: ...


class Select(Protocol):
    @property
    def axes(self) -> Mapping[str, Sequence[Any]]: ...
    @property
    def by(self) -> str: ...
    @property
    def seeds(self) -> Sequence[int]: ...


class SweepLike(Protocol):
    """What a report asks of a sweep."""

    @property
    def name(self) -> str: ...
    @property
    def seeds(self) -> Sequence[int]: ...
    @property
    def report(self) -> Settings: ...
    @property
    def select(self) -> Select | None: ...
    def cells(self) -> Iterable[Cell]: ...


@dataclass(frozen=True)
class Runs:
    """The runs that stand for one configuration: at most one a seed, all of one code, data, machine and tuning."""

    cell: str
    axes: Mapping[str, Any]
    seeds: tuple[int, ...]  # as asked for
    records: tuple[RunRecord, ...]
    older: bool  # made by other code than the present
    aside: int  # further runs of these seeds by the same code, left out because machine, data or tuning differ

    @property
    def ok(self) -> tuple[RunRecord, ...]:
        return tuple(record for record in self.records if record.status == "ok")


@dataclass(frozen=True)
class Entry:
    """One number of the table: `runs` at one evaluation cell, or at the mean over them (`at` None)."""

    runs: Runs
    at: Mapping[str, Any] | None
    values: Mapping[int, float]  # seed -> value, of the runs that have one

    @property
    def moments(self) -> stats.Moments | None:
        return stats.moments(list(self.values.values())) if self.values else None

    @property
    def complete(self) -> bool:
        return len(self.values) == len(self.runs.seeds)

    @property
    def settled(self) -> int:
        """Seeds whose outcome is known: they ended with a number, or diverged."""
        return len(self.values) + sum(record.status == "diverged" for record in self.runs.records)

    @property
    def ended(self) -> dict[str, int]:
        """How the seeds without a number ended: `{"diverged": 2}`; those never run are not here."""
        lost = [
            r.status if r.status != "ok" else "without value" for r in self.runs.records if r.seed not in self.values
        ]
        return dict(sorted(Counter(lost).items()))


Label = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    title: str
    metric: str
    solved_at: float
    row_heads: Label  # paths
    rows: tuple[Label, ...]
    columns: tuple[Label, ...]
    entries: Mapping[tuple[Label, Label], Entry]  # (row, column) -> entry
    tuned: tuple[str, ...]  # paths
    caption: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def points(self) -> bool:
        """Accuracies are shown in points (per cent), all else as it is."""
        return self.metric.endswith("accuracy")

    @property
    def higher_is_better(self) -> bool:
        return not self.metric.endswith("loss")


def build(sweep: SweepLike, records: Iterable[RunRecord], *, sources: Mapping[str, str] | None = None) -> Table:
    """The table of a sweep.

    `records` are the suite's, as `Store.read` gives them; `sources` maps a cell to the hash of its present code
    (`provenance.source_of`). Raises `UserError` for a metric that no record holds.
    """
    reported: dict[str, list[RunRecord]] = {}
    tuning: dict[str, list[RunRecord]] = {}
    for record in records:
        (reported if record.role == "report" else tuning).setdefault(record.cell, []).append(record)
    sources = sources or {}
    all_runs = [choose(c, reported.get(c.cell, []), tuple(sweep.seeds), sources.get(c.cell)) for c in sweep.cells()]
    metric = sweep.report.metric
    _check_metric(metric, all_runs)
    row_heads, placed, wants_eval = _layout(all_runs, listed(sweep.report.rows), listed(sweep.report.columns))
    entries: dict[tuple[Label, Label], Entry] = {}
    for (row, column), runs in placed.items():
        for at in [None, *(_eval_cells(all_runs, metric) if wants_eval else [])]:
            column_label = (*column, "mean" if at is None else pairs(at)) if wants_eval else column
            entries[row, column_label] = Entry(runs, at, _values(runs, metric, at))
    return Table(
        title=sweep.report.title or sweep.name,
        metric=metric,
        solved_at=sweep.report.compare.solved_at,
        row_heads=row_heads,
        rows=tuple(dict.fromkeys(row for row, _ in entries)),
        columns=tuple(dict.fromkeys(column for _, column in entries)),
        entries=entries,
        tuned=tuple(sorted({path for runs in all_runs for record in runs.records for path in record.tuned})),
        caption=(*_caption(sweep, all_runs), *listed(sweep.report.notes)),
        warnings=tuple(_warnings(all_runs, tuning)),
    )


def choose(cell: Cell, records: Sequence[RunRecord], seeds: tuple[int, ...], current: str | None) -> Runs:
    """The runs of one version: of the present code if they are complete, else the most recent version there is."""
    versions: dict[tuple[str, str, str, str], dict[int, RunRecord]] = {}
    for record in records:
        if record.seed in seeds:
            tuned = json.dumps(record.tuned, sort_keys=True)
            key = (record.code.source, record.data, str(record.env.get("class")), tuned)
            versions.setdefault(key, {})[record.seed] = record
    if not versions:
        return Runs(cell.cell, cell.axes, seeds, (), older=False, aside=0)

    def rank(key: tuple[str, str, str, str]) -> tuple[bool, str]:
        runs = versions[key].values()
        whole = len(runs) == len(seeds) and all(record.status in SETTLED for record in runs)
        return key[0] == current and whole, max(record.time.start for record in runs)

    best = max(versions, key=rank)
    aside = sum(len(runs) for key, runs in versions.items() if key != best and key[0] == best[0])
    picked = tuple(versions[best][seed] for seed in seeds if seed in versions[best])
    return Runs(cell.cell, cell.axes, seeds, picked, older=current not in (None, best[0]), aside=aside)


def _check_metric(metric: str, all_runs: Sequence[Runs]) -> None:
    known = sorted({name for runs in all_runs for record in runs.ok for name in record.metrics})
    if known and metric not in known:
        raise UserError(f'no record holds the metric "{metric}".{suggest(metric, known)}')


def _layout(
    all_runs: Sequence[Runs], rows: Label, columns: Label
) -> tuple[Label, dict[tuple[Label, Label], Runs], bool]:
    """Where each configuration stands. What is swept but named by neither rows nor columns is never pooled over."""
    swept = tuple(dict.fromkeys(path for runs in all_runs for path in runs.axes))
    rows = rows or ("mixer",)
    wants_eval = EVAL in columns
    paths = tuple(path for path in columns if path != EVAL)
    if not columns:
        paths = tuple(path for path in swept if path not in rows and len({_label(runs, path) for runs in all_runs}) > 1)
    while True:
        placed: dict[tuple[Label, Label], Runs] = {}
        for runs in all_runs:
            row = tuple(_label(runs, path) for path in rows)
            column = tuple(f"{short(path)}={_label(runs, path)}" for path in paths)
            twin = placed.setdefault((row, column), runs)
            if twin is not runs:
                break
        else:
            return rows, placed, wants_eval
        telling = [path for path in swept if _label(twin, path) != _label(runs, path)]
        if not telling:
            raise UserError(f"two cells of the sweep look alike in every axis: {pairs(runs.axes) or runs.cell}")
        rows = (*rows, telling[0])


def _label(runs: Runs, path: str) -> str:
    """The value at a path: as swept, or as the records have it."""
    if path in runs.axes:
        return show(runs.axes[path])
    fixed = find(runs.records[0].config, path) if runs.records else "?"
    return str(fixed["name"]) if isinstance(fixed, Mapping) and "name" in fixed else show(fixed)


def _eval_cells(all_runs: Sequence[Runs], metric: str) -> list[Mapping[str, Any]]:
    """The distinct evaluation cells of the metric's split, in order of appearance."""
    split = metric.split("/")[0]
    return list(
        {pairs(e.cell): e.cell for runs in all_runs for r in runs.ok for e in r.eval if e.split == split}.values()
    )


def _values(runs: Runs, metric: str, at: Mapping[str, Any] | None) -> dict[int, float]:
    """seed -> value of the runs that ended ok and have one."""
    split, name = metric.split("/")
    found: dict[int, float] = {}
    for record in runs.ok:
        value = record.metrics.get(metric)
        if at is not None:
            value = next((getattr(e, name, None) for e in record.eval if e.split == split and e.cell == at), None)
        if value is not None:
            found[record.seed] = value
    return found


def _caption(sweep: SweepLike, all_runs: Sequence[Runs]) -> list[str]:
    """What must be said for the numbers to mean something."""
    metric, used = sweep.report.metric, [record for runs in all_runs for record in runs.records]
    unit = ", in points" if metric.endswith("accuracy") else ""
    lines = [f"{metric}: mean ± sample std (ddof=1) over n={len(sweep.seeds)} seeds ({spans(sweep.seeds)}){unit}."]
    cells = {sum(e.split == metric.split("/")[0] for e in record.eval) for record in used if record.status == "ok"}
    if max(cells, default=0) > 1:
        lines.append(f"Each seed's value is its mean over {'-'.join(map(str, sorted(cells)))} evaluation cells.")
    if metric.endswith("accuracy"):
        lines.append(f"solved: seeds at {sweep.report.compare.solved_at:g} or above, of those with an outcome.")
    if any(len(runs.ok) < len(runs.seeds) for runs in all_runs):
        lines.append("k/n: only k of n seeds have a number, and mean, std and min are over these k.")
    lines.append(_tuning_rule(sweep, used))
    if used:
        commits = sorted({_commit(record) for record in used})
        devices = sorted({str(record.env.get("class")) for record in used})
        data = sorted({record.data for record in used})
        lines.append(f"Code {', '.join(commits)}; data {', '.join(data)}; on {'; '.join(devices)}.")
    older = [pairs(runs.axes) or runs.cell for runs in all_runs if runs.older]
    if older:
        lines.append(f"† made by older code than the present: {'; '.join(older)}.")
    return lines


def _tuning_rule(sweep: SweepLike, used: Sequence[RunRecord]) -> str:
    if sweep.select is not None:
        grid = ", ".join(f"{path} of {len(values)}" for path, values in sweep.select.axes.items())
        seeds = spans(sweep.select.seeds)
        return f"Chosen for each cell on {sweep.select.by} with tuning seeds {seeds}, then frozen: {grid} values."
    rates = sorted({rate for record in used if isinstance(rate := find(record.config, "train.lr"), float)})
    fixed = f" at {rates[0]:g}" if len(rates) == 1 else ", not tuned"
    return f"Learning rate fixed by the configuration{fixed}."


def _commit(record: RunRecord) -> str:
    code = record.code
    return (code.commit[:12] if code.commit != "none" else code.version) + ("-dirty" if code.dirty else "")


def _warnings(all_runs: Sequence[Runs], tuning: Mapping[str, Sequence[RunRecord]]) -> list[str]:
    found = []
    for runs in all_runs:
        name = pairs(runs.axes) or runs.cell
        numbers = [record.metrics for record in runs.ok]
        solved = all(value in (1.0, None) for metrics in numbers for k, value in metrics.items() if "accuracy" in k)
        if len(numbers) > 1 and all(metrics == numbers[0] for metrics in numbers) and not solved:
            found.append(f"{name}: all {len(numbers)} seeds gave bit-equal numbers; does the seed drive anything?")
        if runs.aside:
            found.append(f"{name}: {runs.aside} run(s) on another machine, data version or tuning are left out")
    for what, values in (
        ("data versions", {record.data for runs in all_runs for record in runs.records}),
        ("kinds of machine", {str(record.env.get("class")) for runs in all_runs for record in runs.records}),
    ):
        if len(values) > 1:
            found.append(f"cells were measured on different {what}: {'; '.join(sorted(values))}")
    grids = {
        pairs(runs.axes) or runs.cell: len({json.dumps(r.tuned, sort_keys=True) for r in tuning[runs.cell]})
        for runs in all_runs
        if runs.cell in tuning
    }
    if len(set(grids.values())) > 1:
        sizes = "; ".join(f"{name}: {size}" for name, size in grids.items())
        found.append(f"cells were tuned over grids of different size, which favours the larger: {sizes}")
    return found


def listed(value: str | Sequence[str] | None) -> Label:
    return (value,) if isinstance(value, str) else tuple(value or ())
