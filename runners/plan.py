"""What is to do: the runs of a sweep that have no record yet, as jobs.

A job is a stack of runs that train together. Jobs are composed from all runs of the sweep, not from those that are
left, so that an interrupted sweep continues with the same stacks and ends with the same numbers, bit for bit. A cell
whose settings are tuned goes through three states on its own: tuning runs, the frozen choice, reported runs.
"""

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mixassay.record import SETTLED, RunRecord
from mixassay.runners.choices import Choices, Question
from mixassay.runners.labels import pairs, spans
from mixassay.settings import Selection
from mixassay.spec import RunSpec, digest, task_cells
from mixassay.sweep import Cell, Sweep

Mode = Literal["cached", "any-code", "retry", "force", "read-only"]


class Keys(Protocol):
    """How runs are named: see `recorder.Recorder`."""

    def key(self, spec: RunSpec) -> str: ...
    def source(self, spec: RunSpec) -> str: ...


@dataclass(frozen=True)
class Job:
    """Runs that train as one stack. `id` names the content, and the folder of its checkpoint."""

    specs: tuple[RunSpec, ...]
    keys: tuple[str, ...]

    @property
    def id(self) -> str:
        return digest(self.keys, length=16)

    @property
    def title(self) -> str:
        """The first run's place in the sweep and how many there are, for people."""
        first = self.specs[0]
        name = pairs(first.axes) or first.mixer.name
        seeds = spans([spec.seed for spec in self.specs])
        return f"{name} {'tuning, ' if first.role == 'tune' else ''}seeds {seeds}"

    def halves(self) -> tuple["Job", "Job"]:
        n = len(self.specs) // 2
        return Job(self.specs[:n], self.keys[:n]), Job(self.specs[n:], self.keys[n:])


@dataclass
class Cellwise:
    """One cell on its way: `reported` is empty until its settings are chosen."""

    cell: Cell
    tuning: list[RunSpec] = field(default_factory=list)
    reported: list[RunSpec] = field(default_factory=list)
    question: Question | None = None


