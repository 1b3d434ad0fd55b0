"""The command line, called as a person would, on sweeps that take seconds."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mixassay.record import RunRecord
from mixassay.runners import cli
from mixassay.runners.store import Store
from mixassay.spec import RunSpec

TINY = Path(__file__).with_name("tiny.yaml").read_text()


@dataclass
class Said:
    code: int
    out: str
    err: str


@dataclass
class Place:
    """A folder of its own with a sweep file in it; `run("report", "tiny.yaml")` is `mixassay report tiny.yaml`."""

    folder: Path
    capfd: Any  # pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch

    def write(self, text: str = TINY, name: str = "tiny.yaml") -> str:
        (self.folder / name).write_text(text)
        return name

    def run(self, *words: str) -> Said:
        """In this process: only the workers have to start."""
        self.monkeypatch.setattr(sys, "argv", ["mixassay", *words])
        self.capfd.readouterr()
        before = signal.getsignal(signal.SIGINT)
        try:
            cli.main()
            code: Any = 0
        except SystemExit as end:
            code = end.code
        finally:
            signal.signal(signal.SIGINT, before)
        return Said(code or 0, *self.capfd.readouterr())

    def start(self, *words: str, prefix: tuple[str, ...] = (), **more: Any) -> "subprocess.Popen[str]":
        """In a process of its own, in a session of its own, that can be sent signals."""
        return subprocess.Popen(
            [*(prefix or (sys.executable, "-P", "-m", "mixassay")), *words],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **more,
        )

    def records(self, suite: str = "tiny", results: str = "results") -> list[RunRecord]:
        return Store(self.folder / results).read(suite).records


@pytest.fixture
def place(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    return Place(tmp_path, capfd, monkeypatch)


@pytest.fixture
def numbers() -> Callable[[list[RunRecord]], dict[str, Any]]:
    """All that must repeat when a run is repeated: everything but what depends on time."""

    def of(records: list[RunRecord]) -> dict[str, Any]:
        return {r.key: (r.status, r.metrics, r.eval, r.curve, r.stopped, r.weights, r.params) for r in records}

    return of


@pytest.fixture
def record_of(make_record) -> Callable[..., RunRecord]:
    """The record of a run with this accuracy, None for a diverged one; the loss differs from seed to seed."""

    def record_of(run: RunSpec, accuracy: float | None, **fields) -> RunRecord:
        metrics = {} if accuracy is None else {"test/accuracy": accuracy, "test/loss": 0.1 + run.seed / 100}
        whole = {
            "key": f"{run.cell}-{run.seed}-{run.tuned}",
            "cell": run.cell,
            "seed": run.seed,
            "role": run.role,
            "status": "ok" if accuracy is not None else "diverged",
            "axes": run.axes,
            "tuned": run.tuned,
            "config": run.config(),
            "metrics": metrics,
            "params": 12345,
            "state_bytes": {"16": 1024, "64": 8192},
            **fields,
        }
        return make_record(**whole)

    return record_of
