"""What is drawn of a table: its numbers against a column, row by row, against state, over two axes, while training.

Five seeds that solve a task or fail it are described by no band, so a picture shows one dot for each seed and a mark
for the mean, hollow where seeds are missing. Accuracies are in points.
"""

from collections.abc import Callable, Sequence

from mixassay.errors import UserError
from mixassay.record import RunRecord
from mixassay.runners.axes import Axis, accuracy_axis, bytes_axis, linear_axis, value_axis
from mixassay.runners.labels import short
from mixassay.runners.lm.figure import by_position
from mixassay.runners.marks import KINDS, Curve, Dot, Figure, Heatmap, Kind, Mean, Panel, Series, Shade
from mixassay.runners.observations import (
    Observation,
    configurations,
    coordinates,
    crossed,
    facets,
    numeric_axes,
    observations,
    shown,
)
from mixassay.runners.report import Table


def figure(table: Table, kind: Kind) -> Figure:
    """One figure. Raises `UserError` where the table has nothing to draw in it."""
    drawn: dict[Kind, Drawn] = {
        "metric": _metric,
        "seeds": _seeds,
        "state": _state,
        "heatmap": _heatmaps,
        "curves": _curves,
        "positions": by_position,
    }
    panels, notes = drawn[kind](table)
    if not panels:
        raise UserError(f"no {kind} to draw: {NEEDS[kind]}")
    titles: dict[Kind, str] = {
        "metric": table.metric,
        "seeds": f"{table.metric}, every seed",
        "state": f"{table.metric} against state",
        "heatmap": f"{table.metric} over two axes",
        "curves": "learning curves",
        "positions": "loss by position",
    }
    names = tuple(" ".join(row) for row in table.rows)
    return Figure(kind, f"{table.title}: {titles[kind]}", names, tuple(panels), tuple(notes))


Drawn = Callable[[Table], tuple[Sequence[Panel | Heatmap], list[str]]]
NEEDS: dict[Kind, str] = {
    "metric": "no seed has a number yet",
    "seeds": "no seed has a number yet",
    "state": "no record says how many bytes of state its mixer keeps",
    "curves": "no record has a learning curve",
    "positions": "no record is of a language model that was evaluated on text",
    "heatmap": "it needs two numeric axes that are crossed, among the columns or the task's evaluation cells",
}


def figures(table: Table) -> list[Figure]:
    """All figures that the table has something for, but for `seeds`: a page has them beside each number."""
    found = []
    for kind in KINDS:
        if kind == "seeds":
            continue
        try:
            found.append(figure(table, kind))
        except UserError:
            continue
    return found


# -- the figures -------------------------------------------------------------------------------------------------------

SEEDS = "One dot for each seed, the large mark their mean; rows that share a place stand a little aside."
BARS = "One dot for each seed, the bar their mean."
HOLLOW = "Hollow marks and dotted bars: not every seed has a number."


def _metric(table: Table) -> tuple[list[Panel], list[str]]:
    """Against the first numeric column, or else row by row."""
    found = observations(table)
    if not any(o.values for o in found):
        return [], []
    axes = numeric_axes(table, found)[:1]
    y, panels = metric_axis(table, [v for o in found for v in o.values.values()]), []
    for title, here in facets(found, axes):
        if axes:
            x = value_axis(short(axes[0]), [o.at[axes[0]] for o in here])
            panels.append(Panel(title, x, y, _against(table, here, lambda o: o.at[axes[0]])))
        else:
            panels.append(_by_row(table, title, here, y))
    return panels, [SEEDS if axes else BARS, *_hollow(found)]


def _seeds(table: Table) -> tuple[list[Panel], list[str]]:
    """The table's own numbers row by row, means over evaluation cells where it has several; a panel for each column."""
    found = [
        Observation(row, coordinates(table, entry.runs), shown(table, entry.values), entry.runs)
        for row, _, entry in configurations(table)
    ]
    if not any(o.values for o in found):
        return [], []
    y = metric_axis(table, [v for o in found for v in o.values.values()])
    panels = [_by_row(table, title, here, y) for title, here in facets(found, ())]
    return panels, [BARS, *_hollow(found)]


