"""Records that other versions of the code made, taken for those of the present one: `--mode any-code`.

A change to the trainer makes every record of a sweep one of older code, also a change that moves no number. Who knows
that it moves none goes on with those records; the table marks them all the same. A cell's reported runs are taken
together, all seeds of one version, since a mean over two versions is a mean of neither.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from mixassay.record import SETTLED, RunRecord, Version, run_key, version_of
from mixassay.spec import RunSpec, Sections


class Recorder(Protocol):
    """What is asked of a `recorder.Recorder`."""

    def key(self, spec: RunSpec, source: str | None = None) -> str: ...
    def source(self, spec: Sections) -> str: ...


class AnyCode:
    """Keys for `Plan`: of a run without a record of the present code, the key of its newest record by another."""

    def __init__(self, recorder: Recorder, records: Iterable[RunRecord], seeds: Sequence[int]) -> None:
        self.recorder = recorder
        self.present: set[str] = set()
        self.other: dict[str, str] = {}  # what a run is, code apart -> the key of a record
        versions: dict[tuple[str, Version], dict[int, RunRecord]] = {}
        for record in sorted(records, key=lambda r: r.time.start):
            self.present.add(record.key)
            if record.status not in SETTLED:
                continue
            if record.role == "tune":
                self.other[apart(record)] = record.key
            else:
                versions.setdefault((record.cell, version_of(record)), {})[record.seed] = record
        for version in versions.values():  # the newest of them, by its first run, comes last
            if set(seeds) <= version.keys():
                self.other |= {apart(record): record.key for record in version.values()}

    def key(self, spec: RunSpec) -> str:
        own = self.recorder.key(spec)
        return own if own in self.present else self.other.get(self.recorder.key(spec, source=""), own)

    def source(self, spec: Sections) -> str:
        return self.recorder.source(spec)


def apart(record: RunRecord) -> str:
    """What a record is of, code apart."""
    return run_key(record, "", record.data, str(record.env["class"]))
