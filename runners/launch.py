"""Jobs onto slots, until the plan has no more: one worker process for each slot, kept from job to job.

A job that fails never stops the sweep. A worker that dies is replaced, and its job is tried again from its checkpoint;
what fails for good becomes a record with a status. The first Ctrl-C (or SIGTERM, or the end of `max_time`) lets the
workers write checkpoints and stop, the second kills them; either way the next `run` continues where they were.
"""

import contextlib
import queue
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mixassay.errors import UserError
from mixassay.record import RunRecord, Status
from mixassay.runners.crew import Crew, Member
from mixassay.runners.plan import Job, Plan
from mixassay.runners.recorder import Recorder
from mixassay.runners.store import Store

Reason = Literal["done", "interrupted", "terminated", "max-time", "fail-fast", "same error", "refused"]

SAME = 3
"""So many first jobs that all fail alike are a fault of the sweep, not of a cell."""

LOST = 3
"""So many workers may be lost with their nodes before they could work; then it is not the nodes."""

BUSY_WAIT = 1.0
"""Seconds until a job that another process holds is asked for again."""


@dataclass(frozen=True)
class Settings:
    """`timeout` is one job's, `hang` that of one step (or whatever else a worker does in silence), `max_time` the whole
    sweep's, in seconds; `retries` counts deaths of a job's worker; `reusable` says whether a worker is good for more
    after a failure.
    """

    slots: int
    timeout: float | None = None
    hang: float | None = None
    retries: int = 1
    max_time: float | None = None
    fail_fast: bool = False
    reusable: bool = True


@dataclass
class Ending:
    """Why the launcher stopped, and what there is to say about it."""

    reason: Reason = "done"
    message: str = ""