def _by_row(table: Table, title: str, found: Sequence[Observation], metric: Axis) -> Panel:
    names = [row for row in table.rows if any(o.row == row for o in found)]
    n = len(names)
    series = []
    for o in found:
        i, seeds = names.index(o.row), o.runs.seeds
        apart = min(0.5 / len(seeds), 0.14) / n
        dots = [
            Dot(
                value,
                i,
                o.runs.cell.cell,
                seed,
                dy=((len(seeds) - 1) / 2 - seeds.index(seed)) * apart,
                where=o.says(value),
            )
            for seed, value in o.values.items()
        ]
        m = o.moments
        means = [Mean(m.mean, i, o.runs.cell.cell, o.complete)] if m else []
        series.append(Series(" ".join(o.row), table.rows.index(o.row), tuple(dots), tuple(means)))
    ticks = tuple((float(i), " ".join(name)) for i, name in enumerate(names))
    return Panel(title, metric, Axis("", n - 0.5, -0.5, ticks), tuple(series), bars=True)


def _against(table: Table, found: Sequence[Observation], x: Callable[[Observation], float]) -> tuple[Series, ...]:
    """One series a row. Rows that share an x stand a little aside of each other."""
    rows = [row for row in table.rows if any(o.row == row for o in found)]
    sharing = {
        there: [row for row in rows if any(o.row == row and x(o) == there for o in found)] for there in map(x, found)
    }

    def aside(o: Observation) -> float:
        beside = sharing[x(o)]
        return (beside.index(o.row) - (len(beside) - 1) / 2) * min(0.014, 0.12 / len(beside))

    series = []
    for row in rows:
        mine = sorted((o for o in found if o.row == row), key=x)
        dots = [
            Dot(x(o), v, o.runs.cell.cell, seed, dx=aside(o), where=o.says(v))
            for o in mine
            for seed, v in o.values.items()
        ]
        means = [Mean(x(o), o.moments.mean, o.runs.cell.cell, o.complete, aside(o)) for o in mine if o.moments]
        joined = len({mean.x for mean in means}) == len(means)
        series.append(Series(" ".join(row), table.rows.index(row), tuple(dots), tuple(means), joined=joined))
    return tuple(series)


def _state(table: Table) -> tuple[list[Panel], list[str]]:
    """The metric against bytes of state after the longest T, a panel for each setting of the task."""
    found: list[Observation] = []
    state: dict[str, int] = {}
    lengths: set[int] = set()
    for row, _, entry in configurations(table):
        runs, measured = entry.runs, [record.state_bytes for record in entry.runs.ok if record.state_bytes]
        if entry.values and measured:
            at = {path: value for path, value in coordinates(table, runs).items() if path.startswith("task.")}
            found.append(Observation(row, at, shown(table, entry.values), runs))
            T = max(measured[0], key=int)
            state[runs.cell.cell] = measured[0][T]
            lengths.add(int(T))
    if not found:
        return [], []
    T = f"T={min(lengths)}" if len(lengths) == 1 else "the longest T"
    x = bytes_axis(f"state bytes at {T}", list(state.values()))
    y = metric_axis(table, [v for o in found for v in o.values.values()])
    panels = []
    for title, here in facets(found, ()):
        known = [(state[o.runs.cell.cell], o.moments.mean) for o in here if o.complete and o.moments]
        series = _against(table, here, lambda o: state[o.runs.cell.cell])
        panels.append(Panel(title, x, y, series, front=front(known, table.higher_is_better)))
    return panels, [SEEDS, FRONT, *_hollow(found)]


FRONT = "Grey steps: the best mean for that much state or less, of complete cells; a step alone is no clear difference."


def front(points: Sequence[tuple[float, float]], higher_is_better: bool = True) -> tuple[tuple[float, float], ...]:
    """Of (cost, value) those that no other beats at the same cost or less, from the cheapest on."""
    sign = 1 if higher_is_better else -1
    best: list[tuple[float, float]] = []
    for cost, value in sorted(points, key=lambda point: (point[0], -sign * point[1])):
        if not best or sign * value > sign * best[-1][1]:
            best.append((cost, value))
    return tuple(best)


