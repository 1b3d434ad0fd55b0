"""A tracker is told what the records say, and none of its faults is ours."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mixassay.errors import UserError
from mixassay.runners.track import Mirror

TINY = Path(__file__).with_name("tiny.yaml").read_text()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Calls of a module that stands in for trackio and wandb, whose calls have one shape."""
    calls: list[tuple[str, Any]] = []
    module: Any = ModuleType("fake")
    module.init = lambda **words: calls.append(("init", words))
    module.log = lambda values, step: calls.append(("log", (step, values)))
    module.finish = lambda: (print("uploading"), calls.append(("finish", None)))
    monkeypatch.setitem(sys.modules, "trackio", module)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


@pytest.mark.parametrize("tracker", ["trackio", "wandb"])
def test_a_finished_run_is_shown_once(place: Any, fake: list[tuple[str, Any]], tracker: str) -> None:
    said = place.run("run", place.write(), f"run.tracker={tracker}", "--json")
    assert said.code == 0, said.err
    assert all("event" in json.loads(line) for line in said.out.splitlines())
    begun = [words for name, words in fake if name == "init"]
    assert [words["project"] for words in begun] == ["tiny", "tiny"]
    assert {words["config"]["key"] for words in begun} == {record.key for record in place.records()}
    own = fake[: [name for name, _ in fake].index("finish")]
    record = next(record for record in place.records() if record.key == own[0][1]["config"]["key"])
    assert own[0][1]["name"] == f"attention-seed{record.seed}-{record.key[:8]}"
    logged = [values for name, values in own if name == "log"]
    assert [step for step, _ in logged] == [*record.curve.step, record.stopped.step]
    assert tuple(values["train/loss"] for _, values in logged[:-1]) == record.curve["train/loss"]
    assert logged[-1][1]["final/test/accuracy"] == record.metrics["test/accuracy"]
    told = len(fake)
    assert place.run("run", "tiny.yaml", f"run.tracker={tracker}").code == 0
    assert len(fake) == told, "what was stored is not shown again"


def test_a_tracker_that_fails_is_told_and_left_alone(fake: list[tuple[str, Any]], make_record: Any) -> None:
    def fail(**_: object) -> None:
        raise OSError("no route to host")

    sys.modules["wandb"].init = fail  # type: ignore[attr-defined]
    notes: list[str] = []
    mirror = Mirror("wandb", Path("unused"), notes.append)
    mirror(make_record())
    mirror(make_record())
    assert notes == ["wandb failed and is left alone: OSError: no route to host"]
    assert fake == []


def test_one_that_is_not_installed_is_told_before_anything_trains(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    said = place.run("run", place.write(), "run.tracker=trackio")
    assert said.code == 2
    assert "run.tracker=trackio needs trackio: pip install 'mixassay[track-trackio]'" in said.err
    assert not place.records()
    with pytest.raises(UserError, match="track-trackio"):
        Mirror("trackio", Path(), print)


def test_tensorboard_gets_files_of_its_own(tmp_path: Path, make_record: Any) -> None:
    pytest.importorskip("tensorboard")
    from mixassay.runners import track

    record = make_record(0.5, curve={"step": (10,), "train/loss": (0.25,)}, stopped={"step": 10, "reason": "steps"})
    Mirror("tensorboard", tmp_path, pytest.fail)(record)
    (file,) = (tmp_path / track.name_of(record)).iterdir()
    assert b"train/loss" in file.read_bytes()
    assert b"final/test/accuracy" in file.read_bytes()
