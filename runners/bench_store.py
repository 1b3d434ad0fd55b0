"""The store under load: many writers, killed at random, and a report on all that they wrote.

    python -P -m mixassay.runners.bench_store --records 100000 --writers 8 --out results/bench/store.json

Every writer is a process that appends one record at a time, as a worker does, and says so when `Store.append` has
returned: from then on the record must be there, whatever happens. A killed writer is replaced by one that goes on
after the last record it was known to have written. The records are those of a history: a sweep of 1000 runs, stored
once for each of many commits, the last of them being the present code.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mixassay.errors import UserError
from mixassay.provenance import environment
from mixassay.record import Code, Curve, EvalCell, RunRecord, Stopped, Time
from mixassay.runners.recorder import Recorder
from mixassay.runners.store import Store, shards
from mixassay.sweep import Sweep

SWEEP = """\
version: 1
name: load
task: {name: mqar, vocab_size: 64, seq_len: 16, num_kv: 2}
train: {steps: 400}
sweep:
  grid:
    mixer: [attention, linear_attention, mamba2, gated_deltanet]
    model.d_model: [8, 16, 32, 64, 128]
    model.n_layers: {range: [1, 10]}
seeds: 0-4
"""

PAUSE = 0.1, 0.5
"""Seconds between two kills, from and to."""


def records(sweep: Sweep, start: int, step: int, total: int) -> Iterator[tuple[int, RunRecord]]:
    """(number, record) of every `step`th of `total`, from `start` on, as large as those of the quickstart."""
    recorder = Recorder("cpu", threads=1)
    runs = [run for cell in sweep.cells() for run in sweep.reported(cell)]
    commits = -(-total // len(runs))
    for n in range(start, total, step):
        commit, run = n // len(runs), runs[n % len(runs)]
        source = recorder.source(run) if commit == commits - 1 else f"{commit:016x}"
        accuracy = value(n)
        points = tuple(1 / (k + 2 + n % 7) for k in range(3))
        yield (
            n,
            RunRecord(
                key=f"{n:024x}",
                cell=run.cell,
                suite=sweep.name,
                seed=run.seed,
                role="report",
                status="ok",
                axes=run.axes,
                tuned={},
                config=run.config(),
                metrics={"valid/accuracy": accuracy, "test/accuracy": accuracy, "test/loss": 1 - accuracy},
                eval=tuple(
                    EvalCell(split=split, cell={}, rows=1000, scored=2000, accuracy=accuracy, loss=1 - accuracy)
                    for split in ("valid", "test")
                ),
                curve=Curve.model_validate({"step": (100, 200, 400), "train/loss": points, "valid/accuracy": points}),
                stopped=Stopped(step=400, reason="steps"),
                state_bytes={"16": 4096},
                params=12345,
                weights="sha256:" + f"{n:064x}",
                code=Code(commit=f"{commit:040x}", dirty=False, patch=None, source=source, version="0"),
                env=recorder.env,
                data="mqar/1",
                time=Time(start=f"2026-01-01T{commit:06d}", seconds=1.5, ms_per_step=3.75, stack=5),
            ),
        )


def value(n: int) -> float:
    """An accuracy for record `n`."""
    return n * 7919 % 1000 / 1000


class Writer:
    """One writer process, what it has acknowledged, and the number from which it goes on."""

    def __init__(self, place: int, writers: int, total: int, root: Path) -> None:
        self.place, self.writers, self.total, self.root = place, writers, total, root
        self.next = place
        self.acknowledged: list[int] = []
        self.start()

    def start(self) -> None:
        words = ["write", self.root, self.next, self.writers, self.total]
        command = [sys.executable, "-P", "-m", "mixassay.runners.bench_store", *map(str, words)]
        path = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path})
        self.thread = threading.Thread(target=self.listen, daemon=True)
        self.thread.start()

    def listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                if line.endswith(b"\n"):
                    self.acknowledged.append(int(line))

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.thread.join()
        if self.acknowledged:
            self.next = self.acknowledged[-1] + self.writers
        self.start()


def write(root: Path, start: int, step: int, total: int) -> None:
    """What a writer process does."""
    store = Store(root / "results")
    for n, record in records(Sweep.load(root / "load.yaml"), start, step, total):
        store.append([record])
        print(n, flush=True)


def run(root: Path, total: int, writers: int, seed: int = 0) -> dict[str, Any]:
    """The whole of it, in an empty folder; what came out. Raises `UserError` where a writer fails by itself."""
    (root / "load.yaml").write_text(SWEEP)
    chance, kills = random.Random(seed), 0
    began = time.monotonic()
    crew = [Writer(place, writers, total, root) for place in range(writers)]
    while any(writer.process.poll() is None for writer in crew):
        time.sleep(chance.uniform(*PAUSE))
        victim = chance.choice(crew)
        if victim.process.poll() is None:
            victim.kill()
            kills += 1
    for writer in crew:
        writer.thread.join()
        if writer.process.returncode:
            raise UserError(f"a writer ended with {writer.process.returncode}")
    seconds = time.monotonic() - began
    acknowledged = {n for writer in crew for n in writer.acknowledged}
    files = shards(root / "results")
    texts = [path.read_bytes() for path in files]
    stored = Store(root / "results").read("load")
    found = {int(record.key, 16): record.metrics["test/accuracy"] for record in stored.records}
    return {
        "records": total,
        "writers": writers,
        "kills": kills,
        "acknowledged": len(acknowledged),
        "lost": len(acknowledged - found.keys()),
        "wrong": sum(value(n) != accuracy for n, accuracy in found.items()),
        "warnings": len(stored.warnings),
        "torn": sum(not text.endswith(b"\n") for text in texts if text),
        "written_twice": sum(text.count(b"\n") for text in texts) - len(found),
        "shards": len(files),
        "bytes": sum(map(len, texts)),
        "seconds": round(seconds, 1),
    }


def report(root: Path) -> tuple[float, float]:
    """Seconds of `mixassay report` on the wall, and of its process on a core."""
    command = [sys.executable, "-P", "-m", "mixassay", "report", "load.yaml"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    began, before = time.monotonic(), os.times()
    subprocess.run(command, cwd=root, env=env, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return round(time.monotonic() - began, 2), round(spent, 2)


def main(words: Sequence[str]) -> None:
    if words[:1] == ["write"]:
        write(Path(words[1]), *map(int, words[2:]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--out", type=Path, help="also write the result here")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), given.records, given.writers)
        times = [report(Path(folder)) for _ in range(5)]
    found["report_seconds"] = {"wall": [wall for wall, _ in times], "core": [core for _, core in times]}
    text = json.dumps(found | {"env": environment("cpu")}, indent=1) + "\n"
    print(text, end="")
    if given.out is not None:
        given.out.write_text(text)
    sys.exit(1 if found["lost"] or found["wrong"] or found["acknowledged"] < found["records"] else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
