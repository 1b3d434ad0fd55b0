"""The worker processes of a sweep: started, spoken to, listened to, and ended."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from typing import Any

from mixassay.errors import UserError
from mixassay.record import Status
from mixassay.runners.plan import Job

Inbox = queue.Queue[tuple["Member", dict[str, Any]]]


class Member:
    """What the launcher knows of one worker, wherever it runs.

    Everything it says lands in `inbox`; an `exit` message follows when it has gone. `job` is what it is busy with,
    `since` when it began that, `heard` when it last said anything. `up`: it can be spoken to; `checking`: it was asked
    to validate the sweep; `told`: it was sent what jobs belong to; `ready`: it has understood; `leaving`: it will take
    no more jobs; `hung`: it was killed for its silence.
    """

    def __init__(self, slot: int, inbox: Inbox) -> None:
        self.slot, self.inbox = slot, inbox
        self.job: Job | None = None
        self.since = self.heard = time.monotonic()
        self.up = self.checking = self.told = self.ready = self.leaving = self.hung = False
        self.killed_for: tuple[Status, str] | None = None  # what it is to be recorded as, when we killed it
        self.last_words: deque[str] = deque(maxlen=20)

    def send(self, **message: Any) -> None:
        raise NotImplementedError

    def dismiss(self) -> None:
        """Let it leave: at once if idle, else after writing a checkpoint."""
        raise NotImplementedError

    def kill(self) -> None:
        """End it and all that it has started."""
        raise NotImplementedError

    def close(self) -> None:
        """End it, and wait until it is gone."""
        raise NotImplementedError


class Process(Member):
    """A worker on this machine, in a process group of its own, so that Ctrl-C reaches the main process alone."""

    def __init__(self, slot: int, device: str, threads: int, inbox: Inbox) -> None:
        super().__init__(slot, inbox)
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "mixassay.runners.worker", device, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=surroundings(device, threads),
            start_new_session=True,
        )
        self.threads = [threading.Thread(target=hear, daemon=True) for hear in (self._listen, self._overhear)]
        for thread in self.threads:
            thread.start()

    def send(self, **message: Any) -> None:
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # it has died or was told to leave: `exit` follows
            self.popen.stdin.write(json.dumps(message).encode() + b"\n")
            self.popen.stdin.flush()

    def dismiss(self) -> None:
        self.leaving = True
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.close()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self.popen.wait()
        for thread in self.threads:
            thread.join()
        self.dismiss()

    def _listen(self) -> None:
        assert self.popen.stdout is not None
        with self.popen.stdout as stream:
            for line in stream:
                with contextlib.suppress(ValueError):  # a line cut short by a kill
                    self.inbox.put((self, json.loads(line)))
        self.inbox.put((self, {"event": "exit", "code": self.popen.wait()}))

    def _overhear(self) -> None:
        assert self.popen.stderr is not None
        with self.popen.stderr as stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip()
                self.last_words.append(text)
                self.inbox.put((self, {"event": "said", "text": text}))


class Crew:
    """The workers by slot, all saying what they say into one inbox. Slots take turns on the devices."""

    def __init__(self, device: str, threads: int) -> None:
        self.devices: tuple[str, ...] = (device,)
        self.threads = threads
        self.inbox: Inbox = queue.Queue()
        self.members: dict[int, Member] = {}

    @property
    def on_cpu(self) -> bool:
        return self.devices == ("cpu",)

    def start(self, slot: int) -> Member:
        device = self.devices[slot % len(self.devices)]
        self.members[slot] = Process(slot, device, self.threads, self.inbox)
        return self.members[slot]

    def ask_device(self) -> str:
        """The name of the hardware, from a first worker, which stays for slot 0. Raises `UserError` where it cannot."""
        process = self.start(0)
        while True:
            _, message = self.inbox.get()
            if message["event"] == "ready":
                process.up, self.devices = True, tuple(message["devices"])
                return str(message["name"])
            if message["event"] in ("refused", "exit"):
                self.close()
                said = "\n".join(process.last_words)
                raise UserError(message.get("message") or f"a worker could not start:\n{message.get('lost') or said}")

    def close(self) -> None:
        """End all that still run; what they wrote is on the disk."""
        for process in self.members.values():
            process.close()
        self.members.clear()


def surroundings(device: str, threads: int) -> dict[str, str]:
    """The environment of a worker: our import path, its share of threads, and no GPU where none is asked for."""
    more = {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait by spinning bring a busy machine to a standstill
        "PYTHONUNBUFFERED": "1",
    }
    if device == "cpu":
        more["CUDA_VISIBLE_DEVICES"] = ""
    return {**os.environ, **more}
