"""Tables from records made by hand; the numbers in the expected texts were worked out by hand too.

mamba2: .46 .44 .50 .47 .43 has mean .46 and squared deviations 0 4 16 1 9 (e-4), so std = sqrt(30e-4 / 4) = .0274.
linear_attention without seed 3: .20 .21 .19 .20 has mean .20 and std = sqrt(2e-4 / 3) = .0082.
"""

import csv
import io
import json
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from mixassay.errors import UserError
from mixassay.record import RunRecord
from mixassay.runners import export, render, report
from mixassay.runners.labels import heads
from mixassay.runners.report import Table
from mixassay.runners.tolerance import BY_TORCH, ERROR, LAST
from mixassay.sweep import Sweep

YAML = """
version: 1
name: demo
task: {name: mqar, seq_len: 64, num_kv: 8}
train: {steps: 10, lr: 0.003}
sweep: {grid: {mixer: [attention, mamba2, linear_attention]}}
seeds: [0, 1, 2, 3, 4]
"""
VALUES = {
    "attention": [1.0, 1.0, 1.0, 1.0, 1.0],
    "mamba2": [0.46, 0.44, 0.50, 0.47, 0.43],
    "linear_attention": [0.20, 0.21, 0.19, None, 0.20],
}


@pytest.fixture
def load(tmp_path) -> Callable[..., Sweep]:
    def load(*overrides: str) -> Sweep:
        (tmp_path / "demo.yaml").write_text(YAML)
        return Sweep.load(tmp_path / "demo.yaml", overrides)

    return load


@pytest.fixture
def records(load, record_of) -> list[RunRecord]:
    sweep = load()
    return [
        record_of(run, value)
        for cell in sweep.cells()
        for run, value in zip(sweep.reported(cell), VALUES[cell.sections.mixer.name], strict=True)
    ]


def text(table: Table, row: str, column: tuple[str, ...] = ()) -> str:
    """The number of one cell with its mark."""
    shown = render.grid(table)
    line = next(cells for cells in shown.rows if cells[0].text == row)
    cell = line[1 + table.columns.index(column)]
    return f"{cell.text} {cell.mark}".strip()


CAPTION = [
    "test/accuracy: mean ± sample std (ddof=1) over n=5 seeds (0-4), in points.",
    "solved: seeds at 0.99 or above, of those with an outcome.",
    "k/n: only k of n seeds have a number, and mean, std and min are over these k.",
    "Learning rate fixed by the configuration at 0.003.",
    "Code aaaaaaaaaaaa; data mqar/1; on cpu, torch 2.13.",
    "Bold: better than every other complete row, by the 95 % interval (Welch) of the difference.",
]


def test_markdown(load, records):
    shown = render.markdown(render.grid(report.build(load(), records)))
    assert shown.splitlines() == [
        "**demo**",
        "",
        "| mixer | test/accuracy | n | min | solved | state bytes at T=64 | parameters | s/run |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        "| attention | **100.0 ± 0.0** | 5 | 100.0 | 5/5 | 8,192 | 12,345 | 2.5 |",
        "| mamba2 | 46.0 ± 2.7 | 5 | 43.0 | 0/5 | 8,192 | 12,345 | 2.5 |",
        "| linear_attention | 20.0 ± 0.8 (4/5, 1 diverged) | 4 | 19.0 | 0/5 | 8,192 | 12,345 | 2.5 |",
        "",
        *(f"- {line}" for line in CAPTION),
    ]


def test_the_live_part_of_a_state_is_shown_where_it_is_less(load, record_of):
    runs = list(load().reported(load().cells()[0]))
    found = [record_of(run, 1.0, live_state_bytes={"16": 1000, "64": 2048}) for run in runs]
    assert render.grid(report.build(load(), found)).rows[0][5].text == "8,192 (2,048 live)"
    found = [record_of(run, 1.0, live_state_bytes={"16": 1000}) for run in runs]
    assert render.grid(report.build(load(), found)).rows[0][5].text == "8,192"


