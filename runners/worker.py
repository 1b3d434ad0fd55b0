"""A worker process: trains one stack after another, and writes their records itself.

    python -m mixassay.runners.worker DEVICE THREADS

It is spoken to in lines of JSON on its standard input and answers in lines of JSON on its standard output; whatever a
user's mixer prints goes to standard error. `{"check": ...}` validates a sweep, `{"sweep": ...}` says what jobs belong
to, every further line is a job. When the input ends (the main process wants it to stop, or has died) the worker
writes a checkpoint at the next step and leaves.
"""

import contextlib
import functools
import json
import os
import queue
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from mixassay.errors import UserError
from mixassay.provenance import env_class
from mixassay.record import SETTLED, RunRecord
from mixassay.runners.locks import hold
from mixassay.runners.recorder import Recorder
from mixassay.runners.store import Store
from mixassay.spec import RunSpec, Sections

if TYPE_CHECKING:
    from torch import Tensor

    from mixassay.runners.outcome import Outcome

Say = Callable[..., None]
Messages = queue.Queue[dict[str, Any] | None]


@dataclass
class Task:
    """A job in hand: its runs by key, which of them are done, and the folder for its checkpoint."""

    id: str
    runs: dict[str, RunSpec]
    folder: Path
    done: set[str]

    def stack(self) -> list[RunSpec]:
        """The runs to train: those of a checkpoint, if one was left behind, or else all that are not done.

        A checkpoint continues only with the members it was made of, so these are noted beside it.
        """
        note = self.folder / "members.json"
        left = [key for key in self.runs if key not in self.done]
        if left and (self.folder / "state").is_dir() and note.is_file():
            with contextlib.suppress(ValueError):  # cut short: the checkpoint then begins again
                members = json.loads(note.read_text())
                if all(key in self.runs for key in members) and set(left) <= set(members):
                    return [self.runs[key] for key in members]
        if left:
            note.write_text(json.dumps(left))
        return [self.runs[key] for key in left]


def main() -> None:
    device, threads = sys.argv[1], int(sys.argv[2])
    into, out = claim_pipes()
    say = speaker(out)
    lines, stopping = listen(into)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides what Ctrl-C means
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    try:
        Worker(device, threads, say, stopping).serve(lines)
    except UserError as problem:
        say("refused", message=str(problem))


def claim_pipes() -> tuple[int, TextIO]:
    """The real standard input and output, kept for messages: what else is printed from now on goes to standard error,
    and who asks a question (a forgotten `breakpoint()`) gets no answer, instead of our messages."""
    into, out = os.dup(0), os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return into, out