def _curves(table: Table) -> tuple[list[Panel], list[str]]:
    """The metric on validation rows while training, a panel for each configuration."""
    series = _curve_series(table)
    scale = 100 if series.endswith("accuracy") else 1
    found = []
    for row, column, entry in configurations(table):
        curves = [
            Curve(points, entry.runs.cell.cell, record.seed, record.status == "ok")
            for record in entry.runs.records
            if (points := curve(record, series, scale))
        ]
        if curves:
            title = ", ".join([" ".join(row), *(column if column != ("mean",) else ())])
            found.append((title.removesuffix(", mean"), row, curves))
    if not found:
        return [], []
    y_values = [y for _, _, curves in found for c in curves for _, y in c.points]
    y = accuracy_axis(series) if scale == 100 else linear_axis(series, 0.0, max(y_values))
    x = linear_axis("step", 0.0, max(c.points[-1][0] for _, _, curves in found for c in curves))
    panels = [
        Panel(title, x, y, (Series(" ".join(row), table.rows.index(row), curves=tuple(curves)),))
        for title, row, curves in found
    ]
    lost = any(not c.ended for _, _, curves in found for c in curves)
    notes = [f"{series}, one line for each seed; a dot where the run ended or was stopped."]
    return panels, [*notes, *(["A cross: the run diverged or failed there."] if lost else [])]


def _curve_series(table: Table) -> str:
    """The metric itself if it was followed, else on validation rows, else whatever was."""
    known = dict.fromkeys(
        name
        for _, _, entry in configurations(table)
        for record in entry.runs.records
        for name in (record.curve.__pydantic_extra__ or {})
    )
    wanted = (table.metric, table.metric.replace("test/", "valid/"), *known, "valid/loss")
    return next(name for name in wanted if name in known or name == "valid/loss")


def curve(record: RunRecord, series: str, scale: float) -> tuple[tuple[float, float], ...]:
    there = (record.curve.__pydantic_extra__ or {}).get(series, ())
    return tuple((step, scale * y) for step, y in zip(record.curve.step, there, strict=False) if y is not None)


def _heatmaps(table: Table) -> tuple[list[Heatmap], list[str]]:
    """The metric over the first two numeric axes that are crossed, a map for each row of the table."""
    found = observations(table)
    axes = crossed(found, numeric_axes(table, found))
    if axes is None or not any(o.values for o in found):
        return [], []
    x, y = axes
    means = [o.moments.mean for o in found if o.moments]
    low, high = (0.0, 100.0) if table.points else (min(means), max(means))

    def shade(o: Observation) -> Shade:
        m = o.moments
        part = (m.mean - low) / (high - low) if m and high > low else 0.0
        return Shade(
            m, len(o.runs.seeds), part if table.higher_is_better else 1 - part, o.runs.cell.cell, table.points, o.where
        )

    maps = []
    for row in table.rows:
        for title, here in facets([o for o in found if o.row == row], axes):
            places = [(o.at[x], o.at[y]) for o in here]
            assert len(set(places)) == len(places), f"two numbers share a place: {row} {title}"
            maps.append(
                Heatmap(
                    ", ".join(filter(None, [" ".join(row), title])),
                    table.rows.index(row),
                    short(x),
                    short(y),
                    tuple(sorted({place[0] for place in places})),
                    tuple(sorted({place[1] for place in places})),
                    {place: shade(o) for place, o in zip(places, here, strict=True)},
                )
            )
    better = "dark is better" if not table.points else "pale is 0, dark is 100"
    return maps, [f"Mean over seeds, below it how many seeds have a number of those asked for; {better}."]


def metric_axis(table: Table, there: Sequence[float]) -> Axis:
    return accuracy_axis(table.metric) if table.points else linear_axis(table.metric, 0.0, max(there, default=1.0))


def _hollow(found: Sequence[Observation]) -> list[str]:
    return [HOLLOW] if any(o.values and not o.complete for o in found) else []
