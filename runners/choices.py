"""`results/<suite>/selected.yaml`: what `select` chose for each cell, and on what grounds. Chosen once, then frozen.

    c0ffee12ab34:
      axes: {mixer: gla, model.d_model: 64}
      by: valid/accuracy
      seeds: [100, 101]
      candidates:
      - {set: {train.lr: 0.001}, mean: 0.93, std: 0.01, n: 2, diverged: 0}
      - {set: {train.lr: 0.01}, mean: 0.99, std: 0.002, n: 2, diverged: 0}
      choice: {train.lr: 0.01}
      source: 0f3c...     # the code that was tuned
      commit: 1f0e...

An entry is used without tuning again as long as it answers the same question (candidates, seeds, metric) and either
the code is the one that was tuned or the entry is committed to git: committing the file says "these settings are the
ones we report, whatever we do to the code". To tune a cell again, delete its entry. A choice edited by hand counts,
if it is one of the candidates.
"""

import math
import os
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mixassay.errors import UserError
from mixassay.record import RunRecord
from mixassay.runners.locks import hold
from mixassay.spec import Args


@dataclass(frozen=True)
class Question:
    """What is asked of a cell: which of these settings is best by this metric on these seeds, with this code."""

    cell: str
    axes: Args
    candidates: tuple[Args, ...]
    seeds: tuple[int, ...]
    by: str
    source: str


class Choices:
    """The file, read once and rewritten whole; entries that others wrote meanwhile are kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = parse(_read(path), path)
        self._committed: dict[str, Any] | None = None

    def get(self, asked: Question) -> Args | None:
        """The frozen choice, or None when the cell must be tuned."""
        entry = self.entries.get(asked.cell)
        if entry is None:
            return None
        try:
            known = [candidate["set"] for candidate in entry["candidates"]]
            same = (known, entry["by"], entry["seeds"]) == (list(asked.candidates), asked.by, list(asked.seeds))
            choice, source = entry["choice"], entry["source"]
        except (KeyError, TypeError):
            raise UserError(
                f"{self.path}: entry {asked.cell} is not complete; delete it to tune the cell again"
            ) from None
        ended = any(candidate.get("n") != 0 for candidate in entry["candidates"])  # else nothing was found out
        if not same or (source != asked.source and not (ended and self._is_committed(asked.cell))):
            return None
        if choice not in known:
            raise UserError(f"{self.path}: choice {choice} of cell {asked.cell} is none of its candidates {known}")
        return dict(choice)

    def freeze(self, asked: Question, records: Sequence[RunRecord]) -> Args:
        """Choose by the tuning runs' records, write the choice down, and return it."""
        ranked = [rank(asked, candidate, records) for candidate in asked.candidates]
        best = min(range(len(ranked)), key=lambda i: (ranked[i][0], i))
        entry = {
            "axes": asked.axes,
            "by": asked.by,
            "seeds": list(asked.seeds),
            "candidates": [summary for _, summary in ranked],
            "choice": dict(asked.candidates[best]),  # a copy: YAML would write one object twice as an alias
            "source": asked.source,
            "commit": records[0].code.commit + ("-dirty" if records[0].code.dirty else ""),
        }
        self._write(asked.cell, entry)
        return asked.candidates[best]

    def _write(self, cell: str, entry: Mapping[str, Any]) -> None:
        try:
            with hold(self.path.parent / ".checkpoints" / "selected.lock", wait=True):
                self.entries = {**self.entries, **parse(_read(self.path), self.path), cell: dict(entry)}
                partial = self.path.with_name(f".{self.path.name}-{os.getpid()}")
                with open(partial, "w") as file:
                    yaml.safe_dump(
                        dict(sorted(self.entries.items())), file, default_flow_style=None, sort_keys=False, width=120
                    )
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(partial, self.path)
        except OSError as problem:
            raise UserError(f"cannot write {self.path}: {problem.strerror}; finished runs are kept") from problem

    def _is_committed(self, cell: str) -> bool:
        if self._committed is None:
            command = ["git", "-C", str(self.path.parent), "show", f"HEAD:./{self.path.name}"]
            try:
                done = subprocess.run(command, capture_output=True, check=False)
            except OSError:  # no git on this machine
                self._committed = {}
            else:
                self._committed = parse(done.stdout, self.path) if done.returncode == 0 else {}
        return bool(self._committed.get(cell) == self.entries[cell])


def chosen(path: Path) -> dict[str, Args]:
    """Cell -> what was chosen for it, of all entries of a `selected.yaml`; none where there is no such file."""
    entries = Choices(path).entries.items()
    return {cell: entry["choice"] for cell, entry in entries if isinstance(entry, dict) and "choice" in entry}


def rank(asked: Question, candidate: Args, records: Sequence[RunRecord]) -> tuple[tuple[float, ...], dict[str, Any]]:
    """(what to sort by, lowest best; the entry's summary) of one candidate.

    Fewest diverged seeds first, then the best mean of the metric, then (accuracies tie at 1) the lowest mean
    validation loss; what still ties goes to the candidate listed first.
    """
    mine = [record for record in records if record.tuned == candidate]
    ok = [record for record in mine if record.status == "ok"]
    values = [value for record in ok if (value := record.metrics.get(asked.by)) is not None]
    losses = [value for record in ok if (value := record.metrics.get("valid/loss")) is not None]
    lost = len(mine) - len(values)
    mean = statistics.fmean(values) if values else math.inf
    sign = 1 if asked.by.endswith("loss") or not values else -1
    summary = {
        "set": candidate,
        "mean": mean if values else None,
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "n": len(values),
        "diverged": lost,
    }
    return (lost, sign * mean, statistics.fmean(losses) if losses else math.inf), summary


def parse(text: bytes, path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(text) or {}
    except yaml.YAMLError as problem:
        said = str(problem).replace("\n", " ")
        raise UserError(
            f"{path}: not YAML ({said}); mend it, or delete it to choose again from the stored runs"
        ) from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: should map cells to choices; mend it, or delete it to choose again")
    return data


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as problem:
        raise UserError(f"cannot read {path}: {problem.strerror}") from problem
