"""What a person sees while a sweep runs: one bar for all of it on a terminal; elsewhere, as in the log of a batch
system, one line a finished cell and one a minute.

The time left is the work left (steps of models, each at the time its shape was measured to take) over the slots that
share it. Counting cells instead would take a row of small ones for a promise about the large.
"""

import json
import statistics
import sys
import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from mixassay.record import RunRecord
from mixassay.runners.cost import Costs
from mixassay.runners.labels import pairs
from mixassay.runners.plan import Cellwise, Job, Plan, steps_of

Event = dict[str, Any]

BAR_EVERY, LINE_EVERY = 0.2, 60.0
"""Seconds between two looks of the bar, and between two lines of a log."""


class Display:
    """Called with each event of the launcher. `console` is where people look (standard error with `--json`)."""

    def __init__(self, plan: Plan, costs: Costs, console: Console, slots: int, as_json: bool, tracebacks: bool) -> None:
        self.plan, self.costs, self.console, self.slots = plan, costs, console, slots
        self.as_json, self.tracebacks = as_json, tracebacks
        self.running: dict[str, Running] = {}
        self.done = self.failed = 0
        self.shown = time.monotonic()
        self.errors: list[str] = []
        self.told: set[str] = {state.cell.cell for state in plan.cells.values() if plan.finished(state)}
        self.bar = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task(
            plan.sweep.name, total=1.0, text=f"loading torch, checking {len(plan.cells)} cells"
        )

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.bar.stop()

    def __call__(self, event: Event) -> None:
        getattr(self, f"_on_{event['event']}")(event)
        self._refresh()

    def _on_started(self, event: Event) -> None:
        self.running[event["job"].id] = Running(event["job"])

    def _on_progress(self, event: Event) -> None:
        running = self.running[event["job"].id]
        running.see(event["step"], event["active"])
        running.says = event.get("says", "")
        if running.ms is not None:
            self.costs.learn(running.job.specs[0], running.ms)
        self._emit("progress", stack=running.job.title, step=event["step"], steps=event["steps"], eta=self._eta())

    def _on_run(self, event: Event) -> None:
        record: RunRecord = event["record"]
        if (running := self.running.get(event["job"].id)) is not None:
            running.ended()
        self.done += 1
        self.failed += record.status != "ok"
        what = {name: getattr(record, name) for name in ("key", "cell", "seed", "role", "status", "axes", "tuned")}
        error = record.error.model_dump() if record.error else None
        self._emit("run", **what, metrics=record.metrics, seconds=record.time.seconds, error=error)
        if record.status == "diverged":
            said = f"{place(record)}: {record.error.message if record.error else ''}"
            self._say(f"[yellow]diverged[/]: {escape(said)}")

    def _on_failed(self, event: Event) -> None:
        text = f"{event['job'].title}: {event['error']}"
        self.errors.append(text)
        self._emit("failed", stack=event["job"].title, error=event["error"])
        self._say(f"[red]failed[/]: {escape(text)}")
        if self.tracebacks and event["traceback"]:
            self._say(escape(event["traceback"].rstrip()))

    def _on_finished(self, event: Event) -> None:
        job: Job = event["job"]
        self.running.pop(job.id, None)
        for cell in dict.fromkeys(spec.cell for spec in job.specs):
            state = self.plan.cells[cell]
            if cell not in self.told and self.plan.finished(state):
                self.told.add(cell)
                self._finished(state)

    def _on_note(self, event: Event) -> None:
        self._emit("note", text=event["text"])
        self._say(escape(event["text"]))

    def _on_said(self, event: Event) -> None:
        self._say(f"[dim]worker {event['slot']}:[/] {escape(event['text'])}")

    def _finished(self, state: Cellwise) -> None:
        metric = self.plan.sweep.report.metric
        records = [record for spec in state.reported if (record := self.plan.record(spec)) is not None]
        values = [value for r in records if r.status == "ok" and (value := r.metrics.get(metric)) is not None]
        number = "no seed ended well"
        if values:
            spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
            number = f"{metric} {statistics.fmean(values):.4f}{spread} (n={len(values)})"
        name = pairs(state.cell.axes) or "the only cell"
        text = f"cell {len(self.told)}/{len(self.plan.cells)}: {name}: {number}"
        self._emit("cell", cell=state.cell.cell, axes=state.cell.axes, metric=metric, values=values)
        if not self.console.is_terminal:
            self._say(escape(text))

    def _say(self, text: str) -> None:
        self.bar.console.print(text, highlight=False, soft_wrap=True)

    def _emit(self, event: str, **more: Any) -> None:
        if self.as_json:
            print(json.dumps({"event": event, **more}), file=sys.stdout, flush=True)

    def _eta(self) -> float | None:
        """Seconds left, or None while no step was ever measured."""
        busy = [running.left(self.costs) for running in self.running.values()]
        waiting = [self.costs.seconds(spec, n * steps_of(spec)) for spec, n in self.plan.waiting(self.running)]
        known = [part for part in (*busy, *waiting) if part is not None]
        if len(known) < len(busy) + len(waiting):
            return None
        return max([sum(known) / self.slots, *(part for part in busy if part is not None)], default=0.0)

    def _refresh(self) -> None:
        if time.monotonic() - self.shown < (BAR_EVERY if self.console.is_terminal else LINE_EVERY):
            return
        self.shown = time.monotonic()
        underway = sum(running.share() for running in self.running.values())
        left = sum(n for _, n in self.plan.waiting(self.running)) + sum(r.active for r in self.running.values())
        eta = self._eta()
        text = f"{self.done}/{self.done + left} runs"
        text += f" · [red]{self.failed} failed[/]" if self.failed else ""
        text += f" · about {clock(eta)} left" if eta is not None else ""
        text += "".join(f" · {escape(running.says)}" for running in self.running.values() if running.says)
        if self.console.is_terminal:
            self.bar.update(self.task, completed=(self.done + underway) / max(1, self.done + left), text=text)
        else:
            self._say(f"{escape(self.plan.sweep.name)}: {text}")


class Running:
    """A job at work, and how fast it goes."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.steps = steps_of(job.specs[0])
        self.step, self.active = 0, len(job.specs)
        self.first: tuple[float, int] | None = None  # where it was when first seen: a checkpoint may lie behind it
        self.ms: float | None = None  # of one step of one model
        self.says = ""  # what else it tells of itself

    def see(self, step: int, active: int) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first = now, step
        elif active and step > self.first[1]:
            self.ms = 1000 * (now - self.first[0]) / (step - self.first[1]) / active
            if active != self.active:
                self.first = now, step
        self.step, self.active = step, active

    def ended(self) -> None:
        """One of its runs: it is done, and no longer among those at work."""
        self.active, self.first = max(0, self.active - 1), None

    def share(self) -> float:
        """The part done, in runs, of those still in training."""
        return self.active * self.step / self.steps

    def left(self, costs: Costs) -> float | None:
        steps = (self.steps - self.step) * self.active
        return costs.seconds(self.job.specs[0], steps) if self.ms is None else self.ms / 1000 * steps


def place(record: RunRecord) -> str:
    tuned = f" {pairs(record.tuned)}" if record.role == "tune" else ""
    return f"{pairs(record.axes) or record.cell}{tuned} seed {record.seed}"


def clock(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`"""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
