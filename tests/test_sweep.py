"""What a sweep file expands to: cells, runs, overrides, extends, and hashes that stay."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mixassay.spec import RunSpec
from mixassay.sweep import Sweep, conditions

HEAD = """\
version: 1
name: demo
task: {name: mqar, vocab_size: 64, seq_len: 32, num_kv: 4, train_examples: 1000}
mixer: attention
model: {d_model: 32}
train: {epochs: 2}
"""

MQAR_TABLE = """\
version: 1
name: mqar-table
task:  {name: mqar, vocab_size: 8192, train_examples: 100_000, valid_examples: 3_000, test_examples: 3_000}
model: {n_layers: 2, d_model: 64}
train: {epochs: 64, batch_size: 512, weight_decay: 0.1, precision: fp32, stop: {metric: valid/accuracy, above: 0.99}}
sweep:
  grid:
    mixer: [attention, based, mamba2, gated_delta_net, {name: gla, expand_k: 0.5}]
    model.d_model: [64, 128, 256, 512]
  zip:
    scale:                                   # linked values
      - {task.seq_len: 64,  task.num_kv: 4,  train.batch_size: 512}
      - {task.seq_len: 128, task.num_kv: 8,  train.batch_size: 512}
      - {task.seq_len: 256, task.num_kv: 16, train.batch_size: 256}
      - {task.seq_len: 512, task.num_kv: 64, train.batch_size: 128}
  select:
    axes:  {train.lr: [1e-4, 4.6e-4, 2.2e-3, 1e-2]}
    by:    valid/accuracy
    seeds: [100, 101]
  when:    [{if: {mixer: mamba2}, set: {model.block: mamba}}]
  exclude: [{mixer: attention, model.d_model: 512, task.seq_len: 512}]
seeds: [0, 1, 2, 3, 4]
report: {metric: test/accuracy, rows: mixer, columns: [task.num_kv, model.d_model]}
run:    {retries: 1, timeout: 45m}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(text: str, *overrides: str) -> Sweep:
    Path("sweep.yaml").write_text(text)
    return Sweep.load("sweep.yaml", overrides)


def only_run(text: str, *overrides: str) -> RunSpec:
    sweep = load(text, *overrides)
    (cell,) = sweep.cells()
    (run,) = sweep.reported(cell)
    return run


def test_the_mqar_table_has_as_many_runs_as_one_counts_by_hand() -> None:
    sweep = load(MQAR_TABLE)
    cells = sweep.cells()
    assert len(cells) == 5 * 4 * 4 - 1
    tuning = [run for cell in cells for run in sweep.tuning(cell)]
    reported = [run for cell in cells for run in sweep.reported(cell, {"train.lr": 1e-2})]
    assert len(tuning) == 79 * 4 * 2 == 632
    assert len(reported) == 79 * 5 == 395
    assert len({cell.cell for cell in cells}) == 79
    assert {run.seed for run in tuning}.isdisjoint(run.seed for run in reported)
    assert {run.role for run in tuning} == {"tune"}
    assert {run.role for run in reported} == {"report"}
    assert not any(
        c.axes["mixer"] == "attention" and c.axes["model.d_model"] == 512 and c.axes["task.seq_len"] == 512
        for c in cells
    )


def test_grid_varies_slowest_first_and_zip_rows_go_together() -> None:
    sweep = load(
        HEAD
        + "sweep:\n  grid: {model.d_model: [16, 32]}\n"
        + "  zip: {scale: [{task.num_kv: 2, train.batch_size: 8}, {task.num_kv: 4, train.batch_size: 16}]}\n"
    )
    found = [
        (c.sections.model.d_model, c.sections.task.args["num_kv"], c.sections.train.batch_size) for c in sweep.cells()
    ]
    assert found == [(16, 2, 8), (16, 4, 16), (32, 2, 8), (32, 4, 16)]
    assert sweep.cells()[1].axes == {"model.d_model": 16, "task.num_kv": 4, "train.batch_size": 16}


def test_a_parent_path_is_set_before_its_children() -> None:
    sweep = load(HEAD + "sweep: {grid: {mixer.heads: [1, 2], mixer: [attention, {name: mamba2, expand: 2}]}}\n")
    found = [cell.sections.mixer.model_dump() for cell in sweep.cells()]
    assert found == [
        {"name": "attention", "heads": 1},
        {"name": "mamba2", "expand": 2, "heads": 1},
        {"name": "attention", "heads": 2},
        {"name": "mamba2", "expand": 2, "heads": 2},
    ]


def test_axis_values_by_logspace_and_range() -> None:
    sweep = load(
        HEAD + "sweep: {grid: {train.lr: {logspace: [1e-4, 1e-2, 4]}, model.n_layers: {range: [1, 3]}}}\nseeds: [0]\n"
    )
    assert [c.axes["train.lr"] for c in sweep.cells()[::3]] == [1e-4, 4.64159e-4, 2.15443e-3, 1e-2]
    assert [c.axes["model.n_layers"] for c in sweep.cells()[:3]] == [1, 2, 3]


