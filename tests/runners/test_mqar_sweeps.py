"""The shipped MQAR sweeps: every cell trains, at a size that takes a moment, and the records become a report beside the
published table."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from mixassay.check import check
from mixassay.runners import train
from mixassay.runners.plan import steps_of
from mixassay.runners.recorder import Recorder
from mixassay.runners.refresh import refreshed
from mixassay.runners.store import Store
from mixassay.sweep import Cell, Sweep

NAMES = ("attention", "mamba2", "log_linear_mamba2", "gated_deltanet", "log_linear_gated_deltanet")
FOLDER = Path(__file__).parents[2] / "configs/mqar"
ONE_TABLE = ("log_linear_table", "full_table", "recall_vs_state")
SMALL = (
    "task.vocab_size=32",
    "task.valid_examples=4",
    "task.test_examples=4",
    "train.epochs=null",
    "train.steps=2",
    "train.batch_size=4",
    "seeds=[0]",
)
MIXTURE = "task.train_cells=[{seq_len: 16, num_kv: 2, examples: 8}, {seq_len: 32, num_kv: 4, examples: 8}]"
FIGURE = (
    "task.train_examples=8",
    "sweep.grid.model.d_model=[16]",
    "sweep.zip.scale=[{task.seq_len: 16, task.num_kv: 2}]",
)


def load(name: str, *overrides: str) -> Sweep:
    return Sweep.load(FOLDER / f"{name}.yaml", overrides)


def small_cells() -> Iterator[tuple[Sweep, Cell]]:
    """Every cell of the sweeps once, made small."""
    seen = set()
    for sweep in [
        *(load(name, *SMALL, MIXTURE) for name in (*ONE_TABLE, "precision", "log_linear_why", "gated_deltanet_why")),
        load("zoology_figure2", *SMALL, *FIGURE),
    ]:
        for cell in sweep.cells():
            if cell.cell not in seen:
                seen.add(cell.cell)
                yield sweep, cell


def test_every_cell_trains() -> None:
    n = 0
    for sweep, cell in small_cells():
        outcomes = list(train.run(sweep.reported(cell, sweep.candidates()[0])))
        assert [outcome.status for outcome in outcomes] == ["ok"], str(cell)
        assert outcomes[0].stopped["step"] == 2
        assert outcomes[0].state_bytes
        n += 1
    assert n == 15 + 9 + 22 + 4 + 8 + 6 + 4 - 1


def test_the_protocol() -> None:
    """702 steps an epoch (100,000 // 256 + 4 times 20,000 // 256), 32 epochs; and what one file has another shares."""
    sweeps = {name: load(name) for name in (*ONE_TABLE, "gated_deltanet_why")}
    cells = {name: {cell.cell for cell in sweep.cells()} for name, sweep in sweeps.items()}
    for sweep in sweeps.values():
        check(sweep)
        assert (sweep.name, sweep.seeds) == ("mqar", (0, 1, 2, 3, 4))
        tuned = {"train.lr": [0.001, 0.00316228, 0.01, 0.0316228]} if sweep.select else {}
        assert sweep.tuned == tuned
        runs = [run for cell in sweep.cells() for run in sweep.reported(cell, sweep.candidates()[0])]
        assert {steps_of(run) for run in runs} == {22464}
    assert [name for name, sweep in sweeps.items() if sweep.select is None] == ["recall_vs_state", "gated_deltanet_why"]
    table, full, state, why = cells.values()
    assert (len(table), len(full), len(state)) == (15, 14, 22)
    assert (len(full & table), len(state & why)) == (5, 1)
    for cell in (cell for sweep in sweeps.values() for cell in sweep.cells()):
        mamba = "mamba2" in cell.sections.mixer.name
        model = cell.sections.model
        assert (model.block == "mamba", model.hybrid is None, model.dropout == 0) == (mamba, mamba, mamba)
    heads = {
        (c.sections.model.d_model, c.sections.mixer.args["heads"])
        for c in sweeps["log_linear_table"].cells()
        if c.sections.mixer.name.endswith("gated_deltanet")
    }
    assert heads == {(16, 1), (32, 2), (64, 2)}


REPORT = """\
<!-- shows: mixassay report {file} {more} --against log-linear-mqar --format md -->
<!-- end -->
<!-- makes: mixassay report {file} {more} report.columns='[task.num_kv, model.d_model]' --plot pairs.svg -->
"""


def test_from_runs_to_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The five rows at width 16: records of real runs, then a document's table and picture."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.chdir(tmp_path)
    sweep = load("log_linear_table", *SMALL, MIXTURE)
    recorder, store = Recorder("cpu", threads=1), Store("results")
    for cell in sweep.only({"model.d_model": 16}).cells():
        runs = sweep.reported(cell, sweep.candidates()[0])
        store.append([recorder.outcome(outcome) for outcome in train.run(runs)])
    more = shlex.join([*SMALL, MIXTURE])
    text = refreshed(REPORT.format(file=FOLDER / "log_linear_table.yaml", more=more))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[1:6]] == [f"| {name}" for name in NAMES]
    assert any(row.startswith("|  |  |  | published | +9.0 | ") for row in rows)
    assert (tmp_path / "pairs.svg").stat().st_size > 10_000