class Plan:
    """Jobs come from `take`, outcomes go to `learn`, and `close` says that a job will bring no more.

    mode: `cached` trains runs without a record and those that an accident ended (killed, oom, timeout), and leaves
    stored errors alone, since the same code would fail again; `retry` also trains those; `any-code` is `cached` with
    `keys` that find records of other versions too (any_code.py); `force` trains everything; `read-only` nothing.
    `pieces` is how many jobs to make at least, if there are so many runs; `size` the largest stack.
    """

    def __init__(
        self,
        sweep: Sweep,
        keys: Keys,
        records: Iterable[RunRecord],
        choices: Choices,
        *,
        mode: Mode = "cached",
        pieces: int = 1,
        size: int | None = None,
        shard: tuple[int, int] = (1, 1),
    ) -> None:
        self.sweep, self.keys, self.choices, self.mode = sweep, keys, choices, mode
        self.pieces, self.size = pieces, size
        self.known: dict[str, RunRecord] = {record.key: record for record in records}
        self.fresh: set[str] = set()
        self.cells = {cell.cell: Cellwise(cell) for cell in part(list(sweep.cells()), shard)}
        self.queue: deque[Job] = deque()
        self.unfinished: dict[str, Job] = {}  # queued or taken, by id
        if sweep.select is None:
            for state in self.cells.values():
                state.reported = list(sweep.reported(state.cell, {}))
            self._add(self._jobs([spec for state in self.cells.values() for spec in state.reported], groups=None))
            return
        for state in self.cells.values():
            self._ask(state, sweep.select)
        for state in self.cells.values():
            tuned = None if state.question is None or mode == "force" else self.choices.get(state.question)
            if tuned is not None:
                self._report(state, tuned)
            else:
                self._add(self._jobs(state.tuning, groups=len(self.cells)))
        for state in self.cells.values():
            self._choose(state)

    def take(self) -> Job | None:
        """The next job, or None when there is none now; more may come when a cell is tuned."""
        return self.queue.popleft() if self.queue else None

    def put_back(self, jobs: Sequence[Job]) -> None:
        """Jobs that were taken and not done."""
        self.queue.extendleft(reversed(jobs))

    def replace(self, job: Job, parts: Sequence[Job]) -> None:
        """A job that was taken is to be done in parts."""
        del self.unfinished[job.id]
        self.unfinished.update({part.id: part for part in parts})
        self.put_back(parts)

    def learn(self, record: RunRecord) -> None:
        self.known[record.key] = record
        self.fresh.add(record.key)

    def close(self, job: Job) -> None:
        """The job is over: its cells may now be chosen for."""
        self.unfinished.pop(job.id, None)
        for cell in dict.fromkeys(spec.cell for spec in job.specs if spec.role == "tune"):
            self._choose(self.cells[cell])

    def left(self, job: Job) -> Job:
        """The part of a job that is still to be trained."""
        pairs = [(spec, key) for spec, key in zip(job.specs, job.keys, strict=True) if self.wants(key)]
        return Job(tuple(spec for spec, _ in pairs), tuple(key for _, key in pairs))

    def attempt(self, spec: RunSpec) -> int:
        """The number of the next try at a run."""
        record = self.record(spec)
        return record.attempt + 1 if record is not None else 1

    def wants(self, key: str) -> bool:
        record = self.known.get(key)
        if key in self.fresh or self.mode == "read-only":
            return False
        if record is None or self.mode == "force":
            return True
        return record.status not in SETTLED and (record.status != "error" or self.mode == "retry")

    def waiting(self, running: Collection[str] = ()) -> list[tuple[RunSpec, int]]:
        """What no worker has begun: an example of the runs and how many, for each job and each cell yet to be tuned."""
        jobs = [self.left(job) for id, job in self.unfinished.items() if id not in running]
        found = [(job.specs[0], len(job.specs)) for job in jobs if job.specs]
        untuned = [state for state in self.cells.values() if not state.reported and self.mode != "read-only"]
        return found + [(state.tuning[0], len(self.sweep.seeds)) for state in untuned]

    def summary(self) -> list[tuple[str, RunSpec, int]]:
        """What is to do, for people: name, an example, and the number of runs, for each cell and stage."""
        found: dict[str, tuple[RunSpec, int]] = {}
        jobs = [self.left(job) for job in self.unfinished.values()]
        for spec in (spec for job in jobs for spec in job.specs):
            stage = " (tuning)" if spec.role == "tune" else ""
            name = f"{pairs(spec.axes) or spec.mixer.name}{stage}"
            found[name] = spec, found.get(name, (spec, 0))[1] + 1
        for state in self.cells.values():
            if not state.reported and state.tuning and self.mode != "read-only":
                found[pairs(state.cell.axes) or state.tuning[0].mixer.name] = state.tuning[0], len(self.sweep.seeds)
        return [(name, spec, n) for name, (spec, n) in found.items()]

    def finished(self, state: Cellwise) -> bool:
        """Whether all reported runs of a cell have a record that stands."""
        return bool(state.reported) and all(self.record(spec) is not None for spec in state.reported)

    def record(self, spec: RunSpec) -> RunRecord | None:
        return self.known.get(self.keys.key(spec))

    def failures(self) -> list[RunRecord]:
        """Runs that have a record of failing, tuning runs that diverged not counted: that is what tuning is for."""
        found = []
        for state in self.cells.values():
            for spec in [*state.tuning, *state.reported]:
                record = self.record(spec)
                if record is not None and record.status not in (SETTLED if spec.role == "tune" else ("ok",)):
                    found.append(record)
        return found

    def missing(self) -> int:
        """Reported runs without any record; a cell that is not tuned yet misses all its seeds."""
        return sum(
            sum(self.record(spec) is None for spec in state.reported) if state.reported else len(self.sweep.seeds)
            for state in self.cells.values()
        )

    def _ask(self, state: Cellwise, select: Selection) -> None:
        state.tuning = list(self.sweep.tuning(state.cell))
        candidates: list[dict[str, Any]] = []
        for spec in state.tuning:
            if spec.tuned not in candidates:
                candidates.append(spec.tuned)
        state.question = Question(
            cell=state.cell.cell,
            axes=state.tuning[0].axes,
            candidates=tuple(candidates),
            seeds=select.seeds,
            by=select.by,
            source=self.keys.source(state.tuning[0]),
        )

    def _choose(self, state: Cellwise) -> None:
        """Freeze the cell's settings if its tuning runs are all settled, and plan its reported runs."""
        if state.reported or state.question is None:
            return
        keys = [self.keys.key(spec) for spec in state.tuning]
        if any(key in job.keys for job in self.unfinished.values() for key in keys):
            return
        records = [self.known[key] for key in keys if key in self.known and self.known[key].status in SETTLED]
        if len(records) == len(keys) and self.mode != "read-only":
            self._report(state, self.choices.freeze(state.question, records))

    def _report(self, state: Cellwise, tuned: Mapping[str, Any]) -> None:
        state.reported = list(self.sweep.reported(state.cell, tuned))
        self._add(self._jobs(state.reported, groups=len(self.cells)), first=True)

    def _jobs(self, specs: Sequence[RunSpec], *, groups: int | None) -> list[Job]:
        """`groups`: how many groups of stackable runs the phase has, where these are not all of them."""
        alike: dict[str, list[RunSpec]] = {}
        for spec in specs:
            alike.setdefault(spec.stack, []).append(spec)
        parts = -(-self.pieces // max(1, groups or len(alike)))
        return [
            Job(tuple(cut), tuple(self.keys.key(spec) for spec in cut))
            for group in alike.values()
            for cut in evenly(group, max(parts, -(-len(group) // (self.size or len(group)))))
        ]

    def _add(self, jobs: Sequence[Job], *, first: bool = False) -> None:
        jobs = [job for job in jobs if self.left(job).specs]
        self.unfinished.update({job.id: job for job in jobs})
        if first:
            self.queue.extendleft(reversed(jobs))
        else:
            self.queue.extend(jobs)


def part(cells: Sequence[Cell], shard: tuple[int, int]) -> list[Cell]:
    """Part i of n of the cells, by their hashes, so that no part gets all of one mixer; in the sweep's order."""
    i, n = shard
    mine = {cell.cell for cell in sorted(cells, key=lambda cell: cell.cell)[i - 1 :: n]}
    return [cell for cell in cells if cell.cell in mine]


def evenly(specs: Sequence[RunSpec], parts: int) -> list[Sequence[RunSpec]]:
    """Cut into `parts` consecutive pieces (fewer when there are fewer specs) whose sizes differ by one at most."""
    parts = min(parts, len(specs))
    edges = [len(specs) * i // parts for i in range(parts + 1)]
    return [specs[a:b] for a, b in itertools.pairwise(edges)]


def steps_of(spec: RunSpec) -> int:
    """Steps that a run takes if nothing stops it early."""
    if spec.train.steps is not None:
        return spec.train.steps
    sizes = [cell.examples or 0 for cell in task_cells(spec.task, "train")]
    return (spec.train.epochs or 0) * sum(size // spec.train.batch_size for size in sizes)