@pytest.mark.parametrize(("text", "seeds"), [("0-4", (0, 1, 2, 3, 4)), ("[3, 1]", (3, 1)), ("7-7", (7,))])
def test_seeds(text: str, seeds: tuple[int, ...]) -> None:
    assert load(HEAD + f"seeds: {text}\n").seeds == seeds


def test_when_sets_in_order_and_sees_what_earlier_rules_set() -> None:
    sweep = load(
        HEAD
        + "sweep:\n  grid: {mixer: [attention, {name: mamba2, d_state: 8}], model.d_model: [16, 32]}\n"
        + "  when:\n"
        + "    - {if: {mixer: mamba2}, set: {model.block: mamba}}\n"
        + "    - {if: {model.block: mamba, model.d_model: 32}, set: {mixer.d_state: 4, train.stop: {above: 0.9}}}\n"
    )
    found = [
        (c.sections.model.block, c.sections.mixer.args.get("d_state"), c.sections.train.stop is not None)
        for c in sweep.cells()
    ]
    assert found == [("zoology", None, False), ("zoology", None, False), ("mamba", 8, False), ("mamba", 4, True)]


def test_conditions_match_defaults_names_whole_mixers_and_any_of_a_list() -> None:
    grid = "sweep:\n  grid: {mixer: [attention, mamba2, {name: mamba2, d_state: 8}], model.d_model: [16, 32]}\n"

    def left(condition: str) -> int:
        return len(load(HEAD + grid + f"  exclude: [{condition}]\n").cells())

    assert left("{mixer: mamba2}") == 2
    assert left("{mixer: {name: mamba2, d_state: 8}}") == 4
    assert left("{mixer.d_state: 8}") == 4
    assert left("{mixer: mamba2, model.d_model: 16}") == 4
    assert left("{mixer: [attention, {name: mamba2}], model.block: zoology, model.d_model: [16, 64]}") == 4


def test_numbers_are_compared_as_numbers_and_never_with_true() -> None:
    grid = "sweep:\n  grid: {train.lr: [1, 2]}\n"
    assert len(load(HEAD + grid + "  exclude: [{train.lr: 1.0}]\n").cells()) == 1
    sweep = load(HEAD + grid)
    assert len(sweep.only({"train.lr": 1}).cells()) == 1
    with pytest.raises(ValueError, match=r"none has train\.lr=true"):
        sweep.only({"train.lr": True})


def test_only_keeps_what_matches_and_leaves_the_rest_of_the_sweep_alone() -> None:
    sweep = load(MQAR_TABLE)
    part = sweep.only(conditions("mixer=gla,task.num_kv=[4, 8]"))
    assert len(part.cells()) == 4 * 2
    assert {cell.cell for cell in part.cells()} < {cell.cell for cell in sweep.cells()}
    assert len(sweep.cells()) == 79
    assert part.seeds == sweep.seeds


def test_tuned_runs_share_their_cell_whatever_was_tuned() -> None:
    text = HEAD + "sweep:\n  select: {axes: {train.lr: [0.1, 0.2], train.stop.above: [0.8, 0.9]}, seeds: [7, 8]}\n"
    sweep = load(text.replace("epochs: 2", "epochs: 2, stop: {above: 0.5}"))
    (cell,) = sweep.cells()
    tuning = sweep.tuning(cell)
    reported = sweep.reported(cell, {"train.lr": 0.15, "train.stop.above": 0.7})
    assert [(r.train.lr, r.train.stop and r.train.stop.above, r.seed) for r in tuning[:3]] == [
        (0.1, 0.8, 7),
        (0.1, 0.8, 8),
        (0.1, 0.9, 7),
    ]
    assert len(tuning) == 2 * 2 * 2
    assert {r.cell for r in (*tuning, *reported)} == {cell.cell}
    assert reported[0].train.lr == 0.15
    assert reported[0].tuned == {"train.lr": 0.15, "train.stop.above": 0.7}
    assert len({r.stack for r in tuning}) == 2, "members of one stack may differ in lr, not in where they stop"


def test_a_mixer_argument_can_be_tuned() -> None:
    sweep = load(HEAD + "sweep: {select: {axes: {mixer.heads: [1, 2]}, seeds: [7]}}\n")
    (cell,) = sweep.cells()
    assert [run.mixer.args for run in sweep.tuning(cell)] == [{"heads": 1}, {"heads": 2}]
    assert {run.cell for run in sweep.tuning(cell)} == {cell.cell}


def test_extends_takes_the_name_of_a_shipped_sweep() -> None:
    sweep = load("extends: lm/tiny\nname: child\nseeds: [5]\n")
    assert (sweep.name, sweep.seeds) == ("child", (5,))
    assert sweep.cells()[0].sections.train.loop == "lm"


def test_extends_merges_mappings_and_replaces_lists() -> None:
    Path("base").mkdir()
    Path("base/base.yaml").write_text(HEAD + "seeds: [0, 1, 2]\nplugins: [ema.py, some.module]\n")
    sweep = load("extends: base/base.yaml\nname: child\nmixer: {heads: 2}\ntrain: {lr: 0.1}\nseeds: [5]\n")
    (run,) = sweep.reported(sweep.cells()[0])
    assert (run.suite, run.mixer.name, run.mixer.args, run.train.lr, run.train.epochs, run.seed) == (
        "child",
        "attention",
        {"heads": 2},
        0.1,
        2,
        5,
    )
    assert sweep.plugins == ("base/ema.py", "some.module"), "a plug-in lies beside the file that names it"


