"""Every setting that `select` chose among, in tuning and reported runs and in sweeps that write the setting down."""

import pytest

from mixassay.errors import UserError
from mixassay.runners import report, tried
from mixassay.sweep import Sweep

YAML = """
version: 1
name: demo
task: {name: mqar, seq_len: 64, num_kv: 8}
train: {steps: 10, lr: 0.003}
sweep: {grid: {mixer: [attention, mamba2], model.d_model: [16, 32]}}
seeds: [0, 1, 2]
report: {rows: mixer, columns: [model.d_model]}
"""
SELECT = "sweep.select={axes: {train.lr: [1e-3, 1e-2]}, seeds: [100, 101]}"


@pytest.fixture
def load(tmp_path):
    def load(*overrides: str) -> Sweep:
        (tmp_path / "demo.yaml").write_text(YAML)
        return Sweep.load(tmp_path / "demo.yaml", overrides)

    return load


def test_all_runs_of_a_setting_count_wherever_it_was_written(load, record_of):
    sweep = load(SELECT)
    values = {0.001: 0.2, 0.01: 0.4}
    found = [record_of(run, values[run.tuned["train.lr"]]) for cell in sweep.cells() for run in sweep.tuning(cell)]
    found += [
        record_of(run, 0.3 + run.seed / 10)
        for cell in sweep.cells()
        for run in sweep.reported(cell, {"train.lr": 0.01})
    ]
    fixed = load("train.lr=0.001").cells()[0]  # by a sweep without selection
    found += [
        record_of(run, v) for run, v in zip(load("train.lr=0.001").reported(fixed), (0.5, 0.5, None), strict=True)
    ]
    other = load("train.lr=0.001", "train.weight_decay=0.5")
    found += [record_of(run, 0.9) for run in other.reported(other.cells()[0])]  # another configuration: not counted
    shown = tried.grid(sweep, report.build(sweep, found), found)
    assert [head[-1] for head in shown.heads] == ["mixer", "", "lr=0.001", "lr=0.01"]
    assert [[cell.text for cell in row] for row in shown.rows] == [
        # .2 .2 .5 .5: mean .35, std sqrt(4 x .15^2 / 3) = .173; .4 .4 .3 .4 .5: mean .4, std sqrt(.02 / 4) = .071
        ["attention", "d_model=16", "35.0 ± 17.3 (4), 1 diverged", "40.0 ± 7.1 (5)"],
        ["attention", "d_model=32", "20.0 ± 0.0 (2)", "40.0 ± 7.1 (5)"],
        ["mamba2", "d_model=16", "20.0 ± 0.0 (2)", "40.0 ± 7.1 (5)"],
        ["mamba2", "d_model=32", "20.0 ± 0.0 (2)", "40.0 ± 7.1 (5)"],
    ]
    assert shown.bold == {(i, 3) for i in range(4)}


def test_what_was_never_run_is_blank_and_one_run_has_no_deviation(load, record_of):
    sweep = load(SELECT)
    found = [record_of(sweep.tuning(sweep.cells()[0])[0], 0.2)]
    shown = tried.grid(sweep, report.build(sweep, found), found)
    assert [cell.text for cell in shown.rows[0]] == ["attention", "d_model=16", "20.0 (1)", ""]
    assert not shown.bold


def test_rows_that_say_all_need_no_second_name(load, record_of):
    sweep = load(SELECT, "sweep.grid.model.d_model=[16]", "report.columns=null")
    found = [record_of(run, 0.2) for run in sweep.reported(sweep.cells()[0], {"train.lr": 0.01})]
    shown = tried.grid(sweep, report.build(sweep, found), found)
    assert (shown.left, shown.bold) == (1, {(0, 2)})
    assert [head[-1] for head in shown.heads] == ["mixer", "lr=0.001", "lr=0.01"]
    assert [cell.text for cell in shown.rows[0]] == ["attention", "", "20.0 ± 0.0 (3)"]


def test_a_sweep_without_selection_has_nothing_to_show(load, record_of):
    sweep = load()
    found = [record_of(run, 0.2) for run in sweep.reported(sweep.cells()[0])]
    with pytest.raises(UserError, match="has none"):
        tried.grid(sweep, report.build(sweep, found), found)
