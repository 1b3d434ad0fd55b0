"""Published predictions score what was published with them."""

import json
from pathlib import Path
from typing import Any

import pytest

from mixassay.errors import UserError
from mixassay.runners.longbench.metrics.code import EditDistance
from mixassay.runners.longbench.rescore import predictions, rescore
from mixassay.runners.longbench.score import score
from mixassay.runners.longbench.sets import SETS

LLAMA = [name for name in SETS if name not in ("multi_news", "samsum", "lsht")]  # left out for their licence
RWKV = [name for name in LLAMA if name not in ("gov_report", "passage_retrieval_en")]
PUBLISHED: list[Any] = [
    pytest.param(model, name, distance, id=f"{model}-{name}")
    for model, names, distance in (("llama2-7b-chat-4k", LLAMA, "difflib"), ("rwkv6-7b", RWKV, "levenshtein"))
    for name in names
]


@pytest.fixture(autouse=True)
def libraries() -> None:
    for library in ("jieba", "rapidfuzz"):
        pytest.importorskip(library)


def test_all_that_was_published_is_tried(data: Path) -> None:
    there = {(path.parent.name, path.stem) for path in data.glob("predictions/*/*.jsonl")}
    assert there == {tuple(one.values[:2]) for one in PUBLISHED}
    assert len(there) == 34


@pytest.mark.parametrize(("model", "name", "edit_distance"), PUBLISHED)
def test_a_published_score_comes_out(data: Path, model: str, name: str, edit_distance: EditDistance) -> None:
    """The Llama's code was scored by difflib, the RWKV's with python-Levenshtein."""
    folder = data / "predictions" / model
    published = json.loads((folder / "result.json").read_text())[name]
    got = score(name, predictions(folder / f"{name}.jsonl"), edit_distance=edit_distance)
    assert got.n == got.of
    assert got.value == pytest.approx(published, abs=0.0051)  # they are rounded to 0.01


def test_published_scores_by_length_come_out(data: Path) -> None:
    found = list(rescore(data / "predictions_e/rwkv5-7b", by_length=True, edit_distance="levenshtein"))
    assert len(found) == 30
    for got, bin, published in found:
        assert got.value == pytest.approx(published, abs=0.0051), (got.dataset, bin)


@pytest.mark.parametrize(("model", "wrong"), [("llama2-7b-chat-4k", "levenshtein"), ("rwkv6-7b", "difflib")])
def test_the_other_edit_distance_gives_another_score(data: Path, model: str, wrong: EditDistance) -> None:
    folder = data / "predictions" / model
    for name in ("lcc", "repobench-p"):
        published = json.loads((folder / "result.json").read_text())[name]
        assert abs(score(name, predictions(folder / f"{name}.jsonl"), edit_distance=wrong).value - published) > 1


def write(folder: Path, name: str, *lines: object) -> None:
    (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_what_cannot_be_scored_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no predictions"):
        list(rescore(tmp_path))
    write(tmp_path, "qasper", {"pred": "x", "answers": ["x"]}, {"pred": "x"})
    with pytest.raises(UserError, match=r"qasper\.jsonl:2: expected"):
        list(rescore(tmp_path))
    write(tmp_path, "qasper", {"pred": "x", "answers": "x"})
    with pytest.raises(UserError, match="list of texts"):
        list(rescore(tmp_path))
    write(tmp_path, "qasper", {"pred": "x", "answers": ["x"]})
    with pytest.raises(UserError, match='need the field "length"'):
        list(rescore(tmp_path, by_length=True))
    write(tmp_path, "qasper")
    with pytest.raises(UserError, match="empty"):
        list(rescore(tmp_path))


def test_on_the_command_line(place: Any, tmp_path: Path) -> None:
    write(tmp_path, "lcc", {"pred": "x = 1", "answers": ["x = 1"], "all_classes": None, "length": 9})
    write(tmp_path, "qasper", {"pred": "x", "answers": ["y"], "all_classes": None, "length": 9})
    (tmp_path / "result.json").write_text('{"lcc": 99.5}')
    said = place.run("rescore", str(tmp_path))
    assert said.code == 0, said.err
    lines = [line.split() for line in said.out.splitlines()]
    assert lines[1] == ["qasper", "qa_f1", "0.00", "1", "of", "200"]
    assert lines[2][:8] == ["lcc", "code", "100.00", "99.50", "1", "of", "500", "edit_distance"]
    told = json.loads(place.run("rescore", str(tmp_path), "--json", "--edit-distance", "levenshtein").out)
    assert [(one["set"], one["score"], one["published"]) for one in told] == [("qasper", 0, None), ("lcc", 100, 99.5)]
    assert told[1]["tools"]["edit_distance"] == "levenshtein"
    assert place.run("rescore", str(tmp_path / "none")).code == 2
