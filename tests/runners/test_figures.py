"""Figures from records made by hand: every seed is a dot at its own value, and what is missing shows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mixassay.errors import UserError
from mixassay.record import RunRecord
from mixassay.runners import figures, report
from mixassay.runners.axes import Axis, bytes_axis, linear_axis, value_axis
from mixassay.runners.figures import figure, front
from mixassay.runners.marks import KINDS, Heatmap, Kind, Panel, Series
from mixassay.runners.plot import plot
from mixassay.runners.report import Table
from mixassay.sweep import Cell, Sweep

WIDTHS = """
version: 1
name: widths
task: {name: mqar, vocab_size: 512, seq_len: 256, num_kv: 4}
train: {steps: 10}
sweep:
  grid: {mixer: [attention, mamba2], model.d_model: [16, 32]}
  zip: {size: [{task.num_kv: 4, train.batch_size: 16}, {task.num_kv: 8, train.batch_size: 8}]}
seeds: [0, 1, 2]
report: {columns: [task.num_kv, model.d_model]}
"""
CROSSED = """
version: 1
name: crossed
task:
  name: mqar
  vocab_size: 512
  seq_len: 64
  num_kv: 4
  eval_cells:
    - {seq_len: 64, num_kv: 4}
    - {seq_len: 64, num_kv: 8}
    - {seq_len: 128, num_kv: 4}
    - {seq_len: 128, num_kv: 8}