def test_a_word_replaces_a_mapping_that_was_extended() -> None:
    Path("base.yaml").write_text(HEAD.replace("mixer: attention", "mixer: {name: attention, heads: 2}"))
    sweep = load("extends: base.yaml\nmixer: mamba2\n")
    assert sweep.cells()[0].sections.mixer.model_dump() == {"name": "mamba2"}


def test_overrides_set_sections_settings_seeds_and_axes() -> None:
    text = HEAD + "sweep: {grid: {model.d_model: [16, 32]}}\n"
    sweep = load(text, "train.steps=100", "train.epochs=null", "seeds=3-4", "run.device=cpu", "mixer.heads=2")
    assert len(sweep.cells()) == 2
    run = sweep.reported(sweep.cells()[0])[1]
    assert (run.train.steps, run.train.epochs, run.seed, run.mixer.args) == (100, None, 4, {"heads": 2})
    assert sweep.run.device == "cpu"
    swept = load(text, "sweep.grid.model.d_model=[8]", "sweep.grid.mixer=[attention, mamba2]")
    assert [(c.sections.mixer.name, c.sections.model.d_model) for c in swept.cells()] == [
        ("attention", 8),
        ("mamba2", 8),
    ]


def test_overrides_of_sections_change_the_cell_and_others_do_not() -> None:
    cell = only_run(HEAD).cell
    assert only_run(HEAD, "train.lr=0.1").cell != cell
    assert only_run(HEAD, "mixer.heads=2").cell != cell
    assert only_run(HEAD, "run.retries=3", "report.title=T", "seeds=[9]", "name=other").cell == cell


def test_the_shorthand_the_defaults_and_the_way_of_writing_a_number_do_not_change_the_cell() -> None:
    cell = only_run(HEAD).cell
    assert only_run(HEAD.replace("mixer: attention", "mixer: {name: attention}")).cell == cell
    assert only_run(HEAD.replace("epochs: 2", "epochs: 2, clip: null, batch_size: 64, lr: 3.0e-3")).cell == cell
    assert only_run(HEAD, "mixer.scale=2").cell == only_run(HEAD, "mixer.scale=2.0").cell
    swept = load(HEAD + "sweep: {grid: {mixer: [attention]}}\n")
    assert swept.cells()[0].cell == cell


def test_hashes_stay() -> None:
    """Results are found by these. When one moves, old results are lost to new tables: say so in the changelog."""
    run = only_run(HEAD)
    assert (run.cell, run.stack) == ("72515b99972e", "72515b99972e")
    table = load(MQAR_TABLE)
    assert table.cells()[0].cell == "f49d74119d91"
    assert table.tuning(table.cells()[0])[0].stack == "f49d74119d91"


def test_loading_imports_no_torch_and_runs_no_plugin() -> None:
    Path("sweep.yaml").write_text(MQAR_TABLE + "plugins: [boom.py]\n")
    Path("boom.py").write_text("raise SystemExit('imported')\n")
    code = """
import sys, json
from mixassay.sweep import Sweep
from mixassay.origins import resolved_text
sweep = Sweep.load("sweep.yaml")
cells = sweep.cells()
sweep.tuning(cells[0]), sweep.reported(cells[0], {"train.lr": 0.1}), resolved_text(sweep)
print(json.dumps([len(cells), sorted({"torch", "numpy", "scipy", "rich", "typer"} & set(sys.modules))]))
"""
    path = str(Path(__file__).parents[1] / "src")
    done = subprocess.run([sys.executable, "-P", "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [79, []]


def test_cells_are_shown_as_one_would_write_them() -> None:
    sweep = load(HEAD + "sweep: {grid: {mixer: [attention, {name: gla, expand_k: 0.5}], model.d_model: [16]}}\n")
    assert [str(cell) for cell in sweep.cells()] == [
        "mixer=attention, model.d_model=16",
        "mixer={name: gla, expand_k: 0.5}, model.d_model=16",
    ]
    assert str(load(HEAD).cells()[0]) == "the only cell"


def test_settings() -> None:
    sweep = load(
        HEAD + "run: {timeout: 45m, checkpoint_every: 30, slots: 2}\nreport: {compare: {margin: 0.02}, columns: []}\n"
    )
    assert (sweep.run.timeout, sweep.run.checkpoint_every, sweep.run.slots, sweep.run.threads) == (2700, 30, 2, "auto")
    assert (sweep.report.compare.margin, sweep.report.compare.solved_at, sweep.report.columns) == (0.02, 0.99, ())


@pytest.mark.parametrize(("text", "value"), [("90s", 90), ("1.5h", 5400), ("2m", 120), ("7", 7)])
def test_durations(text: str, value: float) -> None:
    assert load(HEAD + f"run: {{timeout: {text}}}\n").run.timeout == value
