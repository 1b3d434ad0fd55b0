"""The two sides of a cell: of all runs that there are of a configuration, those that are compared.

The runs of a side are of one version of code, data, machine and tuning, as in a table, and of all versions on either
side the pair is taken that differs in the code alone, where there is one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mixassay.record import RunRecord
from mixassay.runners import evidence, stats
from mixassay.runners.evidence import Floats
from mixassay.spec import plain


@dataclass(frozen=True)
class Side:
    """The runs of a cell on one side: one a seed, all of one version of code, data, machine and tuning."""

    runs: Mapping[int, RunRecord]
    values: Mapping[int, float]  # of the seeds that ended well
    floors: Mapping[int, float]  # the least variance of each value

    @property
    def any(self) -> RunRecord:
        return next(iter(self.runs.values()))

    @property
    def moments(self) -> stats.Moments | None:
        return stats.moments(list(self.values.values())) if self.values else None

    @property
    def seconds(self) -> float:
        """Of one run."""
        return float(np.mean([record.time.seconds for record in self.runs.values()]))

    def arrays(self, seeds: Sequence[int]) -> tuple[Floats, Floats]:
        return np.array([self.values[seed] for seed in seeds]), np.array([self.floors[seed] for seed in seeds])


def by_cell(records: Iterable[RunRecord]) -> dict[str, list[RunRecord]]:
    """Of the reported runs."""
    found: dict[str, list[RunRecord]] = {}
    for record in records:
        if record.role == "report":
            found.setdefault(record.cell, []).append(record)
    return found


def pair(base: Sequence[RunRecord], head: Sequence[RunRecord], metric: str) -> tuple[Side | None, Side | None]:
    """The versions to compare: alike in data, machine and tuning where there are such; then the fullest, the newest."""

    def alike(b: Side, h: Side) -> tuple[Any, ...]:
        x, y = b.any, h.any
        least = min(len(b.values), len(h.values))
        return x.data == y.data, kind(x) == kind(y), x.tuned == y.tuned, least, newest(b), newest(h)

    before, after = versions(base, metric), versions(head, metric)
    if before and after:
        return max(((b, h) for b in before for h in after), key=lambda both: alike(*both))
    return max(before, key=newest, default=None), max(after, key=newest, default=None)


def versions(records: Sequence[RunRecord], metric: str) -> list[Side]:
    found: dict[Any, dict[int, RunRecord]] = {}
    for record in records:
        tuned = tuple(sorted((path, plain(value)) for path, value in record.tuned.items()))
        found.setdefault((record.code.source, record.data, kind(record), tuned), {})[record.seed] = record
    return [side(runs, metric) for runs in found.values()]


def side(runs: Mapping[int, RunRecord], metric: str) -> Side:
    split = metric.split("/")[0]
    values, floors = {}, {}
    for seed, record in sorted(runs.items()):
        cells = [e for e in record.eval if e.split == split]
        value = record.metrics.get(metric) if record.status == "ok" else None
        if value is not None and cells and all(e.scored for e in cells):
            values[seed] = value
            counted = [evidence.floor(e.accuracy, e.scored) for e in cells if e.accuracy is not None]
            floors[seed] = float(np.sum(counted)) / len(cells) ** 2  # the variance of a mean over cells
    return Side(dict(sorted(runs.items())), values, floors)


def kind(record: RunRecord) -> str:
    """Of machine."""
    return str(record.env.get("class"))


def newest(side: Side) -> str:
    return max(record.time.start for record in side.runs.values())
