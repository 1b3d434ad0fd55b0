"""Records to a table: mean and deviation over seeds, honestly.

A cell of the table is one configuration. Its number comes from runs of one version of the code, the data and the
tuning (`runs.py`); seeds that are missing, diverged or failed are counted where the number stands. The table is plain
data; `render.py` writes it down.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mixassay.errors import UserError
from mixassay.record import RunRecord
from mixassay.registry import suggest
from mixassay.runners import choice_notes, stats
from mixassay.runners.labels import find, heads, short, spans
from mixassay.runners.runs import Runs, choose, values
from mixassay.runners.tolerance import BY_TORCH, ERROR, LAST, beyond, explained
from mixassay.spec import Args, cell_labels, mixer_labels, plain
from mixassay.sweep import Sweep


@dataclass(frozen=True)
class Entry:
    """One number of the table: `runs` at one evaluation cell, or at the mean over them (`at` None)."""

    runs: Runs
    at: Mapping[str, Any] | None
    values: Mapping[int, float]  # seed -> value, of the runs that have one

    @functools.cached_property
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
    column_heads: Label  # paths; the values of a cell's columns are its configuration's there, or an evaluation cell's
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

    @property
    def worst(self) -> str:
        return "min" if self.higher_is_better else "max"

    @property
    def partly_older(self) -> bool:
        """Whether some numbers are by the present code and some by older code; these are marked then."""
        return partly_older(entry.runs for entry in self.entries.values())


def build(
    sweep: Sweep,
    records: Iterable[RunRecord],
    *,
    sources: Mapping[str, str] | None = None,
    chosen: Mapping[str, Args] | None = None,
) -> Table:
    """The table of a sweep.

    `records` are the suite's, as `Store.read` gives them; `sources` maps a cell to the hash of its present code
    (`provenance.source_of`), `chosen` to the settings that its tuning chose. Raises `UserError` for a metric that no
    record holds.
    """
    reported: dict[str, list[RunRecord]] = {}
    tuning: dict[str, list[RunRecord]] = {}
    for record in records:
        (reported if record.role == "report" else tuning).setdefault(record.cell, []).append(record)
    sources, chosen = sources or {}, (chosen or {}) if sweep.select is not None else {}
    all_runs = [
        choose(c, reported.get(c.cell, []), sweep.seeds, sources.get(c.cell), chosen.get(c.cell)) for c in sweep.cells()
    ]
    metric = sweep.report.metric
    _check_metric(metric, all_runs)
    columns, by_eval = _columns(sweep)
    asked = [at for c in sweep.cells() for at in cell_labels(c.sections.task)] if by_eval else []
    head = {plain(at): text for at, text in zip(asked, heads(asked), strict=True)}
    entries: dict[tuple[Label, Label], Entry] = {}
    for runs, row, column in zip(all_runs, _labels(sweep, (sweep.report.rows,)), _labels(sweep, columns), strict=True):
        under = tuple(f"{short(path)}={value}" for path, value in zip(columns, column, strict=True))
        for at in [None, *(cell_labels(runs.cell.sections.task) if by_eval else [])]:
            place = row, (*under, "mean" if at is None else head[plain(at)]) if by_eval else under
            assert place not in entries, f"two cells share a place in the table: {place}"  # refused by Sweep.load
            entries[place] = Entry(runs, at, values(runs, metric, at))
    return Table(
        title=sweep.report.title or sweep.name,
        metric=metric,
        solved_at=sweep.report.compare.solved_at,
        row_heads=(sweep.report.rows,),
        column_heads=sweep.report.columns if sweep.report.columns is not None else columns,
        rows=tuple(dict.fromkeys(row for row, _ in entries)),
        columns=tuple(dict.fromkeys(column for _, column in entries)),
        entries=entries,
        tuned=tuple(sweep.tuned),
        caption=tuple(_caption(sweep, all_runs, tuning)),
        warnings=(
            *_warnings(all_runs),
            *choice_notes.other_grids(all_runs, tuning),
            *choice_notes.by_fewer(sweep, all_runs, tuning),
            *choice_notes.none_ended(all_runs, tuning),
            *choice_notes.not_chosen(all_runs, chosen),
        ),
    )


def _check_metric(metric: str, all_runs: Sequence[Runs]) -> None:
    known = sorted({name for runs in all_runs for record in runs.ok for name in record.metrics})
    if known and metric not in known:
        raise UserError(f'no record holds the metric "{metric}".{suggest(metric, known)}')


def _columns(sweep: Sweep) -> tuple[Label, bool]:
    """The paths of the columns, and whether evaluation cells are columns too.

    They are when a column is one of the task's fields in which they differ: `columns: [task.num_kv]` for a task that
    is evaluated at several `num_kv`. Without `columns`, all that is swept and varies.
    """
    cells, swept = sweep.cells(), _swept(sweep)
    if sweep.report.columns is None:
        varying = [path for path in swept if len({plain(cell.axes.get(path)) for cell in cells}) > 1]
        return tuple(path for path in varying if path != sweep.report.rows), False
    evaluated = {f"task.{key}" for cell in cells for label in cell_labels(cell.sections.task) for key in label}
    paths = tuple(path for path in sweep.report.columns if path not in evaluated.difference(swept))
    return paths, paths != sweep.report.columns


def _swept(sweep: Sweep) -> Label:
    return tuple(dict.fromkeys(path for cell in sweep.cells() for path in cell.axes))


def _labels(sweep: Sweep, paths: Label) -> list[Label]:
    """For each cell of the sweep its values at these paths, as texts."""
    cells = sweep.cells()
    shown = (sweep.report.rows, *(_swept(sweep) if sweep.report.columns is None else sweep.report.columns))
    hide = [path.removeprefix("mixer.") for path in shown if path.startswith("mixer.")]
    mixers = mixer_labels([cell.sections.mixer for cell in cells], hide)
    configs = [cell.sections.config() for cell in cells]
    return [
        tuple(mixer if path == "mixer" else _text(find(config, path)) for path in paths)
        for mixer, config in zip(mixers, configs, strict=True)
    ]


def _text(value: Any) -> str:
    return str(value["name"]) if isinstance(value, Mapping) and set(value) == {"name"} else plain(value)


def _caption(sweep: Sweep, all_runs: Sequence[Runs], tuning: choice_notes.Tuning) -> list[str]:
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
    lines += [choice_notes.rule(sweep, all_runs), *choice_notes.at_the_end(sweep, all_runs)]
    lines += choice_notes.close_calls(sweep, all_runs, tuning)
    if used:
        commits = sorted({record.code.name for record in used})
        devices = sorted({str(record.env.get("class")) for record in used})
        data = sorted({record.data for record in used})
        lines.append(f"Code {', '.join(commits)}; data {', '.join(data)}; on {'; '.join(devices)}.")
    older = [str(runs.cell) for runs in all_runs if runs.older]
    if partly_older(all_runs):  # each is marked in the table, too
        lines.append(f"† made by older code than the present: {choice_notes.named(older, len(all_runs))}.")
    elif older:
        lines.append("All by older code than the present.")
    return [*lines, *([sweep.report.notes] if sweep.report.notes else [])]


def partly_older(all_runs: Iterable[Runs]) -> bool:
    return len({runs.older for runs in all_runs if runs.records}) > 1


def _far_gradients(records: Sequence[RunRecord]) -> Iterator[str]:
    """Of gradients that are further off than their precision explains (`first_step`), the worst."""
    for when, error, by_torch in (
        ("first gradient", ERROR, BY_TORCH),
        ("gradient behind the training", LAST[ERROR], LAST[BY_TORCH]),
    ):
        known = [(off, r) for r in records if (off := r.metrics.get(error)) is not None]
        if not known:
            continue
        off, record = max(known, key=lambda one: one[0])
        torch, precision = record.metrics.get(by_torch), str(find(record.config, "train.precision"))
        kernel = torch is not None and not explained(off, torch)
        # a trained model's gradient is small, and that rounding shows in it no news
        if not beyond(off, precision) or (error != ERROR and not kernel):
            continue
        said = f"the {when} was {off:.1%} off float32's, more than its precision explains"
        if torch is not None:
            said += f"; rounding takes torch's own operators {torch:.1%} off"
            said += ": a kernel may be wrong, please report it" if kernel else ", so it is the precision and no kernel"
        yield said


def _warnings(all_runs: Sequence[Runs]) -> list[str]:
    found = []
    for runs in all_runs:
        name = str(runs.cell)
        numbers = [record.metrics for record in runs.ok]
        solved = all(value in (1.0, None) for metrics in numbers for k, value in metrics.items() if "accuracy" in k)
        if len(numbers) > 1 and all(metrics == numbers[0] for metrics in numbers) and not solved:
            found.append(f"{name}: all {len(numbers)} seeds gave bit-equal numbers; does the seed drive anything?")
        found += [f"{name}: {said}" for said in _far_gradients(runs.ok)]
        if runs.aside:
            found.append(f"{name}: {runs.aside} run(s) on another machine, data version or tuning are left out")
    for what, kinds in (
        ("data versions", {record.data for runs in all_runs for record in runs.records}),
        ("kinds of machine", {str(record.env.get("class")) for runs in all_runs for record in runs.records}),
    ):
        if len(kinds) > 1:
            found.append(f"cells were measured on different {what}: {'; '.join(sorted(kinds))}")
    return found
