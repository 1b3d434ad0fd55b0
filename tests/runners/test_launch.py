"""Sweeps with real workers: what is trained, what is not trained twice, and what no accident can lose."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mixassay.record import RunRecord, run_key
from mixassay.runners import crew, launch
from mixassay.runners.store import Store

TINY = Path(__file__).with_name("tiny.yaml").read_text()

WITH_PLUGIN = TINY + "plugins: [mine.py]\nsweep: {grid: {mixer: [mine, attention]}}\n"


def plugin(body: str) -> str:
    """A mixer named `mine` that adds nothing to the stream, and does `body` whenever it runs."""
    return textwrap.dedent("""\
        import os, signal, sys, time
        import torch
        from torch import nn
        from mixassay.mixers import Mixer, mixer

        @mixer("mine")
        class Mine(Mixer):
            def __init__(self, d_model: int) -> None:
                super().__init__()
                self.d_model = d_model
                self.scale = nn.Parameter(torch.ones(()))

            def forward(self, x):
                if x.device.type != "meta":
                    self.act()
                return self.scale * x

            def act(self):
        """) + textwrap.indent(textwrap.dedent(body), " " * 8)


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.01)


def shards(folder: Path) -> list[Path]:
    return [path for path in folder.glob("results/*/*/*/*.jsonl") if path.stat().st_size]


def checkpoints(folder: Path) -> list[Path]:
    return list(folder.glob("results/*/.checkpoints/*/state/state.json"))


def test_the_second_run_trains_nothing_and_prints_the_same_table(place: Any) -> None:
    file = place.write(TINY + "sweep: {grid: {mixer: [attention, linear_attention]}}\n")
    first = place.run("run", file)
    assert first.code == 0, first.err
    stored = {path: path.read_bytes() for path in shards(place.folder)}
    assert len(place.records()) == 4
    assert not list(place.folder.glob("results/tiny/.checkpoints/*/*")), "nothing is left over"
    second = place.run("run", file)
    assert second.code == 0
    assert {path: path.read_bytes() for path in shards(place.folder)} == stored
    told = [line for line in first.out.splitlines() if not line.startswith("cell ")]
    assert second.out.splitlines() == told
    assert "± " in second.out
    more = place.run("run", file, "--seeds", "0-2", "--json")
    events = [json.loads(line) for line in more.out.splitlines()]
    assert [e["seed"] for e in events if e["event"] == "run"] == [2, 2], "only what is missing"
    assert events[-1] == {"event": "end", "reason": "done", "exit": 0}


def children(process: "subprocess.Popen[Any]") -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


LONG = (
    TINY.replace("epochs: 2", "epochs: 30")
    .replace("seeds: [0, 1]", "seeds: [0, 1, 2]")
    .replace("slots: 1", "slots: 1, stack: 3, checkpoint_every: 0.1")
    + "sweep: {grid: {model.d_model: [8, 16]}}\n"
)
"""Long enough to be interrupted, with a stack of three."""


def command_in(folder: Path) -> dict[str, Any]:
    """`mixassay run tiny.yaml` there, for `subprocess`."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return {"args": [sys.executable, "-P", "-m", "mixassay", "run", "tiny.yaml"], "cwd": folder, "env": env}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which LONG was run to its end."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "tiny.yaml").write_text(LONG)
    done = subprocess.run(**command_in(folder), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which LONG and its worker were killed at their first checkpoint."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "tiny.yaml").write_text(LONG)
    process = subprocess.Popen(**command_in(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: checkpoints(folder))
    for pid in [process.pid, *children(process)]:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    assert len(Store(folder / "results").read("tiny").records) < 6, "killed before its end"
    assert checkpoints(folder)
    return folder


def test_killed_and_started_again_ends_with_the_same_records(
    place: Any, killed: Path, undisturbed: Path, numbers: Any
) -> None:
    shutil.copytree(killed, place.folder, dirs_exist_ok=True)
    again = place.run("run", "tiny.yaml")
    assert again.code == 0, again.err
    assert numbers(place.records()) == numbers(Store(undisturbed / "results").read("tiny").records)


def test_ctrl_c_drains_and_loses_nothing(place: Any, undisturbed: Path, numbers: Any) -> None:
    place.write(LONG)
    process = place.start("run", "tiny.yaml")
    wait_for(lambda: checkpoints(place.folder))
    step = json.loads(checkpoints(place.folder)[0].read_text())["step"]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopping after checkpoints; Ctrl-C again kills" in out
    assert "Traceback" not in out + err
    [left] = checkpoints(place.folder)
    assert json.loads(left.read_text())["step"] >= step
    again = place.run("run", "tiny.yaml")
    assert again.code == 0, again.err
    assert numbers(place.records()) == numbers(Store(undisturbed / "results").read("tiny").records)


class Clock:
    """The launcher's, which can be put forward, and is by a minute as soon as a file exists."""

    ahead = 0.0

    def __init__(self, file: Path | None = None) -> None:
        self.file = file

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead + 60 * (self.file is not None and self.file.exists())

    def set(self, monkeypatch: pytest.MonkeyPatch) -> "Clock":
        for module in (launch, crew):
            monkeypatch.setattr(module, "time", self)
        return self


def test_the_end_of_the_time_asks_to_be_started_again_and_loses_nothing(
    place: Any, undisturbed: Path, numbers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is over when the first job has been sent, and in the second run when the last one has been done."""
    clock, send, close = Clock().set(monkeypatch), crew.Process.send, launch.Launcher._close

    def sent(self: crew.Process, **message: Any) -> None:
        send(self, **message)
        clock.ahead += 1000 * ("job" in message)

    def closed(self: launch.Launcher, *given: Any) -> None:
        close(self, *given)
        clock.ahead += 1000 * self._over()

    monkeypatch.setattr(crew.Process, "send", sent)
    first = place.run("run", place.write(LONG), "--max-time", "10m")
    assert first.code == 75, first.err
    assert "--max-time is over: stopping after checkpoints" in first.out
    assert not place.records()
    [left] = checkpoints(place.folder)
    assert json.loads(left.read_text())["step"] > 0
    monkeypatch.setattr(crew.Process, "send", send)
    monkeypatch.setattr(launch.Launcher, "_close", closed)
    again = place.run("run", "tiny.yaml", "--max-time", "10m")
    assert again.code == 0, again.err
    assert numbers(place.records()) == numbers(Store(undisturbed / "results").read("tiny").records)


def test_when_the_main_process_is_killed_its_workers_leave_by_themselves(place: Any) -> None:
    place.write(LONG.replace("epochs: 30", "epochs: 6000"))
    process = place.start("run", "tiny.yaml")
    wait_for(lambda: checkpoints(place.folder))
    [worker] = children(process)
    process.kill()
    process.communicate()
    wait_for(lambda: not Path(f"/proc/{worker}").exists() or "Z" in Path(f"/proc/{worker}/stat").read_text().split()[2])


def test_a_damaged_checkpoint_costs_time_and_no_number(
    place: Any, killed: Path, undisturbed: Path, numbers: Any
) -> None:
    shutil.copytree(killed, place.folder, dirs_exist_ok=True)
    for path in place.folder.glob("results/tiny/.checkpoints/*/state/step-*"):
        path.write_bytes(path.read_bytes()[:10])
    again = place.run("run", "tiny.yaml")
    assert again.code == 0, again.err
    assert "is damaged" in again.out
    assert numbers(place.records()) == numbers(Store(undisturbed / "results").read("tiny").records)


def test_two_at_once_share_the_work(place: Any) -> None:
    place.write(LONG)
    both = [place.start("run", "tiny.yaml") for _ in range(2)]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    lines = [line for path in shards(place.folder) for line in path.read_bytes().splitlines()]
    assert len(lines) == len({json.loads(line)["key"] for line in lines}) == 6


def test_an_error_is_told_with_its_place_and_the_sweep_goes_on(place: Any) -> None:
    (place.folder / "mine.py").write_text(plugin("raise RuntimeError('no such luck')"))
    file = place.write(WITH_PLUGIN)
    said = place.run("run", file)
    assert said.code == 3
    line = next(n for n, text in enumerate((place.folder / "mine.py").read_text().splitlines(), 1) if "luck" in text)
    assert said.out.count(f"RuntimeError: no such luck (mine.py:{line})") == 2, "at once, for each of two stacks"
    assert f"no such luck (mine.py:{line}): mixer=mine seed 0; mixer=mine seed 1" in said.err, "and at the end"
    assert "Traceback" not in said.out + said.err
    assert sorted((r.config["mixer"]["name"], r.status) for r in place.records()) == [
        ("attention", "ok"),
        ("attention", "ok"),
        ("mine", "error"),
        ("mine", "error"),
    ]
    again = place.run("run", file)
    assert again.code == 3
    assert "--mode retry" in again.err
    assert len([1 for path in shards(place.folder) for _ in path.read_bytes().splitlines()]) == 4, "not tried again"
    retried = place.run("run", file, "--mode", "retry", "--fail-fast")
    assert retried.code == 3
    assert 'raise RuntimeError("no such luck")' in retried.out or "raise RuntimeError('no such luck')" in retried.out
    assert {r.attempt for r in place.records() if r.status == "error"} == {1, 2}, "only the first was tried"


def test_three_alike_stop_the_sweep(place: Any) -> None:
    (place.folder / "mine.py").write_text(plugin("raise RuntimeError('no such luck')"))
    file = place.write(
        TINY.replace("mixer: attention", "mixer: mine").replace("[0, 1]", "0-9") + "plugins: [mine.py]\n"
    )
    said = place.run("run", file, "run.stack=1")
    assert said.code == 3
    assert "first 3 stacks all failed alike" in said.err
    assert len(place.records()) == 3


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_a_worker_that_dies_once_is_replaced(place: Any, how: str) -> None:
    once = f"""\
        if not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), signal.{how})
        """
    (place.folder / "mine.py").write_text(plugin(once))
    said = place.run("run", place.write(WITH_PLUGIN))
    assert said.code == 0, said.err
    assert ("killed by signal 9; trying again" in said.out) == (how == "SIGKILL"), "SIGTERM is no accident"
    assert [r.status for r in place.records()] == ["ok"] * 4


def test_a_job_whose_worker_always_dies_is_killed_and_a_slow_one_timed_out(place: Any) -> None:
    act = "os.kill(os.getpid(), signal.SIGKILL) if os.environ.get('DIE') else (open('slow', 'w'), time.sleep(600))"
    (place.folder / "mine.py").write_text(plugin(act))
    file = place.write(WITH_PLUGIN)
    place.monkeypatch.setenv("DIE", "1")
    said = place.run("run", file, "seeds=[0]", "run.retries=0")
    assert said.code == 3
    assert {r.config["mixer"]["name"]: r.status for r in place.records()} == {"mine": "killed", "attention": "ok"}
    place.monkeypatch.delenv("DIE")
    Clock(place.folder / "slow").set(place.monkeypatch)
    said = place.run("run", file, "seeds=[1]", "run.timeout=50s")
    assert said.code == 3
    assert "took longer than run.timeout, 50 s" in said.err
    found = {r.config["mixer"]["name"]: r.status for r in place.records() if r.seed == 1}
    assert found == {"mine": "timeout", "attention": "ok"}


def test_what_a_mixer_prints_does_not_disturb(place: Any) -> None:
    (place.folder / "mine.py").write_text(plugin('print(\'{"event": "finished"}\')'))
    said = place.run("run", place.write(WITH_PLUGIN), "seeds=[0]", "--only", "mixer=mine", "--json")
    assert said.code == 0
    assert "worker 0: {" in said.err
    assert all("event" in json.loads(line) for line in said.out.splitlines())


def test_a_stack_that_does_not_fit_is_tried_in_halves(place: Any) -> None:
    act = "if len(open('/proc/self/cmdline').read()) and os.environ.get('BIG'): raise MemoryError('too big')"
    (place.folder / "mine.py").write_text(plugin(act))
    place.monkeypatch.setenv("BIG", "1")
    said = place.run("run", place.write(WITH_PLUGIN), "--only", "mixer=mine", "run.stack=2", "run.slots=1")
    assert said.code == 3
    assert [r.status for r in place.records()] == ["oom", "oom"]


def test_a_full_disk_is_told_once_and_loses_nothing(place: Any, numbers: Any) -> None:
    file = place.write()
    assert place.run("run", file, "seeds=[0]").code == 0
    before = numbers(place.records())

    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))

    process = place.start("run", file, preexec_fn=no_room)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2, out + err
    assert err.count("cannot write") == 1
    assert "Traceback" not in out + err
    assert numbers(place.records()) == before
    assert place.run("run", file).code == 0
    assert len(place.records()) == 2


def test_settings_are_chosen_on_validation_then_frozen(place: Any) -> None:
    text = TINY + "sweep: {select: {axes: {train.lr: [1e-4, 1e-2]}, seeds: [100, 101]}}\n"
    file = place.write(text)
    said = place.run("run", file)
    assert said.code == 0, said.err
    records = place.records()
    assert sorted((r.role, r.seed) for r in records) == [
        *[("report", 0), ("report", 1)],
        *[("tune", 100), ("tune", 100), ("tune", 101), ("tune", 101)],
    ]
    chosen = place.folder / "results/tiny/selected.yaml"
    before = chosen.read_bytes()
    assert place.run("run", file).code == 0
    assert chosen.read_bytes() == before
    assert len(place.records()) == 6


def test_any_code_trains_only_the_runs_of_a_stack_that_no_version_has(place: Any) -> None:
    """A worker names runs by the present code, and so must what it is told to leave alone."""
    text = TINY + "sweep: {select: {axes: {train.lr: [1e-4, 1e-3, 3e-3, 1e-2]}, seeds: [100]}}\n"  # two runs a job
    assert place.run("run", place.write(text)).code == 0
    for path in shards(place.folder):
        lines = [RunRecord.model_validate_json(line) for line in path.read_text().splitlines()]
        for i, record in enumerate(lines):
            code = record.code.model_copy(update={"source": "0123456789abcdef"})
            key = run_key(record, code.source, record.data, str(record.env["class"]))
            lines[i] = record.model_copy(update={"code": code, "key": key})
        path.write_text("".join(f"{record.model_dump_json()}\n" for record in lines))
    before = {record.key for record in place.records()}
    said = place.run("run", place.write(text.replace("[100]", "[100, 101]")), "--mode", "any-code")
    assert said.code == 0, said.err
    assert [(r.role, r.seed) for r in place.records() if r.key not in before] == [("tune", 101)] * 4
