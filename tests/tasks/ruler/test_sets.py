"""Addresses, and the cache behind them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mixassay.errors import UserError
from mixassay.tasks.ruler import sets
from mixassay.tasks.ruler.sets import SampleSet
from mixassay.tasks.ruler.sources import DATA, Sources
from mixassay.tokens import Bytes

SET = SampleSet("niah_multiquery", 1024, Bytes())


def test_what_is_read_back_is_what_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SET.cached(3, tmp_path)
    assert made == SET.samples(3)
    (file,) = tmp_path.iterdir()
    assert file.name == f"{SET.address}.jsonl"
    assert json.loads(file.read_text().splitlines()[0])["recipe"] == SET.recipe()
    assert SET.cached(5, tmp_path)[:3] == made  # more are asked for: made anew
    monkeypatch.setattr(SampleSet, "samples", None)  # and from here on nothing is
    assert len(SET.cached(5, tmp_path)) == 5
    assert SET.cached(2, tmp_path) == made[:2]
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_dropped_sample_is_not_a_missing_one(tmp_path: Path, small: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's generator gives fewer than were asked for; that is remembered."""
    some = replace(SampleSet("qa_2", 2300, Bytes(), small), compat="lm-eval")
    made = some.cached(60, tmp_path)
    assert 0 < len(made) < 60
    monkeypatch.setattr(SampleSet, "samples", None)
    assert some.cached(60, tmp_path) == made


@pytest.mark.parametrize("change", [("4", "5"), ('"asked"', '"aksed"'), ("\n", "")], ids=str)
def test_a_changed_file_is_refused(change: tuple[str, str], tmp_path: Path) -> None:
    SET.cached(1, tmp_path)
    (file,) = tmp_path.iterdir()
    head, _, body = file.read_text().partition("\n")
    file.write_text(f"{head}\n{body.replace(*change)}" if change[0] != '"asked"' else f"{head[:9]}\n{body}")
    with pytest.raises(UserError, match="was changed after it was written; delete it"):
        SET.cached(1, tmp_path)


def test_nothing_is_left_of_a_set_that_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space"):
        SET.cached(1, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_address_is_of_what_decides_the_samples(small: Sources, tmp_path: Path) -> None:
    copy = tmp_path / "other-name.txt"
    copy.write_bytes((DATA / "on_liberty.txt").read_bytes())
    sets_ = [
        SET,
        replace(SET, length=1025),
        replace(SET, seed=43),
        replace(SET, compat="ruler"),
        replace(SET, compat="lm-eval"),
        replace(SET, task="niah_multikey_1"),
        replace(SET, sources=Sources(essay=("on_liberty",))),
        SampleSet("qa_1", 1024, Bytes(), small),
    ]
    assert len({one.address for one in sets_}) == len(sets_)
    assert SET.address == replace(SET, seed=42).address == replace(SET, sources=small).address
    assert sets_[6].address == replace(SET, sources=Sources(essay=(copy,))).address
    assert SET.address == "4388964a519bba403cbfcf76eadb2289ec2bf9a96a3eebbe54d3c2e13322d169", (
        "an address must not move without a version"
    )


def test_the_recipe_names_the_sources_of_the_task_and_no_others(small: Sources) -> None:
    def names(task: str) -> list[str]:
        return list(SampleSet(task, 1024, Bytes(), small).recipe()["sources"])

    assert names("niah_single_2") == ["on_liberty.txt+moby_dick.txt", "words"]
    assert names("niah_multikey_3") == names("vt") == names("fwe") == []
    assert names("cwe") == ["words"]
    assert names("qa_2") == ["hotpotqa.json"]
    assert [replace(SET, compat=c).recipe()["seed"] for c in (None, "ruler", "lm-eval")] == [42, 42, 0]


def test_compat_makes_other_samples() -> None:
    assert len({replace(SET, length=4096, compat=compat).samples(1)[0].prompt for compat in sets.GENERATORS}) == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"compat": "nvidia"}, 'ruler: compat must be "ruler", "lm-eval" or left out, got "nvidia"'),
        ({"length": 255}, "ruler: length must be at least 256, got 255"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        replace(SET, **wrong)
    assert str(error.value) == message