train: {steps: 10}
sweep: {grid: {mixer: [attention, mamba2]}}
seeds: [0, 1, 2]
"""
Make = Callable[..., RunRecord]


def sweep_of(folder: Path, text: str) -> Sweep:
    (folder / "sweep.yaml").write_text(text)
    return Sweep.load(folder / "sweep.yaml")


@pytest.fixture
def widths(tmp_path: Path, record_of: Make) -> Table:
    """attention at .9, mamba2 at .5, + seed/100; mamba2 with 8 pairs at width 32 has one seed, and one diverged."""
    sweep, found = sweep_of(tmp_path, WIDTHS), []
    for cell in sweep.cells():
        sections = cell.sections
        level = 0.9 if sections.mixer.name == "attention" else 0.5
        state = {"16": 1, "64": sections.model.d_model * (64 if level == 0.9 else 32)}
        for run in sweep.reported(cell):
            curve = {"step": (5, 10), "valid/accuracy": (0.1, level), "train/loss": (2.0, 1.0)}
            hard = sections.model.d_model == 32 and sections.task.args["num_kv"] == 8 and level == 0.5
            if hard and run.seed == 1:
                found.append(record_of(run, None, curve={"step": (5, 10), "valid/accuracy": (0.1, None)}))
            elif not (hard and run.seed == 2):
                found.append(record_of(run, level + run.seed / 100, state_bytes=state, curve=curve))
    return report.build(sweep, found)


def by_name(panel: Panel | Heatmap, name: str) -> Series:
    assert isinstance(panel, Panel)
    return next(series for series in panel.series if series.name == name)


def test_the_metric_stands_against_the_first_numeric_column(widths: Table) -> None:
    drawn = figure(widths, "metric")
    assert [panel.title for panel in drawn.panels] == ["d_model=16", "d_model=32"], "batch_size follows from num_kv"
    mamba = by_name(drawn.panels[1], "mamba2")
    assert [(dot.x, dot.y, dot.seed) for dot in mamba.dots] == [(4, 50, 0), (4, 51, 1), (4, 52, 2), (8, 50, 0)]
    assert [(mean.x, mean.y, mean.complete) for mean in mamba.means] == [(4, 51, True), (8, 50, False)]
    assert mamba.joined
    assert drawn.notes == (figures.SEEDS, figures.HOLLOW)
    aside = {series.name: {dot.dx for dot in series.dots} for series in drawn.panels[0].series}  # type: ignore[union-attr]
    assert aside == {"attention": {-0.007}, "mamba2": {0.007}}, "they share each x"


def test_without_a_numeric_column_rows_stand_under_each_other(tmp_path: Path, record_of: Make) -> None:
    sweep = sweep_of(tmp_path, CROSSED.split("  eval_cells")[0] + "train:" + CROSSED.split("train:")[1])
    found = [
        record_of(run, v)
        for cell in sweep.cells()
        for run, v in zip(sweep.reported(cell), (0.2, 0.4, 0.9), strict=True)
    ]
    (panel,) = figure(report.build(sweep, found), "metric").panels
    assert isinstance(panel, Panel)
    assert panel.bars
    assert [text for _, text in panel.y.ticks] == ["attention", "mamba2"]
    mamba = by_name(panel, "mamba2")
    assert [(dot.x, dot.y) for dot in mamba.dots] == [(20, 1), (40, 1), (90, 1)]
    assert len({dot.dy for dot in mamba.dots}) == 3
    assert mamba.means[0].x == pytest.approx(50)
    assert panel.y.place(0) > panel.y.place(1), "from the top"


def test_state_is_that_after_the_longest_sequence(widths: Table) -> None:
    easy, hard = figure(widths, "state").panels
    assert isinstance(hard, Panel)
    assert (easy.title, hard.title, hard.x.label) == ("num_kv=4", "num_kv=8", "state bytes at T=64")
    assert [(mean.x, mean.y) for mean in by_name(hard, "attention").means] == [(1024, 91), (2048, 91)]
    assert [(mean.x, mean.complete) for mean in by_name(hard, "mamba2").means] == [(512, True), (1024, False)]
    assert hard.front == ((512, 51), (1024, 91)), "incomplete cells are not in it"


def test_every_seed_of_the_tables_own_numbers(crossed: Table) -> None:
    (panel,) = figure(crossed, "seeds").panels
    assert isinstance(panel, Panel)
    assert panel.bars
    assert [text for _, text in panel.y.ticks] == ["attention", "mamba2"]
    assert [(dot.x, dot.y, dot.where) for dot in by_name(panel, "mamba2").dots] == [(50.0, 1, "")] * 2
    assert [(mean.x, mean.complete) for mean in by_name(panel, "mamba2").means] == [(50.0, False)]


def test_the_front() -> None:
    assert front([(4, 0.5), (2, 0.6), (8, 0.6), (8, 0.9), (2, 0.1)]) == ((2, 0.6), (8, 0.9))
    assert front([(4, 0.5), (2, 0.6)], higher_is_better=False) == ((2, 0.6), (4, 0.5))
    assert front([]) == ()


def test_curves_are_those_of_validation_one_for_each_seed(widths: Table) -> None:
    drawn = figure(widths, "curves")
    assert len(drawn.panels) == 8
    last = drawn.panels[-1]
    assert last.title == "mamba2, num_kv=8, d_model=32"
    first, second = by_name(last, "mamba2").curves
    assert (first.points, first.seed, first.ended) == (((5, 10.0), (10, 50.0)), 0, True)
    assert (second.points, second.seed, second.ended) == (((5, 10.0),), 1, False), "no point where there is no number"
    assert any("diverged" in note for note in drawn.notes)
    assert isinstance(last, Panel)
    assert last.y.label == "valid/accuracy, points"


def evaluated(run: Any, cell: Cell) -> tuple[dict[str, Any], ...]:
    """Accuracies that say where they were measured: .64 at T=64 with 4 pairs .. + 8/1000 for 8 pairs, + seed/10."""
    return tuple(
        {"split": split, "cell": at, "rows": 10, "scored": 40, "loss": 0.5}
        | {"accuracy": at["seq_len"] / 1000 + (at["num_kv"] == 8) * 0.008 + run.seed / 10 if split == "test" else 0.0}
        for split in ("valid", "test")
        for at in cell.sections.task.eval_cells
    )


@pytest.fixture
def crossed(tmp_path: Path, record_of: Make) -> Table:
    """mamba2 lacks its seed 2."""
    sweep = sweep_of(tmp_path, CROSSED)
    return report.build(
        sweep,
        [
            record_of(run, 0.5, eval=evaluated(run, cell))
            for cell in sweep.cells()
            for run in sweep.reported(cell)
            if not (cell.sections.mixer.name == "mamba2" and run.seed == 2)
        ],
    )


def test_a_heatmap_holds_mean_deviation_and_count_of_every_evaluation_cell(crossed: Table) -> None:
    attention, mamba = figure(crossed, "heatmap").panels
    assert isinstance(attention, Heatmap)
    assert isinstance(mamba, Heatmap)
    assert (attention.title, attention.x, attention.columns) == ("attention", "seq_len", (64, 128))
    assert (attention.y, attention.rows) == ("num_kv", (4, 8))
    shade = attention.shades[128, 8]  # .136 .236 .336
    assert shade.moments is not None
    assert shade.moments.mean == pytest.approx(23.6)
    assert shade.moments.std == pytest.approx(10.0)
    assert (shade.text, shade.count, shade.fraction) == ("23.6", "n=3", pytest.approx(0.236))
    assert (mamba.shades[64, 4].text, mamba.shades[64, 4].count) == ("11.4", "2/3")


def test_a_heatmap_of_columns(widths: Table) -> None:
    attention, mamba = figure(widths, "heatmap").panels
    assert isinstance(mamba, Heatmap)
    assert (attention.x, attention.y, mamba.columns, mamba.rows) == ("num_kv", "d_model", (4, 8), (16, 32))
    assert (mamba.shades[8, 32].text, mamba.shades[8, 32].count) == ("50.0", "1/3")


def test_evaluation_cells_are_the_axis_where_no_column_is(crossed: Table) -> None:
    first, second = figure(crossed, "metric").panels
    assert (first.title, second.title) == ("num_kv=4", "num_kv=8")
    dots = by_name(second, "mamba2").dots
    assert [(dot.x, dot.seed, pytest.approx(dot.y)) for dot in dots] == [
        (64, 0, 7.2),
        (64, 1, 17.2),
        (128, 0, 13.6),
        (128, 1, 23.6),
    ]
    assert dots[0].where == "seq_len=64 num_kv=8: 7.2"


def test_what_a_table_cannot_show_is_said(tmp_path: Path, record_of: Make) -> None:
    sweep = sweep_of(tmp_path, WIDTHS.replace("model.d_model: [16, 32]", "model.d_model: [16]"))
    runs = [run for cell in sweep.cells() for run in sweep.reported(cell)]
    table = report.build(sweep, [record_of(run, 0.5, state_bytes={}) for run in runs])
    for kind, message in (("state", "bytes of state"), ("curves", "learning curve"), ("heatmap", "two numeric axes")):
        with pytest.raises(UserError, match=message):
            figure(table, kind)  # type: ignore[arg-type]
    assert [drawn.kind for drawn in figures.figures(table)] == ["metric"]
    lost = report.build(sweep, [record_of(run, None, state_bytes={}) for run in runs])
    assert figures.figures(lost) == []


def test_losses_are_drawn_as_they_are(tmp_path: Path, record_of: Make) -> None:
    sweep = sweep_of(tmp_path, CROSSED.replace("seeds:", "report: {metric: test/loss}\nseeds:"))
    found = [record_of(run, 0.5, eval=evaluated(run, c)) for c in sweep.cells() for run in sweep.reported(c)]
    panel = figure(report.build(sweep, found), "metric").panels[0]
    assert isinstance(panel, Panel)
    assert {dot.y for dot in by_name(panel, "mamba2").dots} == {0.5}
    assert panel.y.low < 0 < 0.5 < panel.y.high


def test_axes_place_values() -> None:
    assert Axis("", 0, 10, ()).place(2.5) == 0.25
    assert Axis("", 1, 16, (), log=True).place(4) == 0.5
    logarithmic = value_axis("T", [64, 512, 2048])
    assert (logarithmic.log, logarithmic.ticks) == (True, ((64, "64"), (512, "512"), (2048, "2K")))
    assert logarithmic.place(64) == pytest.approx(1 - logarithmic.place(2048))
    assert [text for _, text in value_axis("depth", [0.0, 0.5, 1.0]).ticks] == ["0", "0.5", "1"]
    assert not value_axis("one", [3]).log
    assert [text for _, text in bytes_axis("", [5000, 9000]).ticks] == ["4K", "8K", "16K"]
    assert not bytes_axis("", [0, 9000]).log
    assert [text for _, text in linear_axis("", 0, 0.9).ticks] == ["0", "0.2", "0.4", "0.6", "0.8"]
    assert linear_axis("", 0, 0).place(0) < 0.5


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "positions"])  # see lm/test_figure.py
def test_files(kind: Kind, widths: Table, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    files = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for path in files:
        plot(figure(widths, kind), path)
    assert files[0].read_bytes() == files[1].read_bytes(), "the same records give the same file"


def test_a_file_has_one_dot_for_each_seed(widths: Table, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    drawn = figure(widths, "metric")
    plot(drawn, tmp_path / "x.svg")
    dots = (tmp_path / "x.svg").read_text().split('<g id="PathCollection_')[1:]
    counts = [part.split("</g>\n   </g>")[0].count("<use") for part in dots]
    assert counts == [len(s.dots) for panel in drawn.panels if isinstance(panel, Panel) for s in panel.series]
    assert sum(counts) == 22  # 8 cells of 3 seeds, less one that diverged and one that never ran
    plot(drawn, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(UserError, match=r"x\.bmp should end in"):
        plot(drawn, tmp_path / "x.bmp")
    with pytest.raises(UserError, match="cannot write"):
        plot(drawn, tmp_path / "none" / "x.svg")
