"""The runs that stand for one configuration, of all that are stored: seeds of one version, never a mixture."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mixassay.record import SETTLED, RunRecord, Version, version_of
from mixassay.spec import Args
from mixassay.sweep import Cell


@dataclass(frozen=True)
class Runs:
    """The runs that stand for one configuration: at most one a seed, all of one code, data, machine and tuning."""

    cell: Cell
    seeds: tuple[int, ...]  # as asked for
    records: tuple[RunRecord, ...]
    older: bool  # made by other code than the present
    aside: int  # further runs of these seeds by the same code, left out because machine, data or tuning differ

    @functools.cached_property
    def ok(self) -> tuple[RunRecord, ...]:
        return tuple(record for record in self.records if record.status == "ok")


def choose(
    cell: Cell, records: Sequence[RunRecord], seeds: tuple[int, ...], current: str | None, chosen: Args | None
) -> Runs:
    """The runs of one version: with the chosen settings if there are any, then of the present code if they are
    complete, else the most recent version there is."""
    versions: dict[Version, dict[int, RunRecord]] = {}
    for record in records:
        if record.seed in seeds:
            versions.setdefault(version_of(record), {})[record.seed] = record
    if not versions:
        return Runs(cell, seeds, (), older=False, aside=0)

    def rank(key: Version) -> tuple[bool, bool, str]:
        runs = versions[key].values()
        whole = len(runs) == len(seeds) and all(record.status in SETTLED for record in runs)
        as_chosen = chosen is not None and all(record.tuned == chosen for record in runs)
        return as_chosen, key[0] == current and whole, max(record.time.start for record in runs)

    best = max(versions, key=rank)
    aside = sum(len(runs) for key, runs in versions.items() if key != best and key[0] == best[0])
    picked = tuple(versions[best][seed] for seed in seeds if seed in versions[best])
    return Runs(cell, seeds, picked, older=current not in (None, best[0]), aside=aside)


def values(runs: Runs, metric: str, at: Mapping[str, Any] | None) -> dict[int, float]:
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
