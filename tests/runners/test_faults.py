"""What may befall a worker and is no fault of the sweep: docs/scale.md has the table of all faults."""

import signal
import textwrap
from typing import Any

import pytest
import torch

from mixassay.errors import UserError
from mixassay.runners import crew, worker

from .test_launch import LONG, WITH_PLUGIN, Clock, checkpoints, plugin, wait_for


def test_a_worker_that_hangs_is_replaced_and_one_that_always_hangs_is_given_up(place: Any) -> None:
    stop = "os.kill(os.getpid(), signal.SIGSTOP)"
    (place.folder / "mine.py").write_text(plugin(f"os.path.exists('hung') or (open('hung', 'w').close(), {stop})"))
    file = place.write(WITH_PLUGIN)
    Clock(place.folder / "hung").set(place.monkeypatch)
    said = place.run("run", file, "run.hang=50s", "--only", "mixer=mine")
    assert said.code == 0, said.err
    assert "it made no step for run.hang, 50 s; trying again from its checkpoint" in said.out
    (place.folder / "hung").unlink()
    said = place.run("run", file, "run.hang=50s", "run.retries=0", "--seeds", "[2]", "--only", "mixer=mine")
    assert said.code == 3
    [record] = [record for record in place.records() if record.seed == 2]
    assert record.status == "timeout"
    assert record.error is not None
    assert record.error.message == "it made no step for run.hang, 50 s, 1 times"


def test_a_plug_in_that_ends_the_process_is_told_and_not_tried_for_ever(place: Any) -> None:
    (place.folder / "mine.py").write_text("import os\nos._exit(7)\n")
    said = place.run("run", place.write(WITH_PLUGIN), "--max-time", "20s")
    assert said.code == 2
    assert "a worker could not start:\nit ended with 7 and said nothing" in said.err


def test_a_plug_in_that_is_no_python_is_one_line(place: Any) -> None:
    (place.folder / "mine.py").write_text("import helper\n")
    (place.folder / "helper.py").write_text("x = 1\ndef (\n")
    said = place.run("run", place.write(WITH_PLUGIN))
    assert (said.code, said.err) == (2, "helper.py:2: SyntaxError: invalid syntax\n")
    (place.folder / "mine.py").write_text("class Mine(:\n")
    said = place.run("run", place.write(WITH_PLUGIN), "--plan")
    assert (said.code, said.err) == (2, "mine.py:1: SyntaxError: invalid syntax\n")


def test_a_mixer_may_change_the_folder_and_gets_no_answer_from_standard_input(place: Any) -> None:
    (place.folder / "mine.py").write_text(plugin("os.chdir('/')\nassert sys.stdin.read() == ''"))
    said = place.run("run", place.write(WITH_PLUGIN), "run.hang=20s", "run.retries=0")
    assert said.code == 0, said.err
    assert [record.status for record in place.records()] == ["ok"] * 4


def test_a_stack_that_does_not_fit_is_cut_and_the_parts_are_trained(place: Any) -> None:
    full = textwrap.dedent("""\
        import pathlib
        from torch import nn
        from mixassay.mixers import Mixer, mixer

        made = []

        @mixer("mine")
        class Mine(Mixer):
            def __init__(self, d_model: int) -> None:
                super().__init__()
                self.proj = nn.Linear(d_model, d_model)
                made.append(self)
                if len(made) == 3 and not pathlib.Path("room").exists():
                    pathlib.Path("room").touch()
                    raise MemoryError("no room for a third")

            def forward(self, x):
                return self.proj(x).cumsum(1)
        """)
    (place.folder / "mine.py").write_text(full)
    said = place.run("run", place.write(WITH_PLUGIN), "--seeds", "0-11", "run.stack=3", "--only", "mixer=mine")
    assert said.code == 0, said.out + said.err
    assert said.out.count("3 models do not fit together, trying halves") == 1
    stacks = {record.seed: record.time.stack for record in place.records() if record.status == "ok"}
    assert stacks == dict(enumerate([1, 2, 2] + [3] * 9))
    assert not list(place.folder.glob("results/tiny/.checkpoints/*/*")), "nothing is left over"


def test_sigterm_drains_and_asks_to_be_started_again(place: Any) -> None:
    place.write(LONG.replace("epochs: 30", "epochs: 6000"))
    process = place.start("run", "tiny.yaml")
    wait_for(lambda: checkpoints(place.folder))
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "SIGTERM: stopping after checkpoints" in out
    assert checkpoints(place.folder)


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: ("big", "small", "big")[i])


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("auto", (["cuda:0", "cuda:2"], "big")),
        ("cuda", (["cuda:0", "cuda:2"], "big")),
        ("cuda:1", (["cuda:1"], "small")),
        ("cpu", (["cpu"], "cpu")),
    ],
)
@pytest.mark.usefixtures("three_gpus")
def test_which_devices_there_are(wanted: str, found: tuple[list[str], str]) -> None:
    """GPUs of another kind are left alone: their numbers could not be told apart from the others'."""
    assert worker.find_devices(wanted) == found
    with pytest.raises(UserError, match=r"device cuda:3 is asked for, but torch .* sees 3"):
        worker.find_devices("cuda:3")


def test_slots_take_turns_on_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "Process", lambda slot, device, threads, inbox: device)
    members = crew.Crew("cuda", 1)
    members.devices = ("cuda:0", "cuda:2")
    assert [members.start(slot) for slot in range(4)] == ["cuda:0", "cuda:2", "cuda:0", "cuda:2"]
