"""A table's numbers with their coordinates, as finely as they were measured, and which coordinates make a picture."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mixassay.runners import stats
from mixassay.runners.labels import find, named, pairs, short
from mixassay.runners.report import Entry, Label, Table
from mixassay.runners.runs import Runs, values
from mixassay.spec import cell_labels


@dataclass(frozen=True)
class Observation:
    """One configuration, at one of its evaluation cells if it has several."""

    row: Label
    at: Mapping[str, Any]  # coordinate -> value
    values: Mapping[int, float]  # seed -> value, in the unit shown
    runs: Runs
    where: str = ""  # the evaluation cell, where the configuration has several

    @property
    def complete(self) -> bool:
        return len(self.values) == len(self.runs.seeds)

    @property
    def moments(self) -> stats.Moments | None:
        return stats.moments(list(self.values.values())) if self.values else None

    def says(self, value: float) -> str:
        """A seed's value here, where the run's own number is another: a mean over evaluation cells."""
        return f"{self.where}: {value:.4g}" if self.where else ""


def configurations(table: Table) -> Iterator[tuple[Label, Label, Entry]]:
    """(row, column, entry) of every configuration, its evaluation cells left out."""
    for (row, column), entry in table.entries.items():
        if entry.at is None:
            yield row, column, entry


def observations(table: Table) -> list[Observation]:
    """The table's numbers as finely as they were measured."""
    found = []
    for row, _, entry in configurations(table):
        runs, at = entry.runs, coordinates(table, entry.runs)
        labels = cell_labels(runs.cell.sections.task)
        if len(labels) == 1:
            found.append(Observation(row, at, shown(table, entry.values), runs))
            continue
        for label in labels:
            # the task's own field of that name says what was trained on, and is another coordinate
            here = {f"task.{key}" if f"task.{key}" not in at else f"evaluated {key}": v for key, v in label.items()}
            found.append(
                Observation(row, here | at, shown(table, values(runs, table.metric, label)), runs, pairs(label))
            )
    return found


def coordinates(table: Table, runs: Runs) -> dict[str, Any]:
    """The values of a configuration's columns. A column that only evaluation cells have is none of them."""
    config, evaluated = runs.cell.sections.config(), cell_labels(runs.cell.sections.task)
    return {
        path: find(config, path)
        for path in table.column_heads
        if path in runs.cell.axes or path.removeprefix("task.") not in {key for label in evaluated for key in label}
    }


def shown(table: Table, found: Mapping[int, float]) -> dict[int, float]:
    return {seed: value * (100 if table.points else 1) for seed, value in found.items()}


def numeric(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def numeric_axes(table: Table, found: Sequence[Observation]) -> list[str]:
    """Coordinates that are numbers everywhere and vary: the columns in their order, then what else is evaluated."""
    names = dict.fromkeys([*table.column_heads, *(name for o in found for name in o.at)])
    axes = []
    for name in names:
        there = [o.at.get(name) for o in found]
        if all(map(numeric, there)) and len(set(there)) > 1:
            axes.append(name)
    return axes


def facets(found: Sequence[Observation], axes: Sequence[str]) -> Iterator[tuple[str, list[Observation]]]:
    """(title, observations) for each value of the other coordinates. What the axes determine needs no panel."""
    others = [name for name in dict.fromkeys(name for o in found for name in o.at) if name not in axes]
    free = []
    for name in others:
        there: dict[str, set[str]] = {}
        for o in found:
            there.setdefault(repr([o.at.get(axis) for axis in axes]), set()).add(repr(o.at.get(name)))
        if any(len(seen) > 1 for seen in there.values()):
            free.append(name)
    panels: dict[str, list[Observation]] = {}
    for o in found:
        title = ", ".join(f"{short(name)}={named(o.at[name])}" for name in free if name in o.at)
        panels.setdefault(title, []).append(o)
    yield from panels.items()


def crossed(found: Sequence[Observation], axes: Sequence[str]) -> tuple[str, str] | None:
    """The first two axes of which neither follows from the other."""
    for i, x in enumerate(axes):
        for y in axes[i + 1 :]:
            there = {(o.at[x], o.at[y]) for o in found}
            if len(there) > max(len({a for a, _ in there}), len({b for _, b in there})):
                return x, y
    return None
