"""Loss by position: a panel for each evaluated text, a line for each seed of each row."""

import pytest

from mixassay.errors import UserError
from mixassay.record import RunRecord
from mixassay.runners import report
from mixassay.runners.figures import figure
from mixassay.runners.marks import Panel
from mixassay.runners.plot import plot
from mixassay.sweep import Sweep

LM = """
version: 1
name: lm
task: {name: text, files: [text], tokenizer: bytes, seq_len: 64, eval_cells: [{seq_len: 64}, {seq_len: 128}]}
train: {loop: lm, steps: 10}
sweep: {grid: {mixer: [attention, mamba2]}}
seeds: [0, 1]
report: {metric: test/loss}
"""


@pytest.fixture
def sweep(tmp_path):
    (tmp_path / "lm.yaml").write_text(LM)
    return Sweep.load(tmp_path / "lm.yaml")


def said(loss: float) -> dict:
    cells = [({"seq_len": 64}, 9, 63), ({"seq_len": 128}, 17, 127)]
    positions = [
        {"split": split, "cell": cell, "window": window, "at": [0, last // 2, last], "loss": [3.0, loss, loss - 1]}
        for cell, window, last in cells
        for split in ("valid", "test")
    ]
    return {"positions": positions, "ranks": 1, "tokens_per_second": 1000.0, "flops_per_token": 1e6}


def test_loss_by_position(sweep, record_of, tmp_path):
    runs = [run for cell in sweep.cells() for run in sweep.reported(cell)]
    records = [record_of(run, 0.5, language=said(2.0 + run.seed)) for run in runs[:-1]] + [record_of(runs[-1], None)]
    drawn = figure(report.build(sweep, records), "positions")
    assert [panel.title for panel in drawn.panels] == ["seq_len=64", "seq_len=128"]
    first, second = (panel for panel in drawn.panels if isinstance(panel, Panel))
    assert [(series.name, len(series.curves)) for series in first.series] == [("attention", 2), ("mamba2", 1)]
    assert first.series[0].curves[1].points == ((0.0, 3.0), (31.0, 3.0), (63.0, 2.0))
    assert first.y.low < 1 < 3 < first.y.high
    assert second.x.high > 127
    assert "over 9 or 17 positions" in drawn.notes[0]
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plot(drawn, tmp_path / "x.svg")
    assert (tmp_path / "x.svg").stat().st_size > 0


def test_there_is_none_without_language_models(sweep, record_of):
    records = [record_of(run, 0.5) for cell in sweep.cells() for run in sweep.reported(cell)]
    with pytest.raises(UserError, match="no record is of a language model"):
        figure(report.build(sweep, records), "positions")


def test_a_record_of_a_language_model_reads_back(sweep, record_of):
    (cell, *_) = sweep.cells()
    record = record_of(sweep.reported(cell)[0], 0.5, language=said(2.0))
    assert RunRecord.model_validate_json(record.line()) == record