def test_latex(load, records):
    shown = render.latex(render.grid(report.build(load(), records)))
    lines = shown.splitlines()
    assert lines[:2] == [r"\begin{table}", r"\centering"]
    caption = " ".join(CAPTION).replace("±", r"$\pm$").replace("%", r"\%")
    assert lines[2] == rf"\caption{{demo. {caption}}}"
    assert lines[3:] == [
        r"\begin{tabular}{lrrrrrrr}",
        r"\toprule",
        r"mixer & test/accuracy & n & min & solved & state bytes at T=64 & parameters & s/run \\",
        r"\midrule",
        r"attention & \textbf{100.0 $\pm$ 0.0} & 5 & 100.0 & 5/5 & 8,192 & 12,345 & 2.5 \\",
        r"mamba2 & 46.0 $\pm$ 2.7 & 5 & 43.0 & 0/5 & 8,192 & 12,345 & 2.5 \\",
        r"linear\_attention & 20.0 $\pm$ 0.8 (4/5, 1 diverged) & 4 & 19.0 & 0/5 & 8,192 & 12,345 & 2.5 \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]


def test_csv_has_every_seed_at_full_precision(load, records):
    lines = list(csv.DictReader(io.StringIO(export.to_csv(report.build(load(), records)))))
    assert len(lines) == 15
    assert [line["value"] for line in lines[5:10]] == ["0.46", "0.44", "0.5", "0.47", "0.43"]
    assert float(lines[5]["std"]) == pytest.approx((30e-4 / 4) ** 0.5, rel=1e-12)
    lost = lines[13]
    assert (lost["mixer"], lost["seed"], lost["status"], lost["value"]) == ("linear_attention", "3", "diverged", "")
    assert (lost["n"], lost["seeds"], lost["solved"]) == ("4", "5", "0")


def test_json(load, records):
    data = json.loads(export.to_json(report.build(load(), records[:-1])))
    assert data["std"] == "sample, ddof=1"
    assert data["caption"] == CAPTION[:-1]
    last = data["cells"][-1]
    assert (last["mixer"], last["n"], last["seeds"], last["ended"]) == ("linear_attention", 3, 5, {"diverged": 1})
    assert [run["status"] for run in last["runs"]] == ["ok", "ok", "ok", "diverged", "missing"]
    assert last["runs"][4] == {"seed": 4, "status": "missing", "value": None}
    assert last["mean"] == pytest.approx(0.2)


def test_the_terminal_shows_all_of_a_table_at_any_width(load, records):
    shown = render.grid(report.build(load(), records))
    for width in (200, 80, 40):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(render.rich(shown, width))
        said = console.export_text()
        assert max(len(line.rstrip()) for line in said.splitlines()) <= width
        words = ("100.0 ± 0.0", "linear_attention", "1 diverged", "solved", "state bytes", "12,345", "sample std")
        assert [word for word in words if word not in said] == []


def test_the_terminal_folds_names_and_cuts_no_number():
    """Two columns of names that are wider together than the terminal."""
    names = ("niah_multikey_1", "log_linear_mamba2 d_state=16 head_dim=32 levels=11 conv=4 and more of it")
    cells = (*map(render.Cell, names), render.Cell("100.0 (se 12.5)", small=("n=3x50",)))
    grid = render.Grid("t", (("task",), ("model",), ("samples=[recall]",)), (cells,), 2, frozenset(), (), ())
    for width in (120, 80, 60):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(render.rich(grid, width))
        said = console.export_text()
        assert max(len(line.rstrip()) for line in said.splitlines()) <= width
        assert "…" not in said
        assert "100.0 (se 12.5)" in said
        assert "n=3x50" in said
        assert all(word in said for word in (*names[1].split(), "samples=[recall]")), "brackets are no markup"


def test_what_is_missing_or_failed_is_counted_where_the_number_stands(load, record_of):
    sweep = load()
    first, second, third = (sweep.reported(cell) for cell in sweep.cells())
    found = [
        record_of(first[0], 0.5),
        record_of(first[1], 0.6),
        record_of(first[2], None, status="oom"),
        *(record_of(run, None) for run in second),
    ]
    table = report.build(sweep, found)
    assert text(table, "attention") == "55.0 ± 7.1 (2/5, 1 oom)"
    assert text(table, "mamba2") == "– (0/5, 5 diverged)"
    assert text(table, "linear_attention") == "– (0/5)"
    solved = [cells[4].text for cells in render.grid(table).rows]
    assert solved == ["0/2", "0/5", "–"], "diverged seeds did not solve; missing ones have no outcome"
    one = report.build(load("seeds=[0]"), found)
    assert text(one, "attention") == "50.0 (n=1)"
    assert third


def test_a_value_that_was_not_finite_is_no_number(load, record_of):
    sweep = load()
    runs = sweep.reported(sweep.cells()[0])
    found = [record_of(run, 0.5, metrics={"test/accuracy": 0.5, "test/loss": float("nan")}) for run in runs]
    assert text(report.build(load("report.metric=test/loss"), found), "attention") == "– (0/5, 5 without value)"


def test_losses_are_not_points_and_their_worst_is_the_largest(load, records):
    shown = render.grid(report.build(load("report.metric=test/loss"), records))
    assert [head[0] for head in shown.heads[:5]] == ["mixer", "test/loss", "n", "max", "state bytes"]
    assert [cell.text for cell in shown.rows[0][:4]] == ["attention", "0.120 ± 0.016", "5", "0.140"]
    assert shown.bold == frozenset()


def test_a_metric_that_nobody_measured_is_an_error(load, records):
    with pytest.raises(UserError, match=r'no record holds the metric "valid/loss"'):
        report.build(load("report.metric=valid/loss"), records)


def test_versions_of_the_code_are_never_mixed(load, record_of):
    sweep = load()
    cell = sweep.cells()[0]
    runs = sweep.reported(cell)

    def made(source: str, minute: int, accuracy: float, seeds: int = 5, **fields: Any) -> list[RunRecord]:
        code = {"commit": source * 20, "dirty": False, "patch": None, "source": source, "version": "0.1.0"}
        time = {"start": f"2026-01-01T00:{minute:02d}:00Z", "seconds": 1}
        return [record_of(run, accuracy + run.seed / 100, code=code, time=time, **fields) for run in runs[:seeds]]

    old, new, part = made("aa", 1, 0.1), made("bb", 2, 0.5), made("cc", 3, 0.8, seeds=2)

    def shown(found: list[RunRecord], current: str | None) -> str:
        sources = {cell.cell: current} if current else None
        return text(report.build(sweep, found, sources=sources), "attention")

    assert shown(old + new, None) == "52.0 ± 1.6", "the most recent"
    assert shown(new + old, "aa") == "12.0 ± 1.6", "the present code where it is complete"
    assert shown(old + new + part, "cc") == "80.5 ± 0.7 (2/5)", "not filled up from other code"
    assert shown(old + new, "zz") == "52.0 ± 1.6"
    table = report.build(sweep, old + new, sources={cell.cell: "zz"})
    assert "All by older code than the present." in table.caption
    other = sweep.cells()[1]
    present = [record_of(run, 0.3, code=new[0].code.model_dump() | {"source": "zz"}) for run in sweep.reported(other)]
    table = report.build(sweep, old + new + present, sources={cell.cell: "zz", other.cell: "zz"})
    assert text(table, "attention") == "52.0 ± 1.6†"
    assert text(table, "mamba2") == "30.0 ± 0.0"
    assert any(line.startswith("†") and "mixer=attention" in line for line in table.caption)

    gpu: dict[str, Any] = {"env": {"id": "1", "class": "NVIDIA H200, torch 2.13"}}
    mixed = made("aa", 1, 0.1, seeds=3) + made("aa", 2, 0.6, **gpu)
    table = report.build(sweep, mixed)
    assert text(table, "attention") == "62.0 ± 1.6"
    assert any("3 run(s) on another machine" in warning for warning in table.warnings)
    table = report.build(sweep, made("aa", 1, 0.1) + made("aa", 2, 0.6, data="mqar/2"))
    assert text(table, "attention") == "62.0 ± 1.6"


def test_cells_on_different_machines_or_data_are_told(load, records):
    moved = [
        r.model_copy(update={"data": "mqar/2", "env": {"id": "1", "class": "NVIDIA H200, torch 2.13"}})
        if r.axes["mixer"] == "mamba2"
        else r
        for r in records
    ]
    warnings = " ".join(report.build(load(), moved).warnings)
    assert "different data versions: mqar/1; mqar/2" in warnings
    assert "different kinds of machine: NVIDIA H200, torch 2.13; cpu, torch 2.13" in warnings
    assert report.build(load(), records).warnings == ()


def test_seeds_that_drive_nothing_are_told(load, record_of):
    sweep = load()
    first, second, _ = (sweep.reported(cell) for cell in sweep.cells())
    same = [record_of(run, 0.5, metrics={"test/accuracy": 0.5, "test/loss": 0.25}) for run in first]
    full = [record_of(run, 1.0, metrics={"test/accuracy": 1.0, "test/loss": 0.0}) for run in second]
    (warning,) = report.build(sweep, same + full).warnings
    assert "mixer=attention: all 5 seeds gave bit-equal numbers" in warning


def test_a_first_gradient_that_rounding_does_not_explain_is_told(load, record_of):
    sweep = load()
    found = []
    for cell, off in zip(sweep.cells(), (9e-4, 0.011, 0.3), strict=True):
        for i, run in enumerate(sweep.reported(cell)):
            metrics = {"test/accuracy": i / 10, "train/first_gradient_error": off if i == 3 else 1e-6}
            found.append(record_of(run, i / 10, metrics=metrics))
    mamba2, linear = report.build(sweep, found).warnings
    assert mamba2 == "mixer=mamba2: the first gradient was 1.1% off float32's, more than its precision explains"
    assert linear.startswith("mixer=linear_attention: the first gradient was 30.0% off")


@pytest.mark.parametrize(
    ("by_torch", "told"),
    [
        (0.08, "8.0% off, so it is the precision and no kernel"),
        (0.01, "1.0% off: a kernel may be wrong, please report it"),
    ],
)
def test_it_says_whether_the_precision_or_a_kernel_explains_it(by_torch, told, load, record_of):
    sweep = load("train.precision=bf16")
    runs = sweep.reported(next(iter(sweep.cells())))
    offs = [{ERROR: 0.01}, {ERROR: 0.11, BY_TORCH: 0.5}, {ERROR: 0.12, BY_TORCH: by_torch}, {}, {}]
    found = [
        record_of(run, run.seed / 9, metrics={"test/accuracy": run.seed / 9} | off)
        for run, off in zip(runs, offs, strict=True)
    ]
    (warning,) = report.build(sweep, found).warnings
    assert warning == (
        "mixer=attention: the first gradient was 12.0% off float32's, more than its precision explains; "
        f"rounding takes torch's own operators {told}"
    )


def test_behind_the_training_only_a_kernel_is_news(load, record_of):
    sweep = load("train.precision=bf16")
    for by_torch, told in ((0.08, 0), (0.01, 1)):
        runs = sweep.reported(next(iter(sweep.cells())))
        last = {LAST[ERROR]: 0.12, LAST[BY_TORCH]: by_torch}
        found = [record_of(run, run.seed / 9, metrics={"test/accuracy": run.seed / 9} | last) for run in runs]
        warnings = report.build(sweep, found).warnings
        assert len(warnings) == told
        assert all("the gradient behind the training was 12.0% off" in warning for warning in warnings)


SELECT = "sweep.select={axes: {train.lr: [1e-3, 1e-2]}, seeds: [100, 101]}"


def test_tuned_values_the_rule_and_unequal_grids_are_told(load, record_of):
    sweep = load(SELECT)
    found = []
    for cell, lr in zip(sweep.cells(), (0.01, 0.001, 0.01), strict=True):
        found += [record_of(run, 0.3 + run.seed / 100) for run in sweep.reported(cell, {"train.lr": lr})]
        found += [record_of(run, 0.2) for run in sweep.tuning(cell)]
    table = report.build(sweep, found)
    assert table.warnings == ()
    assert (
        "Chosen for each cell on valid/accuracy with tuning seeds 100-101, then frozen: train.lr of 2 values."
        in table.caption
    )
    shown = render.grid(table)
    assert shown.heads[-1] == ("lr",)
    assert [cells[-1].text for cells in shown.rows] == ["0.01", "0.001", "0.01"]
    assert text(table, "mamba2") == "32.0 ± 1.6", "tuning runs are not in the mean"
    less = [r for r in found if not (r.role == "tune" and r.axes["mixer"] == "mamba2" and r.tuned["train.lr"] == 0.01)]
    (warning,) = report.build(sweep, less).warnings
    assert "grids of different size" in warning
    assert "mixer=mamba2: 1" in warning


def test_a_setting_that_nothing_chose_is_told(load, record_of):
    sweep = load(SELECT)
    found = []
    for cell in sweep.cells():
        found += [record_of(run, 0.3 + run.seed / 100) for run in sweep.reported(cell, {"train.lr": 0.01})]
        lost = "mamba2" in str(cell)
        found += [record_of(run, 0.2, status="diverged" if lost else "ok") for run in sweep.tuning(cell)]
    (warning,) = report.build(sweep, found).warnings
    assert warning == "no setting was chosen, since tuning runs diverged with all of them: mixer=mamba2"


def test_a_choice_by_fewer_tuning_seeds_than_the_file_has_now_is_told(load, record_of):
    sweep = load(SELECT)
    one, *_ = sweep.cells()
    found = []
    for cell in sweep.cells():
        found += [record_of(run, 0.3 + run.seed / 100) for run in sweep.reported(cell, {"train.lr": 0.01})]
        found += [record_of(run, 0.2) for run in sweep.tuning(cell) if run.seed == 100 or cell is not one]
    (warning,) = report.build(sweep, found).warnings
    assert warning == f"chosen with tuning seeds 100, not 100-101 as the file has it now: {one}"


@pytest.mark.parametrize(
    ("by", "chosen", "other", "close"),
    [  # deviations of two runs that are 2 d apart: d sqrt 2; of the difference of two means of two: d sqrt 2
        ("valid/accuracy", (0.50, 0.60), (0.44, 0.54), True),  # 0.06 behind, at an error of 0.0707
        ("valid/accuracy", (0.50, 0.60), (0.42, 0.52), False),
        ("valid/accuracy", (0.99, 1.00), (0.98, 1.01), True),  # the reported seeds do not solve the task
        ("valid/loss", (0.50, 0.60), (0.56, 0.66), True),
        ("valid/loss", (0.50, 0.60), (0.40, 0.50), True),
        ("valid/loss", (0.50, 0.60), (0.58, 0.68), False),
    ],
)
def test_close_calls_of_a_choice_are_counted(load, record_of, by, chosen, other, close):
    sweep = load(f"sweep.select={{axes: {{train.lr: [1e-3, 1e-2]}}, seeds: [100, 101], by: {by}}}")
    found, cell = [], sweep.cells()[0]
    for run in sweep.tuning(cell):
        value = (other if run.tuned["train.lr"] == 0.001 else chosen)[run.seed - 100]
        found.append(record_of(run, 0.0, metrics={by: value}))
    found += [record_of(run, 0.3 + run.seed / 100) for run in sweep.reported(cell, {"train.lr": 0.01})]
    told = [line for line in report.build(sweep, found).caption if "standard error" in line]
    told_once = (
        "In 1 of 1 cells another value was within a standard error of the chosen one: "
        "other tuning seeds might choose otherwise."
    )
    assert told == [told_once] * close
    lost = [r.model_copy(update={"status": "diverged"}) if r.tuned.get("train.lr") == 0.001 else r for r in found]
    assert not [line for line in report.build(sweep, lost).caption if "standard error" in line]
    solved = [r.model_copy(update={"metrics": {"test/accuracy": 1.0}}) if r.role == "report" else r for r in found]
    assert not [line for line in report.build(sweep, solved).caption if "standard error" in line]


def test_close_calls_take_of_each_tuning_seed_the_newest_run(load, record_of):
    sweep = load(SELECT)
    cell = sweep.cells()[0]

    def tuned(hour, chosen, other, status="ok"):
        time = {"start": f"2026-01-01T{hour:02}:00:00Z", "seconds": 1.0}
        for run in sweep.tuning(cell):
            value = (other if run.tuned["train.lr"] == 0.001 else chosen)[run.seed - 100]
            yield record_of(run, 0.0, metrics={"valid/accuracy": value}, status=status, time=time)

    def told(*tuning):
        caption = report.build(sweep, [*tuning, *reported]).caption
        return [line for line in caption if "standard error" in line]

    reported = [record_of(run, 0.3 + run.seed / 100) for run in sweep.reported(cell, {"train.lr": 0.01})]
    close, clear = ((0.50, 0.60), (0.44, 0.54)), ((0.50, 0.60), (0.20, 0.30))
    assert told(*tuned(1, *close, status="diverged"), *tuned(2, *close)), "older code was wrong"
    assert not told(*tuned(1, *close), *tuned(2, *clear))
    assert told(*tuned(2, *close), *tuned(1, *clear)), "in whatever order they are stored"


def test_runs_with_the_chosen_settings_stand_before_newer_ones_and_others_are_told(load, record_of):
    sweep = load(SELECT)
    cell = sweep.cells()[0]

    def runs(lr, value, hour):
        time = {"start": f"2026-01-01T{hour:02}:00:00Z", "seconds": 1.0}
        return [record_of(run, value, time=time) for run in sweep.reported(cell, {"train.lr": lr})]

    found = [*runs(0.001, 0.3, hour=1), *runs(0.01, 0.4, hour=2)]
    mean = {None: 0.4, 0.001: 0.3, 0.01: 0.4}
    for lr, value in mean.items():
        chosen = {cell.cell: {"train.lr": lr}} if lr is not None else {}
        table = report.build(sweep, found, chosen=chosen)
        shown = [entry for entry in table.entries.values() if entry.runs.cell == cell]
        assert [set(entry.values.values()) for entry in shown] == [{value}]
        assert not [warning for warning in table.warnings if "chosen now" in warning]
    *_, warning = report.build(sweep, found, chosen={cell.cell: {"train.lr": 0.1}}).warnings
    assert warning == f"{cell}: trained with lr=0.01, where lr=0.1 is chosen now; run the sweep to go on"


def test_a_choice_at_an_end_of_the_values_is_told(load, record_of):
    """attention is there too, and solves the task; linear_attention is in the middle."""
    sweep = load("sweep.select={axes: {train.lr: [1e-3, 1e-2, 1e-1]}, seeds: [100]}")
    found = []
    for cell, lr, value in zip(sweep.cells(), (0.1, 0.001, 0.01), (0.995, 0.3, 0.2), strict=True):
        found += [record_of(run, value) for run in sweep.reported(cell, {"train.lr": lr})]
    told = [line for line in report.build(sweep, found).caption if "may lie beyond" in line]
    assert told == ["train.lr is at an end of its values, and a better one may lie beyond: mixer=mamba2."]


def test_heads_that_are_too_long_go_without_what_is_not_needed():
    short = [{"seq_len": 64, "num_kv": 4}, {"seq_len": 128, "num_kv": 8}]
    assert heads(short) == ["seq_len=64 num_kv=4", "seq_len=128 num_kv=8"]
    of = {"loss": "answers", "rows_of": "samples"}
    cells = [
        {"seq_len": 4096, "loss": "all", "samples": [], "rows_of": "text"},
        {"seq_len": 4096, "samples": ["niah_single_1"], **of},
        {"seq_len": 1024, "samples": ["niah_single_1"], **of},
        {"seq_len": 1024, "samples": ["recall"], **of},
    ]
    assert heads(cells) == [
        "seq_len=4096 samples=[]",
        "seq_len=4096 samples=[niah_single_1]",
        "seq_len=1024 samples=[niah_single_1]",
        "seq_len=1024 samples=[recall]",
    ]
    assert heads([{"a": "x" * 50}, {"a": "x" * 50}]) == [f"a={'x' * 50}"] * 2
    assert heads([]) == []


def test_swept_paths_are_columns_and_the_rest_is_small_print(load, record_of):
    sweep = load("sweep.grid.mixer=[attention, mamba2]", "sweep.grid.model.d_model=[16, 32]")
    found = []
    for cell in sweep.cells():
        offset = (0.2 if cell.sections.mixer.name == "mamba2" else 0) + cell.sections.model.d_model / 100
        state = {"64": 64 * cell.sections.model.d_model}
        found += [record_of(run, offset + run.seed / 100, state_bytes=state) for run in sweep.reported(cell)]
    table = report.build(sweep, found)
    assert table.columns == (("d_model=16",), ("d_model=32",))
    shown = render.grid(table)
    assert shown.rows[0][1] == render.Cell("18.0 ± 1.6", "", ("min 16.0", "solved 0/5"))
    assert shown.rows[1][2].text == "54.0 ± 1.6"
    assert shown.rows[0][3].text == "1,024 / 2,048"
    assert shown.bold == {(1, 1), (1, 2)}
    assert render.markdown(shown).splitlines()[4].startswith("| attention | 18.0 ± 1.6<br>min 16.0<br>solved 0/5 | ")


def test_evaluation_cells_are_columns_when_asked_for(load, record_of):
    sweep = load(
        "sweep.grid.mixer=[mamba2]", "task.eval_cells=[{num_kv: 4}, {num_kv: 8}]", "report.columns=[task.num_kv]"
    )
    (cell,) = sweep.cells()
    found = []
    for run, (easy, hard) in zip(sweep.reported(cell), [(0.9, 0.1), (1.0, 0.2)], strict=False):
        parts = [
            {"split": split, "cell": {"num_kv": k}, "rows": 10, "scored": 40, "accuracy": value, "loss": 0.5}
            for split, k, value in [("valid", 4, 0.0), ("valid", 8, 0.0), ("test", 4, easy), ("test", 8, hard)]
        ]
        found.append(record_of(run, (easy + hard) / 2, eval=parts))
    table = report.build(sweep, found)
    assert table.columns == (("mean",), ("num_kv=4",), ("num_kv=8",))
    assert [text(table, "mamba2", column) for column in table.columns] == [
        "55.0 ± 7.1 (2/5)",
        "95.0 ± 7.1 (2/5)",
        "15.0 ± 7.1 (2/5)",
    ]
    assert "Each seed's value is its mean over 2 evaluation cells." in table.caption


def test_mixers_are_told_apart_by_the_arguments_in_which_they_differ(load, record_of):
    sweep = load("sweep.grid.mixer=[attention, {name: attention, window: 16}]")
    found = [record_of(run, 0.5 + run.seed / 100) for cell in sweep.cells() for run in sweep.reported(cell)]
    assert report.build(sweep, found).rows == (("attention",), ("attention window=16",))


def test_bold_needs_a_clear_difference_to_all_others(load, record_of):
    sweep = load()
    first, second, third = (sweep.reported(cell) for cell in sweep.cells())
    clear = [record_of(run, 0.90 + run.seed / 100) for run in first]
    below = [record_of(run, 0.60 + run.seed / 100) for run in second]
    noisy = [record_of(run, [0.1, 1.0, 0.9, 1.0, 0.9][run.seed]) for run in third]
    assert render.grid(report.build(sweep, clear + below)).bold == {(0, 1)}
    assert render.grid(report.build(sweep, clear + below + noisy)).bold == frozenset()


def test_latex_compiles(load, records, tmp_path):
    pdflatex = shutil.which("pdflatex")
    if pdflatex is None:
        pytest.skip("pdflatex is not installed")
    table = report.build(load("report.title='every sign: 100 % of a_b & {c} # $ ~ ^ \\ <>±≥≤†–−µ'"), records)
    body = render.latex(render.grid(table))
    (tmp_path / "x.tex").write_text(
        "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\n" + body + "\\end{document}\n"
    )
    done = subprocess.run(
        [pdflatex, "-interaction=nonstopmode", "-halt-on-error", "x.tex"], cwd=tmp_path, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stdout[-1500:].decode(errors="replace")
    assert (tmp_path / "x.pdf").stat().st_size > 1000
