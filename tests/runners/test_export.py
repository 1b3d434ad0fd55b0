"""Records and tasks in other programs' formats: nothing is lost on the way there and back."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mixassay.errors import UserError
from mixassay.record import RunRecord, parse
from mixassay.runners import export_records, export_task
from mixassay.runners.store import Store
from mixassay.runners.stream import Stream
from mixassay.sweep import Sweep

TINY = Path(__file__).with_name("tiny.yaml").read_text()


@pytest.fixture
def runs(make_record: Any) -> list[RunRecord]:
    config = {"task": {"name": "mqar"}, "mixer": {"name": "a", "size": 2}, "train": {"lr": 0.1, "betas": [0.9, 0.99]}}
    other = {"task": {"name": "mqar"}, "mixer": {"name": "b", "size": "big"}, "train": {"lr": 1, "stop": {"above": 1}}}
    return [
        make_record(
            0.1 + 0.2, key="k0", suite="tiny", config=config, curve={"step": (1, 2), "train/loss": (0.5, 1 / 3)}
        ),
        make_record(1.0, key="k1", suite="tiny", config=other, role="tune", tuned={"train.lr": 1}),
        make_record(None, key="k2", suite="tiny", status="oom", error={"type": "oom", "message": 'a "comma", here\nx'}),
    ]


def test_a_csv_of_the_records_holds_all_of_them(place: Any, runs: list[RunRecord]) -> None:
    Store("results").append(runs)
    said = place.run("export", "records", place.write(), "--out", "new/runs.csv")
    assert (said.code, said.out) == (0, ""), said.err
    assert "3 runs written to new/runs.csv" in said.err
    with open("new/runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [parse(row["record"].encode()) for row in rows] == runs
    assert [row["test/accuracy"] for row in rows] == ["0.30000000000000004", "1.0", ""]
    assert [row["config.mixer.size"] for row in rows] == ["2", "big", ""]
    assert json.loads(rows[0]["config.train.betas"]) == [0.9, 0.99]
    assert rows[2]["error.message"] == 'a "comma", here\nx'
    assert not list(Path("new").glob(".*")), "nothing is left over"


def test_a_parquet_file_of_the_records_has_types(tmp_path: Path, runs: list[RunRecord]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    export_records.check(tmp_path / "runs.parquet")
    export_records.write(runs, tmp_path / "runs.parquet")
    table = parquet.read_table(tmp_path / "runs.parquet")
    rows = table.to_pylist()
    assert [parse(row["record"].encode()) for row in rows] == runs
    assert [row["test/accuracy"] for row in rows] == [0.1 + 0.2, 1.0, None]
    assert [row["config.train.lr"] for row in rows] == [0.1, 1.0, 0.003]
    assert [row["config.mixer.size"] for row in rows] == ["2", '"big"', None], "of two types, so JSON"
    kinds = {name: str(table.schema.field(name).type) for name in ("seed", "test/accuracy", "code.dirty", "key")}
    assert kinds == {"seed": "int64", "test/accuracy": "double", "code.dirty": "bool", "key": "string"}


def test_what_cannot_be_exported_is_told(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = place.write()
    for words, message in [
        (["records", file, "--out", "x.txt"], "--out: x.txt should end in .csv or .parquet"),
        (["records", file, "--out", "x.csv"], "nothing is stored under results/tiny"),
        (["records", file], "--out"),
    ]:
        said = place.run("export", *words)
        assert said.code == 2
        assert message in said.err
    monkeypatch.setitem(sys.modules, "datasets", None)
    said = place.run("export", "task", file, "--out", "data")
    assert said.code == 2
    assert said.err == "a Hugging Face dataset needs datasets: pip install 'mixassay[export]'\n"


MIXED = TINY.replace(
    "train_examples: 256",
    "train_cells: [{num_kv: 1, examples: 32}, {seq_len: 32, num_kv: 4, examples: 64}], data_seed: 7",
)


@pytest.mark.parametrize("text", [TINY, MIXED], ids=["one cell", "a mixture of lengths, its rows fixed"])
def test_a_task_round_trips_as_a_dataset(place: Any, text: str) -> None:
    datasets = pytest.importorskip("datasets")
    said = place.run("export", "task", place.write(text), "--out", "data", "--seed", "3")
    assert said.code == 0, said.err
    stored = datasets.load_from_disk("data")
    assert list(stored) == ["train", "validation", "test"]
    sweep = Sweep.load("tiny.yaml")
    sections = sweep.cells()[0].sections
    about = json.loads(stored["test"].info.description)
    assert about["mixassay"] == "mqar/1"
    assert about["seed"] == (7 if text is MIXED else 3)
    stream = Stream(sections.task, sections.train)
    found = {(row["cell"], *row["tokens"]): row for row in stored["train"]}
    assert len(found) == len(stored["train"]) == sum(cell.examples or 0 for cell in stream.cells)
    for step in range(stream.steps):  # what a run with this seed trains on
        rows = stream.rows(step, (3,), "cpu")
        cell = next(n for n, cell in enumerate(stream.cells) if cell.task is stream.task_at(step))
        for tokens, positions, labels in zip(rows.tokens, rows.positions, rows.labels, strict=True):
            row = found[(cell, *tokens.tolist())]
            assert row["positions"] == positions.tolist()
            assert row["labels"] == labels.tolist()
    distances = stored["test"][0]["slices.distance"]
    assert len(distances) == len(stored["test"][0]["labels"])


def test_which_task_and_how_many_rows_must_be_clear(place: Any) -> None:
    pytest.importorskip("datasets")
    two = place.write(TINY + "sweep: {grid: {task.num_kv: [1, 2], model.d_model: [8, 16]}}\n", "two.yaml")
    said = place.run("export", "task", two, "--out", "data")
    assert said.code == 2
    assert "two.yaml has 2 different tasks, a dataset holds one: choose with --only task.KEY=VALUE" in said.err
    assert place.run("export", "task", two, "--out", "data", "--only", "task.num_kv=1").code == 0
    said = place.run("export", "task", two, "--out", "data", "--only", "task.num_kv=2")
    assert "data is there already and not empty" in said.err
    endless = place.write(TINY.replace("train_examples: 256, ", "").replace("epochs: 2", "steps: 2"), "endless.yaml")
    assert "--rows 10000" in place.run("export", "task", endless, "--out", "more").err
    assert place.run("export", "task", endless, "--out", "more", "--rows", "5").code == 0


def test_rows_that_do_not_read_back_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "tiny.yaml").write_text(TINY)
    task = Sweep.load(tmp_path / "tiny.yaml").cells()[0].sections.task
    real = export_task.rows_of
    monkeypatch.setattr(export_task, "rows_of", lambda part, cell: real(part, cell).map(lambda x: x + (x == 5)))
    with pytest.raises(UserError, match="split train, cell 0 did not read back the same"):
        export_task.write(task, tmp_path / "data", seed=0)
    assert not (tmp_path / "data").exists()
