"""Rows from files, folders and hubs, in both layouts."""

import json
from pathlib import Path
from typing import Any

import pytest

from mixassay.errors import UserError
from mixassay.runners.longbench.rows import Row, held, load

RAW = {
    "input": "Who?",
    "context": "A text.",
    "answers": ["Ann", "Bob"],
    "length": 3,
    "dataset": "qasper",
    "language": "en",
    "all_classes": None,
    "_id": "q1",
}
ROW = Row("q1", "qasper", "Who?", "A text.", ("Ann", "Bob"), 3, "en", ())


def mirrored(**changes: Any) -> dict[str, Any]:
    """In the layout of the mirror on the hub."""
    raw = {**RAW, **changes}
    return {"question" if name == "input" else name: value for name, value in raw.items()}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_both_layouts_from_files_and_folders_give_the_same_row(cache: Any, tmp_path: Path) -> None:
    own, mirror = write(tmp_path / "a/qasper.jsonl", RAW), write(tmp_path / "b/data/qasper.jsonl", mirrored())
    assert load("qasper", own) == load("qasper", mirror) == [ROW]
    assert held(tmp_path / "a", "qasper")
    assert held(tmp_path / "b", "qasper")
    assert not held(tmp_path / "b", "lcc")
    assert load("qasper", tmp_path / "a") == load("qasper", str(tmp_path / "b")) == [ROW]


def test_a_folder_with_configurations_is_read_as_on_the_hub(cache: Any, tmp_path: Path) -> None:
    write(tmp_path / "hub/test/qasper_e.jsonl", mirrored(dataset="qasper_e"))
    card = "- config_name: {0}\n  data_files: [{{split: test, path: test/{0}.jsonl}}]"
    cards = "\n".join(card.format(name) for name in ("qasper_e", "lcc"))
    (tmp_path / "hub/README.md").write_text(f"---\nconfigs:\n{cards}\n---\n")
    assert held(tmp_path / "hub", "qasper_e")
    assert not held(tmp_path / "hub", "qasper")
    (row,) = load("qasper", tmp_path / "hub", by_length=True)
    assert (row.dataset, row.input) == ("qasper_e", "Who?")


def test_classes_are_kept(cache: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "trec.jsonl", {**RAW, "dataset": "trec", "all_classes": ["City", "Other"]})
    assert load("trec", path)[0].all_classes == ("City", "Other")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({**RAW, "dataset": "hotpotqa"}, 'field "dataset" says hotpotqa, expected qasper'),
        ({k: v for k, v in RAW.items() if k not in ("context", "length")}, "no field context, length; found input,"),
        ({k: v for k, v in RAW.items() if k != "input"}, "no field question"),
        ({**RAW, "answers": []}, "must be a list of texts"),
    ],
)
def test_rows_that_are_not_of_the_set_are_refused(cache: Any, tmp_path: Path, row: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load("qasper", write(tmp_path / "qasper.jsonl", row))


def test_without_a_network_the_hub_says_what_would_do(cache: Any) -> None:
    with pytest.raises(UserError, match=r"a folder with qasper\.jsonl needs no network"):
        load("qasper")


def test_unknown_sets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match='Did you mean "qasper"'):
        load("qaspr", tmp_path)
    with pytest.raises(UserError, match="LongBench-E has no set musique"):
        load("musique", tmp_path, by_length=True)


@pytest.mark.parametrize("name", ["qasper", "2wikimqa", "passage_count", "vcsum"])
def test_the_sample_rows(cache: Any, data: Path, name: str) -> None:
    raws = [json.loads(line) for line in (data / f"samples/{name}.jsonl").read_text().splitlines()]
    rows = load(name, data / "samples")
    assert [(r.id, r.input, r.context, list(r.answers), r.length) for r in rows] == [
        (raw["_id"], raw["input"], raw["context"], raw["answers"], raw["length"]) for raw in raws
    ]
