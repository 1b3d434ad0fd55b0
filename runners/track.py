"""Finished runs shown in a tracker as well: `run.tracker: trackio`, `wandb` or `tensorboard`.

A mirror of the records and no more: learning curve, configuration and metrics of each run go there once it has ended
and is stored. The default is none; nothing here is read back, and a tracker that fails stops no sweep.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mixassay.record import RunRecord
from mixassay.runners.extras import need
from mixassay.settings import Tracker

Note = Callable[[str], None]


class Mirror:
    """Called with each record. `note` gets the reason when the tracker fails, after which it is left alone."""

    def __init__(self, tracker: Tracker, folder: Path, note: Note) -> None:
        library = need(tracker, f"track-{tracker}", f"run.tracker={tracker}")
        self.show = _to_tensorboard(folder) if tracker == "tensorboard" else _to_project(library)
        self.tracker, self.note, self.failed = tracker, note, False

    def __call__(self, record: RunRecord) -> None:
        if self.failed:
            return
        try:
            with contextlib.redirect_stdout(sys.stderr):  # ours is for events
                self.show(record)
        except Exception as problem:  # somebody else's server, disk or version: records are safe without it
            self.failed = True
            self.note(f"{self.tracker} failed and is left alone: {type(problem).__name__}: {problem}")


def _to_project(library: Any) -> Callable[[RunRecord], None]:
    """trackio and wandb: a project for a sweep, a run for a run."""

    def show(record: RunRecord) -> None:
        config = record.config | {"seed": record.seed, "role": record.role, "key": record.key, "status": record.status}
        library.init(project=record.suite, name=name_of(record), config=config)
        for step, values in points(record):
            library.log(values, step=step)
        library.finish()

    return show


def _to_tensorboard(folder: Path) -> Callable[[RunRecord], None]:
    library = importlib.import_module("torch.utils.tensorboard")  # which has the writer

    def show(record: RunRecord) -> None:
        with library.SummaryWriter(str(folder / name_of(record))) as writer:
            for step, values in points(record):
                for name, value in values.items():
                    writer.add_scalar(name, value, step)

    return show


def name_of(record: RunRecord) -> str:
    """`mamba2-seed0-1a2b3c4d`: what it is for people, and the start of its key."""
    return f"{record.config['mixer']['name']}-seed{record.seed}-{record.key[:8]}"


def points(record: RunRecord) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, series -> value) along the curve; the last step has the metrics of the trained model, too."""
    series = {name: values for name, values in record.curve if name != "step"}
    for i, step in enumerate(record.curve.step):
        yield step, {name: value for name, values in series.items() if (value := values[i]) is not None}
    if record.stopped is not None and record.metrics:
        final = {f"final/{name}": value for name, value in record.metrics.items() if value is not None}
        yield record.stopped.step, final