def speaker(out: TextIO) -> Say:
    def say(event: str, **more: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody listens any more: the end of the input will tell us
            out.write(json.dumps({"event": event, **more}) + "\n")

    return say


def listen(into: int) -> tuple[Messages, threading.Event]:
    """Messages as they come (None is the end), and an event that is set once the input has ended."""
    inbox: Messages = queue.Queue()
    ended = threading.Event()

    def read() -> None:
        rest = b""
        while chunk := os.read(into, 1 << 16):  # no file, whose lock a reading thread would hold when we exit
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                inbox.put(json.loads(line))
        ended.set()
        inbox.put(None)

    threading.Thread(target=read, daemon=True).start()
    return inbox, ended


class Worker:
    def __init__(self, device: str, threads: int, say: Say, stopping: threading.Event) -> None:
        import torch  # the slow part of starting up, and the reason for workers to stay

        torch.set_num_threads(threads)
        devices, name = find_devices(device)
        if devices[0] != "cpu":
            torch.cuda.set_device(devices[0])  # whatever says "cuda" from now on means this one
        self.device = devices[0].partition(":")[0]
        self.name, self.threads, self.say, self.stopping = name, threads, say, stopping
        say("ready", devices=devices, name=name, kind=env_class(name))

    def serve(self, messages: Messages) -> None:
        while (message := messages.get()) is not None:
            if "check" in message:
                self.check(**message["check"])
            elif "sweep" in message:
                self.prepare(**message["sweep"])
            elif not self.work(**message["job"]):
                return

    def check(self, path: str, overrides: list[str]) -> None:
        from mixassay.check import check
        from mixassay.sweep import Sweep

        check(Sweep.load(path, overrides))
        self.say("checked")

    def prepare(
        self,
        results: str,
        plugins: list[str],
        files: list[str],
        kinds: list[Any],
        every: float,
        keep_weights: bool,
        language: dict[str, Any],
    ) -> None:
        """Import what the sweep trains, then make sure that it is what the main process hashed."""
        from mixassay import plugins as plug_ins
        from mixassay.mixers import mixer
        from mixassay.tasks import task

        plug_ins.load(plugins)
        self.store, self.every, self.keep_weights = Store(results), every, keep_weights
        self.language: dict[str, Any] = {**language, "plugins": tuple(plugins)}
        self.recorder = Recorder(self.name, threads=self.threads, plugins=map(Path, files))
        for sections, source in kinds:
            spec = Sections.model_validate_json(json.dumps(sections))
            for part in (spec.mixer, spec.model.hybrid):
                if part is not None:
                    mixer[part.name]
            task[spec.task.name]
            self.recorder.trust(spec, source)
        self.say("prepared")

    def work(self, id: str, specs: list[Any], folder: str, skip: list[str], force: bool) -> bool:
        """Do one job; False when this process should not be used for another."""
        runs = [RunSpec.model_validate_json(json.dumps(spec)) for spec in specs]
        task = Task(id, {self.recorder.key(spec): spec for spec in runs}, Path(folder), set(skip))
        try:
            with hold(task.folder / "lock") as mine:
                if mine:
                    return self.train(task, force)
            self.say("busy", job=id)
            return True
        except OSError as problem:
            raise UserError(f"cannot write to {folder}: {problem.strerror}; finished runs are kept") from problem

    def train(self, task: Task, force: bool) -> bool:
        from mixassay.runners import faults, memory
        from mixassay.runners.outcome import Interrupted

        first = next(iter(task.runs.values()))
        attempts: dict[str, int] = {}
        for record in self.store.read(first.suite).records:  # another process may have trained some meanwhile
            if record.key in task.runs:
                attempts[record.key] = record.attempt + 1
                if record.status in SETTLED and record.key not in task.done and not force:
                    self.tell(task, record)
        stack = task.stack()
        self.say("started", job=task.id, members=len(stack))
        try:
            outcomes = self.trainer(first)(
                stack,
                device=self.device,
                checkpoint=task.folder / "state",
                checkpoint_every=self.every,
                emit=lambda event: self.say(**event, job=task.id),
                should_stop=self.stopping.is_set,
                keep=self.keep if self.keep_weights else None,
            )
            for outcome in outcomes if stack else ():
                record = self.recorder.outcome(outcome, attempt=attempts.get(self.recorder.key(outcome.spec), 1))
                if record.key not in task.done:  # else told again by a checkpoint
                    self.store.append([record])
                    self.tell(task, record)
        except Interrupted:
            self.say("interrupted", job=task.id)
            return False
        except UserError:
            raise
        except (Exception, SystemExit) as problem:  # whatever a mixer does wrong becomes a status; the sweep goes on
            if (reason := faults.disk(problem)) is not None:
                raise UserError(f"cannot write to {task.folder}: {reason}; finished runs are kept") from problem
            if memory.out_of_memory(problem):
                if len(stack) > 1:  # which is cut in two now: its checkpoint is of no more use
                    shutil.rmtree(task.folder, ignore_errors=True)
                self.say("oom", job=task.id, message=faults.told(problem, first))
                return False
            kind, message = type(problem).__name__, faults.told(problem, first)
            failed = [
                self.recorder.failure(spec, "error", kind, message, attempt=attempts.get(key, 1))
                for key, spec in task.runs.items()
                if key not in task.done
            ]
            self.store.append(failed)
            for record in failed:
                self.tell(task, record)
            self.say("failed", job=task.id, error=f"{kind}: {message}", traceback=traceback.format_exc())
            return self.device == "cpu"  # a CUDA context that has failed fails everything after it
        shutil.rmtree(task.folder, ignore_errors=True)
        self.say("finished", job=task.id)
        return True

    def trainer(self, spec: RunSpec) -> "Callable[..., Iterator[Outcome]]":
        """What trains runs of this kind."""
        if spec.train.loop == "lm":
            from mixassay.runners.lm import train as lm

            return functools.partial(lm.run, how=lm.How(**self.language))
        from mixassay.runners import train

        return train.run

    def keep(self, spec: RunSpec, tensors: "dict[str, Tensor]") -> None:
        from mixassay.runners import weights

        if spec.role == "report":  # tuning runs have told what they are for
            weights.save(self.store.root, spec, self.recorder.key(spec), self.recorder.source(spec), tensors)

    def tell(self, task: Task, record: RunRecord) -> None:
        task.done.add(record.key)
        self.say("record", job=task.id, record=record.model_dump(mode="json"))


def find_devices(wanted: str) -> tuple[list[str], str]:
    """(torch's names, the hardware's name) of `auto`, `cpu`, `cuda` (all like the first) or `cuda:N`."""
    import torch

    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return ["cpu"], "cpu"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(wanted.partition(":")[2] or 0)
    if index >= count:
        device = "cuda" if wanted == "auto" else wanted
        found = f"torch {torch.__version__} sees {count or 'none'}"
        raise UserError(f"device {device} is asked for, but {found}; use --device cpu, or see `mixassay doctor`")
    names = [torch.cuda.get_device_name(i) for i in range(count)]
    alike = [index] if ":" in wanted else [i for i in range(count) if names[i] == names[0]]
    return [f"cuda:{i}" for i in alike], names[index]


if __name__ == "__main__":
    main()
