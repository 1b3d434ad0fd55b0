"""Workers on the nodes of a Ray cluster: `mixassay run FILE --engine ray`.

One actor for each slot starts the same worker process that a single machine would use, and passes on what is said.
Ray finds a place for it and notices when a node is lost; what that means for a job is the launcher's business, the
same as for a worker that dies here. So a crash in CUDA is no crash of a Ray worker, and Ray retries nothing by itself.
All nodes must see the working folder and the results, as with a batch system.
"""

import contextlib
import os
import queue
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from mixassay.errors import UserError
from mixassay.runners.crew import Crew, Inbox, Member, Process
from mixassay.runners.extras import need

WAIT = 0.5
"""Seconds that a node waits for something to tell before it answers with nothing."""

GROUPS = {"hear": 1}
"""Listening has a thread of its own; all else keeps its order."""

SEEN_WITHIN = 20.0
"""Seconds in which a new file must show up on all nodes."""


class Host:
    """What runs on a node: a worker process, and what it has said since it was last asked."""

    def __init__(self, slot: int, device: str, threads: int, folder: str, token: str) -> None:
        self.inbox: Inbox = queue.Queue()
        self.process: Process | None = None
        try:
            os.chdir(folder)
            _wait_for(Path(token))
        except OSError:
            raise UserError(
                f"node {os.uname().nodename} does not see {folder} as the main process does: --engine ray needs a file"
                " system that all nodes share"
            ) from None
        self.process = Process(slot, device, threads, self.inbox)

    def hear(self) -> list[dict[str, Any]]:
        """Messages since the last call, none after a while without any."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self.inbox.get(timeout=WAIT)[1])
            while True:
                found.append(self.inbox.get_nowait()[1])
        return found

    def call(self, method: str, message: dict[str, Any]) -> None:
        assert self.process is not None
        getattr(self.process, method)(**message)


def _wait_for(path: Path) -> None:
    """Until a file that another machine has written is seen here. Raises `FileNotFoundError`."""
    end = time.monotonic() + SEEN_WITHIN
    while not path.exists():
        if time.monotonic() > end:
            raise FileNotFoundError(path)
        time.sleep(0.1)


class Remote(Member):
    """A worker on some node, spoken to through its host."""

    def __init__(self, slot: int, inbox: Inbox, ray: Any, host: Any) -> None:
        super().__init__(slot, inbox)
        self.ray, self.host = ray, host
        self.hear = host.hear.options(concurrency_group="hear")
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()

    def send(self, **message: Any) -> None:
        self.host.call.remote("send", message)

    def dismiss(self) -> None:
        self.leaving = True
        self.host.call.remote("dismiss", {})

    def kill(self) -> None:
        self.host.call.remote("kill", {})

    def close(self) -> None:
        with contextlib.suppress(Exception):  # a lost node need not be told, nor one that never came
            self.ray.get(self.host.call.remote("kill", {}), timeout=2)
        self.ray.kill(self.host)
        self.thread.join()

    def _listen(self) -> None:
        while True:
            try:
                messages = self.ray.get(self.hear.remote())
            except self.ray.exceptions.RayError as problem:
                self.inbox.put((self, {"event": "exit", "code": 1, "lost": _cause(problem)}))
                return
            for message in messages:
                if message["event"] == "said":
                    self.last_words.append(message["text"])
                self.inbox.put((self, message))
                if message["event"] == "exit":
                    return


def _cause(problem: BaseException) -> str:
    """The first line that says why."""
    cause = getattr(problem, "cause", None) or problem
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return lines[-1] if "Traceback" in str(cause) else lines[0]


class RayCrew(Crew):
    """A crew on the cluster that RAY_ADDRESS names, or that this machine belongs to.

    `each`: stacks at the same time on a GPU, or on a node's CPUs; None: one on a GPU, as many as CPUs allow.
    `results`: a folder that all nodes must see. Raises `UserError` where there is no cluster or nothing to use in it.
    """

    def __init__(self, wanted: str, threads: int, each: int | None, results: Path) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self.ray = need("ray", "ray", "--engine ray")
        try:
            self.ray.init(address="auto", log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
        except ConnectionError as problem:
            raise UserError(
                "--engine ray finds no cluster: run it on a node of one or set RAY_ADDRESS (`ray start --head`)"
            ) from problem
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        gpus = int(sum(node.get("GPU", 0) for node in nodes))
        if wanted.startswith("cuda:"):
            raise UserError(f"--engine ray chooses the GPUs itself: --device cuda, not {wanted}")
        if wanted == "cuda" and not gpus:
            raise UserError("device cuda is asked for, but the Ray cluster has no GPU; use --device cpu")
        super().__init__("cuda" if gpus and wanted != "cpu" else "cpu", threads)
        if self.on_cpu:
            room = [int(node.get("CPU", 0)) // threads for node in nodes]
            self.slots = sum(min(n, each or n) for n in room)
            share: dict[str, float] = {"num_cpus": threads}
        else:
            self.slots, share = gpus * (each or 1), {"num_cpus": 1, "num_gpus": 1 / (each or 1)}
        if not self.slots:
            raise UserError(f"no node of the Ray cluster has {threads} free CPUs, which run.threads asks for")
        path = {"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}}
        remote = self.ray.remote(scheduling_strategy="SPREAD", concurrency_groups=GROUPS, runtime_env=path, **share)
        self.host = remote(Host)
        self.token = results / f".shared-{uuid.uuid4().hex[:8]}"

    def start(self, slot: int) -> Member:
        try:
            self.token.parent.mkdir(parents=True, exist_ok=True)
            self.token.touch()
        except OSError as problem:
            raise UserError(f"cannot write to {self.token.parent}: {problem.strerror}") from problem
        host = self.host.remote(slot, self.devices[0], self.threads, os.getcwd(), str(self.token.absolute()))
        self.members[slot] = Remote(slot, self.inbox, self.ray, host)
        return self.members[slot]

    def close(self) -> None:
        super().close()
        self.token.unlink(missing_ok=True)
        self.ray.shutdown()