class Launcher:
    """Runs a plan. `check` and `sweep` are the messages that make the first worker validate the sweep, and each ready
    for its jobs (see `worker.py`); `folder` holds checkpoints; `tell` gets an event for all that happens.
    """

    def __init__(
        self,
        plan: Plan,
        crew: Crew,
        settings: Settings,
        *,
        check: dict[str, Any],
        sweep: dict[str, Any],
        folder: Path,
        store: Store,
        recorder: Recorder,
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        self.plan, self.crew, self.settings, self.tell = plan, crew, settings, tell
        self.check, self.sweep, self.folder = check, sweep, folder
        self.store, self.recorder = store, recorder
        self.ending = Ending()
        self.signals: deque[int] = deque()
        self.checked = False
        self.lost = 0
        self.deaths: Counter[str] = Counter()
        self.later: list[tuple[float, Job]] = []
        self.first_errors: list[str | None] = []

    def run(self) -> Ending:
        began = time.monotonic()
        with self._signals():
            try:
                while not self._over():
                    self._hand_out()
                    with contextlib.suppress(queue.Empty):
                        process, message = self.crew.inbox.get(timeout=0.1)
                        process.heard = time.monotonic()
                        getattr(self, f"_on_{message['event']}")(process, message)
                    self._look_at_the_clock(began)
                    self._look_at_signals()
            finally:
                self.crew.close()
        return self.ending

    @property
    def draining(self) -> bool:
        return self.ending.reason != "done"

    def _over(self) -> bool:
        busy = any(process.job for process in self.crew.members.values())
        if self.draining:
            return not busy or len(self.signals) > 1
        return not busy and not self.plan.queue and not self.later

    def _hand_out(self) -> None:
        if self.draining:
            return
        self._fill_slots()
        if not self.checked:
            self._have_checked()
            return
        now = time.monotonic()
        for process in self.crew.members.values():
            if process.job or process.leaving or not process.up:
                continue
            job = self._next(now)
            if job is None:
                return
            if not process.told:
                process.told = True
                process.send(sweep=self.sweep)
            process.job, process.since, process.heard = job, now, now
            done = [spec for spec, key in zip(job.specs, job.keys, strict=True) if not self.plan.wants(key)]
            skip = [self.recorder.key(spec) for spec in done]  # a worker knows no keys of another version's records
            specs = [spec.model_dump(mode="json") for spec in job.specs]
            force = self.plan.mode == "force"
            process.send(
                job={"id": job.id, "specs": specs, "folder": str(self.folder / job.id), "skip": skip, "force": force}
            )

    def _fill_slots(self) -> None:
        """A worker for every free slot, as long as there are more jobs than workers who wait for one."""
        waiting = sum(not (process.job or process.leaving) for process in self.crew.members.values())
        free = [slot for slot in range(self.settings.slots) if slot not in self.crew.members]
        for slot in free[: max(0, len(self.plan.queue) + len(self.later) - waiting)]:
            self.crew.start(slot)

    def _have_checked(self) -> None:
        """Let one worker validate the sweep, the next if its machine is lost."""
        up = [process for process in self.crew.members.values() if process.up and not process.leaving]
        if up and not any(process.checking for process in up):
            up[0].checking = True
            up[0].send(check=self.check)

    def _next(self, now: float) -> Job | None:
        job = self.plan.take()
        if job is None and self.later and self.later[0][0] <= now:
            job = self.later.pop(0)[1]
        return job

    def _on_ready(self, process: Member, message: dict[str, Any]) -> None:
        """It can work, if it is the kind of machine that the runs are named after."""
        if message["kind"] == self.recorder.env["class"]:
            process.up = True
        else:
            found = f"one runs on {message['kind']}, the sweep began on {self.recorder.env['class']}"
            self._drain("refused", f"workers must be of one kind, but {found}")

    def _on_prepared(self, process: Member, message: dict[str, Any]) -> None:
        process.ready = True

    def _on_checked(self, process: Member, message: dict[str, Any]) -> None:
        self.checked = True

    def _on_said(self, process: Member, message: dict[str, Any]) -> None:
        self.tell(message | {"slot": process.slot})

    def _on_started(self, process: Member, message: dict[str, Any]) -> None:
        process.since = time.monotonic()
        self.tell({"event": "started", "job": process.job, "members": message["members"]})

    def _on_progress(self, process: Member, message: dict[str, Any]) -> None:
        self.tell(message | {"job": process.job})

    def _on_record(self, process: Member, message: dict[str, Any]) -> None:
        assert process.job is not None
        self._learn(RunRecord.model_validate(message["record"]), process.job)

    def _on_finished(self, process: Member, message: dict[str, Any]) -> None:
        self._close(process, None)

    def _on_interrupted(self, process: Member, message: dict[str, Any]) -> None:
        """It has written a checkpoint and leaves: as it was told to, or because somebody sent it a SIGTERM."""
        assert process.job is not None
        self.plan.put_back([process.job])
        process.job, process.leaving = None, True

    def _on_failed(self, process: Member, message: dict[str, Any]) -> None:
        job, process.leaving = process.job, not self.settings.reusable
        self.tell({"event": "failed", "job": job, "error": message["error"], "traceback": message["traceback"]})
        self._close(process, message["error"])

    def _on_busy(self, process: Member, message: dict[str, Any]) -> None:
        """Another process trains this job: ask again later, when its records are there or it has given up."""
        assert process.job is not None
        self.later.append((time.monotonic() + BUSY_WAIT, process.job))
        process.job = None

    def _on_oom(self, process: Member, message: dict[str, Any]) -> None:
        """A stack that does not fit is tried again in halves; a single model that does not is recorded as such."""
        process.leaving = True
        job = process.job
        assert job is not None
        left = self.plan.left(job)
        if len(left.specs) > 1:
            self.tell({"event": "note", "text": f"{len(left.specs)} models do not fit together, trying halves"})
            process.job = None
            self.plan.replace(job, left.halves())
        else:
            self._give_up(process, "oom", message["message"])

    def _on_refused(self, process: Member, message: dict[str, Any]) -> None:
        process.job, process.leaving = None, True
        self._drain("refused", message["message"])

    def _on_exit(self, process: Member, message: dict[str, Any]) -> None:
        leaving = process.leaving  # closing says so of all
        process.close()
        del self.crew.members[process.slot]
        if process.killed_for is not None:
            self._give_up(process, *process.killed_for)
        elif not process.ready and not leaving and self._refuses(message):
            said = "\n".join(process.last_words) or f"it ended with {message['code']} and said nothing"
            said = message.get("lost") or said
            process.job = None
            self._drain("refused", f"a worker could not start:\n{said}")
        elif process.job is not None and not self.draining:
            self._survive(process, process.job, message)
        process.job = None

    def _refuses(self, message: dict[str, Any]) -> bool:
        """Whether a worker that has ended before it could work is the end of the sweep: not if its node was lost."""
        self.lost += "lost" in message
        return "lost" not in message or self.lost > LOST

    def _survive(self, process: Member, job: Job, message: dict[str, Any]) -> None:
        """Try a job again whose worker has died under it, up to `retries` times."""
        code = message["code"]
        how = f"its worker was killed by signal {-code}" if code < 0 else "its worker died"
        if "lost" in message:
            how = f"its node was lost ({message['lost']})"
        if process.hung:
            how = f"it made no step for run.hang, {self.settings.hang:g} s"
        self.deaths[job.id] += 1
        if self.deaths[job.id] <= self.settings.retries:
            self.tell({"event": "note", "text": f"{job.title}: {how}; trying again from its checkpoint"})
            self.plan.put_back([job])
        else:
            self._give_up(process, "timeout" if process.hung else "killed", f"{how}, {self.deaths[job.id]} times")

    def _give_up(self, process: Member, status: Status, message: str) -> None:
        """Record what is left of a job as failed, here, since its worker cannot."""
        assert process.job is not None
        failed = [
            self.recorder.failure(
                spec, status, status, message, seconds=time.monotonic() - process.since, attempt=self.plan.attempt(spec)
            )
            for spec in self.plan.left(process.job).specs
        ]
        try:
            self.store.append(failed)
        except UserError as problem:
            self._drain("refused", str(problem))
        for record in failed:
            self._learn(record, process.job)
        self.tell({"event": "failed", "job": process.job, "error": message, "traceback": ""})
        self._close(process, message)

    def _learn(self, record: RunRecord, job: Job) -> None:
        self.plan.learn(record)
        self.tell({"event": "run", "record": record, "job": job})
        if self.settings.fail_fast and record.status != "ok" and (record.role, record.status) != ("tune", "diverged"):
            said = record.error.message if record.error else ""
            self._drain("fail-fast", f"stopping at the first failure: {record.status}: {said}")

    def _close(self, process: Member, error: str | None) -> None:
        job, process.job = process.job, None
        assert job is not None
        try:
            self.plan.close(job)
        except UserError as problem:
            self._drain("refused", str(problem))
        self.tell({"event": "finished", "job": job})
        self.first_errors.append(error)
        first = self.first_errors[:SAME]
        if len(self.first_errors) == SAME and error is not None and len(set(first)) == 1 and not self.draining:
            self._drain("same error", f"the first {SAME} stacks all failed alike, so nothing more is started: {error}")

    def _drain(self, reason: Reason, message: str = "") -> None:
        """Start nothing more; let those at work write their checkpoints."""
        if self.draining:
            return
        self.ending = Ending(reason, message)
        busy = [process for process in self.crew.members.values() if process.job]
        if busy and reason in ("interrupted", "terminated", "max-time"):
            self.tell({"event": "note", "text": f"{STOPPING[reason]}: stopping after checkpoints; Ctrl-C again kills"})
        for process in self.crew.members.values():
            process.dismiss()

    def _look_at_the_clock(self, began: float) -> None:
        now, timeout, hang = time.monotonic(), self.settings.timeout, self.settings.hang
        late = self.settings.max_time is not None and now - began > self.settings.max_time
        if late and not self._over():
            self._drain("max-time")
        for process in self.crew.members.values():
            if process.job and timeout and now - process.since > timeout and process.killed_for is None:
                process.killed_for = "timeout", f"took longer than run.timeout, {timeout:g} s"
                process.kill()
            elif process.job and hang and now - process.heard > hang and not process.hung:
                process.hung = True
                process.kill()

    def _look_at_signals(self) -> None:
        if self.signals:
            self._drain("interrupted" if self.signals[0] == signal.SIGINT else "terminated")

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Note signals instead of being torn out of whatever is going on."""
        kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {kind: signal.signal(kind, lambda number, _: self.signals.append(number)) for kind in kinds}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)


STOPPING: dict[Reason, str] = {"interrupted": "Ctrl-C", "terminated": "SIGTERM", "max-time": "--max-time is over"}
