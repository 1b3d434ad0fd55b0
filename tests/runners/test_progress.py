"""What the log of a sweep shows while it runs."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mixassay.runners import progress
from mixassay.runners.choices import Choices
from mixassay.runners.cost import Costs
from mixassay.runners.plan import Plan
from mixassay.spec import RunSpec, digest
from mixassay.sweep import Sweep

SWEEP = """\
version: 1
name: demo
task: {name: mqar}
train: {steps: 100}
mixer: attention
seeds: [0, 1]
"""


class Keys:
    def key(self, spec: RunSpec) -> str:
        return digest([spec.cell, spec.seed])

    def source(self, spec: RunSpec) -> str:
        return "s1"


def test_a_log_has_a_line_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_record: Any) -> None:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    path = tmp_path / "demo.yaml"
    path.write_text(SWEEP)
    plan = Plan(Sweep.load(path), Keys(), [], Choices(tmp_path / "selected.yaml"))
    job, out = plan.take(), io.StringIO()
    assert job is not None
    display = progress.Display(plan, Costs([], "cpu"), Console(file=out, width=200), 1, as_json=False, tracebacks=False)

    def at(second: float, **event: Any) -> list[str]:
        now[0] = 1000.0 + second
        display({"job": job, "steps": 100, **event})
        return out.getvalue().splitlines()

    with display:
        assert at(1, event="started") == []
        assert at(31, event="progress", step=10, active=2, says="") == []
        first = "demo: 0/2 runs · about 4 min left · valid loss [1.2]"
        assert at(61, event="progress", step=20, active=2, says="valid loss [1.2]") == [first]
        assert at(119, event="progress", step=30, active=2, says="") == [first]
        assert at(121, event="progress", step=40, active=2, says="") == [first, "demo: 0/2 runs · about 3 min left"]
        ended = at(182, event="run", record=make_record())
        assert ended[-1].startswith("demo: 1/2 runs"), "the run that has ended is no longer among those at work"
