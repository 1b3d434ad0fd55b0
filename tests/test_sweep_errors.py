"""Every fault of a sweep file is told with its file, line and column (`⟦` marks the place), all faults at once."""

from pathlib import Path

import pytest

from mixassay.errors import UserError
from mixassay.sweep import Sweep, conditions

GRID = "sweep:\n  grid: {model.d_model: [16, 32]}\n"

BASE = """\
version: 1
name: demo
task: {name: mqar, vocab_size: 64, seq_len: 32, num_kv: 4, train_examples: 1000}
mixer: attention
model: {d_model: 32}
train: {epochs: 2}
"""


def marked(text: str, name: str = "sweep.yaml") -> tuple[str, list[str]]:
    """The text without its marks, and `file:line:col: ` for each of them."""
    places = []
    lines = text.split("\n")
    for row, line in enumerate(lines):
        while "⟦" in line:
            places.append(f"{name}:{row + 1}:{line.index('⟦') + 1}: ")
            line = line.replace("⟦", "", 1)
        lines[row] = line
    return "\n".join(lines), places


def write(folder: Path, text: str, name: str = "sweep.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def faults(text: str, *overrides: str) -> list[str]:
    """The lines that loading the text as ./sweep.yaml complains of."""
    write(Path(), text)
    with pytest.raises(UserError) as caught:
        Sweep.load("sweep.yaml", overrides)
    return str(caught.value).split("\n")


def load(text: str, *overrides: str) -> Sweep:
    write(Path(), text)
    return Sweep.load("sweep.yaml", overrides)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def replaced(old: str, new: str) -> str:
    assert old in BASE
    return BASE.replace(old, new)


FAULTS = {
    "unknown section": (BASE + "⟦trian: {}\n", 'unknown key "trian". Did you mean "train"?'),
    "unknown field": (
        replaced("epochs: 2", "epochs: 2, ⟦batchsize: 3"),
        'unknown key "train.batchsize". Did you mean "batch_size"?',
    ),
    "unknown nested field": (
        replaced("epochs: 2", "epochs: 2, stop: {above: 0.9, ⟦metrik: valid/loss}"),
        'unknown key "train.stop.metrik". Did you mean "metric"?',
    ),
    "unknown setting": (
        BASE + "run: {⟦slot: 2}\n",
        'unknown key "run.slot". Did you mean "slots"?',
    ),
    "unknown part of the sweep": (BASE + "sweep: {⟦gird: {}}\n", 'unknown key "sweep.gird". Did you mean "grid"?'),
    "key twice": (BASE + "⟦name: other\n", 'key "name" is given twice (first in line 2)'),
    "missing name": (replaced("name: mqar, ", "").replace("{vocab", "⟦{vocab"), '"task.name" is missing'),
    "missing section": (replaced("mixer: attention\n", ""), '"mixer.name" is missing'),
    "missing version": (replaced("version: 1\n", ""), "version should be 1"),
    "newer version": (replaced("version: 1", "version: ⟦2"), "version should be 1, got 2"),
    "missing suite name": (
        replaced("name: demo\n", ""),
        '"name" is missing: the name of the folder under results/',
    ),
    "suite name that is no folder": (
        replaced("name: demo", "name: ⟦a/b"),
        'name should be made of letters, digits, dot, dash and underscore: it names a folder, got "a/b"',
    ),
    "word for a number": (
        replaced("epochs: 2", 'epochs: 2, lr: ⟦"1e-4"'),
        'train.lr should be a number, got "1e-4"',
    ),
    "fraction for a whole number": (
        replaced("d_model: 32", "d_model: ⟦32.0"),
        "model.d_model should be a whole number, got 32.0",
    ),
    "true for a whole number": (
        replaced("d_model: 32", "d_model: ⟦true"),
        "model.d_model should be a whole number, got true",
    ),
    "out of range": (replaced("epochs: 2", "epochs: 2, lr: ⟦-1"), "train.lr should be greater than 0, got -1"),
    "word of a choice": (
        replaced("d_model: 32", "block: ⟦zoolgy"),
        "model.block should be 'zoology', 'mamba' or 'swiglu', got \"zoolgy\". Did you mean \"zoology\"?",
    ),
    "one of two kinds": (
        replaced("train_examples: 1000", "train_examples: ⟦many"),
        "task.train_examples should be a whole number or 'endless', got \"many\"",
    ),
    "tuple too short": (
        replaced("epochs: 2", "epochs: 2, betas: ⟦[0.9]"),
        '"train.betas.1" is missing',
    ),
    "section that is no mapping": (replaced("{d_model: 32}", "⟦3"), "model should be a mapping, got 3"),
    "file that is no mapping": ("⟦- 1\n", "a sweep file is a mapping, got [1]"),
    "empty file": ("⟦", "a sweep file is a mapping, got null"),
    # rules across fields
    "steps and epochs": (
        replaced("epochs: 2", "epochs: ⟦2, steps: 3"),
        "exactly one of train.steps and train.epochs must be given, found both (null takes one away)",
    ),
    "neither steps nor epochs": (
        replaced("{epochs: 2}", "⟦{lr: 1e-3}"),
        "exactly one of train.steps and train.epochs must be given, found neither",
    ),
    "epochs of endless data": (
        replaced(", train_examples: 1000", "").replace("epochs: 2", "epochs: ⟦2"),
        "train.epochs needs a fixed set: give task.train_examples (or examples in every train cell), "
        "or train.steps instead",
    ),
    "batch larger than the set": (
        replaced("epochs: 2", "epochs: 2, batch_size: ⟦2000"),
        "train.batch_size=2000 is more than a train cell's 1000 examples",
    ),
    "stopping on test": (
        replaced("epochs: 2", "epochs: 2, stop: {metric: ⟦test/accuracy, above: 0.9}"),
        'train.stop.metric: a test metric ("test/accuracy") here biases the report; use valid/accuracy',
    ),
    "stopping nowhere": (
        replaced("epochs: 2", "epochs: 2, stop: ⟦{metric: valid/loss}"),
        "train.stop needs exactly one of above and below",
    ),
    "train cells with and without examples": (
        replaced(", train_examples: 1000", ", train_cells: [{num_kv: 2, examples: 1000}, ⟦{num_kv: 3}]"),
        "task.train_cells.1 has no examples but others have; give examples in all or in none, "
        "or set task.train_examples",
    ),
    "train cells with and without weight": (
        replaced("train_examples: 1000", "train_examples: 1000, train_cells: [⟦{num_kv: 2}, {num_kv: 3, weight: 2}]"),
        "task.train_cells.0 has no weight but others have; give weight in all or in none",
    ),
    "weight of nothing": (
        replaced("train_examples: 1000", "train_examples: 1000, train_cells: [{num_kv: 2, weight: ⟦0}]"),
        "task.train_cells.0.weight should be a number greater than 0, got 0",
    ),
    "examples of an eval cell": (
        replaced("train_examples: 1000", "train_examples: 1000, eval_cells: [{num_kv: 2, examples: ⟦10}]"),
        "task.eval_cells.0.examples is for train cells; evaluation takes task.valid_examples and "
        "task.test_examples of each",
    ),
    "cell that overrides how much is drawn": (
        replaced("train_examples: 1000", "train_examples: 1000, eval_cells: [{test_examples: ⟦10}]"),
        "task.eval_cells.0.test_examples: a cell may override the task's own arguments only, not test_examples",
    ),
    "cell twice": (
        replaced("train_examples: 1000", "train_examples: 1000, eval_cells: [{num_kv: 4}, ⟦{seq_len: 32}]"),
        "task.eval_cells.1 is the same as task.eval_cells.0",
    ),
    # paths and axes
    "unknown path": (
        BASE + "sweep:\n  grid: {⟦model.dmodel: [16, 32]}\n",
        'sweep path "model.dmodel" is not a config field. Did you mean "model.d_model"?',
    ),
    "unknown section in a path": (
        BASE + "sweep:\n  grid: {⟦moddel.d_model: [16]}\n",
        'sweep path "moddel.d_model" is not a config field. Did you mean "model.d_model"?',
    ),
    "path below a number": (
        BASE + "sweep:\n  grid: {⟦train.lr.x: [16]}\n",
        'sweep path "train.lr.x" is not a config field. Did you mean "train.lr"?',
    ),
    "path swept twice": (
        BASE + "sweep:\n  grid: {train.lr: [1, 2]}\n  zip: {a: [{⟦train.lr: 3}]}\n",
        '"train.lr" is swept twice (first at sweep.yaml:8:10)',
    ),
    "value of an axis": (
        BASE + "sweep:\n  grid: {model.d_model: [16, ⟦-1]}\n",
        "model.d_model should be greater than 0, got -1",
    ),
    "axis that is no list": (
        BASE + "sweep:\n  grid: {model.d_model: ⟦16}\n",
        "model.d_model should have a list of values, {logspace: [from, to, how many]} or {range: [from, to]}, got 16",
    ),
    "empty axis": (
        BASE + "sweep:\n  grid: {model.d_model: ⟦[]}\n",
        "model.d_model should have a list of values, {logspace: [from, to, how many]} or {range: [from, to]}, got []",
    ),
    "logspace of one": (
        BASE + "sweep:\n  grid: {train.lr: ⟦{logspace: [1, 2, 1]}}\n",
        "train.lr should have a list of values, {logspace: [from, to, how many]} or {range: [from, to]}, "
        'got {"logspace": [1, 2, 1]}',
    ),
    "value twice": (
        BASE + "sweep:\n  grid: {model.d_model: [16, 32, ⟦16]}\n",
        "two cells are the same configuration: (model.d_model=16) and (model.d_model=16)",
    ),
    "zip rows of different keys": (
        BASE
        + "sweep:\n  zip:\n    scale:\n      - {task.num_kv: 2, train.lr: 1}\n      - ⟦{task.kv: 2, train.lr: 1}\n",
        'zip "scale" row 1 has keys [task.kv, train.lr], row 0 has [task.num_kv, train.lr]',
    ),
    "zip row that is no mapping": (
        BASE + "sweep:\n  zip:\n    scale: [{train.lr: 1}, ⟦3]\n",
        'zip "scale" row 1 should be a mapping, got 3',
    ),
    "zip without rows": (BASE + "sweep:\n  zip: {scale: ⟦[]}\n", 'zip "scale" has no rows'),
    "zip value": (
        BASE + "sweep:\n  zip:\n    scale: [{train.lr: 1}, {train.lr: ⟦0}]\n",
        "train.lr should be greater than 0, got 0",
    ),
    # select
    "selecting on test": (
        BASE + "sweep: {select: {axes: {train.lr: [1, 2]}, by: ⟦test/accuracy, seeds: [9]}}\n",
        'sweep.select.by: a test metric ("test/accuracy") here biases the report; use valid/accuracy',
    ),
    "unknown metric": (
        BASE + "sweep: {select: {axes: {train.lr: [1, 2]}, by: ⟦valid/acuracy, seeds: [9]}}\n",
        "sweep.select.by should be 'valid/accuracy' or 'valid/loss', got \"valid/acuracy\". "
        'Did you mean "valid/accuracy"?',
    ),
    "select without seeds": (
        BASE + "sweep: {select: ⟦{axes: {train.lr: [1, 2]}}}\n",
        '"sweep.select.seeds" is missing',
    ),
    "select without axes": (BASE + "sweep: {select: ⟦{seeds: [9]}}\n", '"sweep.select.axes" is missing'),
    "selecting the task": (
        BASE + "sweep: {select: {axes: {⟦task.num_kv: [1, 2]}, seeds: [9]}}\n",
        '"task.num_kv" cannot be selected: only fields of mixer, model and train may be tuned',
    ),
    "candidate": (
        BASE + "sweep: {select: {axes: {train.lr: [1, ⟦x]}, seeds: [9]}}\n",
        'train.lr should be a number, got "x"',
    ),
    "seeds that tune and report": (
        BASE + "seeds: 0-4\nsweep: {select: {axes: {train.lr: [1, 2]}, seeds: ⟦[3, 4, 5]}}\n",
        "seeds 3, 4 are both tuned on and reported; give sweep.select other seeds",
    ),
    "default seed that tunes": (
        BASE + "sweep: {select: {axes: {train.lr: [1, 2]}, seeds: ⟦[0]}}\n",
        "seeds 0 are both tuned on and reported; give sweep.select other seeds",
    ),
    "swept and selected": (
        BASE + "sweep: {grid: {train.lr: [1, 2]}, select: {axes: {⟦train.lr: [1, 2]}, seeds: [9]}}\n",
        '"train.lr" is swept twice (first at sweep.yaml:7:16)',
    ),
    # seeds
    "number for seeds": (
        BASE + "seeds: ⟦5\n",
        'seeds should be a list, or a range such as "0-4", got 5: the seed alone is [5], as many are "0-4"',
    ),
    "negative seed": (BASE + "seeds: [0, ⟦-1]\n", "a seed should be a whole number from 0, got -1"),
    "seed twice": (BASE + "seeds: ⟦[0, 1, 0]\n", "seeds names seed 0 twice"),
    "no seeds": (BASE + "seeds: ⟦[]\n", "seeds is empty"),
    "backward seeds": (BASE + "seeds: ⟦4-0\n", "seeds is empty"),
    # when and exclude
    "when that never matches": (
        BASE + GRID + "  when: [⟦{if: {mixer: atention}, set: {model.block: swiglu}}]\n",
        'when matches no cell: none has mixer=atention. Did you mean "attention"?',
    ),
    "exclude that never matches": (
        BASE + GRID + "  exclude: [⟦{model.d_model: 33}]\n",
        "exclude matches no cell: none has model.d_model=33. Known: 16, 32.",
    ),
    "exclude of a combination that is not there": (
        BASE + "sweep:\n  zip: {s: [{train.lr: 1, train.warmup: 0}, {train.lr: 2, train.warmup: 0.1}]}\n"
        "  exclude: [⟦{train.lr: 1, train.warmup: 0.1}]\n",
        "exclude matches no cell: none has all of these values together",
    ),
    "everything excluded": (BASE + GRID + "  exclude: [⟦{mixer: attention}]\n", "every cell is excluded"),
    "condition on an unknown path": (
        BASE + GRID + "  exclude: [{⟦model.dmodel: 32}]\n",
        'sweep path "model.dmodel" is not a config field. Did you mean "model.d_model"?',
    ),
    "when without set": (BASE + GRID + "  when: [⟦{if: {mixer: attention}}]\n", 'sweep.when 0 needs "set"'),
    "when without condition": (
        BASE + GRID + "  when: [⟦{if: {}, set: {model.block: mamba}}]\n",
        "sweep.when 0 has no condition",
    ),
    "value set by when": (
        BASE + GRID + "  when: [{if: {model.d_model: 16}, set: {model.block: ⟦mamba3}}]\n",
        "model.block should be 'zoology', 'mamba' or 'swiglu', got \"mamba3\". Did you mean \"mamba\"?",
    ),
    "when that makes cells alike": (
        BASE
        + "sweep:\n  grid: {model.d_model: [16, 32]}\n  when: [{if: {model.d_model: 32}, set: {model.d_model: ⟦16}}]\n",
        "two cells are the same configuration: (model.d_model=16) and (model.d_model=32)",
    ),
    "when that sets what select tunes": (
        BASE + "sweep:\n  when: [{if: {mixer: attention}, set: {⟦train.lr: 1}}]\n"
        "  select: {axes: {train.lr: [1, 2]}, seeds: [9]}\n",
        "when may not depend on or set train.lr, which sweep.select tunes",
    ),
    "exclude by what select tunes": (
        BASE + "sweep:\n  exclude: [{⟦train.lr: 1}]\n  select: {axes: {train.lr: [1, 2]}, seeds: [9]}\n",
        "exclude may not depend on or set train.lr, which sweep.select tunes",
    ),
    # report and run
    "unknown column": (
        BASE + GRID + "report: {columns: [model.d_model, ⟦task.nun_kv]}\n",
        'report: no cell has "task.nun_kv". Did you mean "task.num_kv"?',
    ),
    "unknown rows": (
        BASE + GRID + "report: {rows: ⟦mixr, columns: [model.d_model]}\n",
        'report: no cell has "mixr". Did you mean "mixer"?',
    ),
    "column that is tuned": (
        BASE + "sweep: {select: {axes: {train.lr: [1, 2]}, seeds: [9]}}\nreport: {columns: [⟦train.lr]}\n",
        'report: "train.lr" is what sweep.select tunes, and no row or column of the table',
    ),
    "cells that share a place in the table": (
        BASE + GRID + "report: {columns: ⟦[task.num_kv]}\n",
        "report: (model.d_model=16) and (model.d_model=32) would share one place in the table; "
        "add model.d_model to report.columns",
    ),
    "report of an unknown metric": (
        BASE + "report: {metric: ⟦test/acc}\n",
        "report.metric should be 'test/accuracy', 'test/loss', 'test/answer_accuracy', 'valid/accuracy', 'valid/loss' "
        "or 'valid/answer_accuracy', got \"test/acc\". "
        'Did you mean "test/accuracy"?',
    ),
    "timeout": (BASE + "run: {timeout: ⟦45x}\n", 'run.timeout should be a number, got "45x"'),
    # extends and plug-ins
    "extends a missing file": (
        BASE + "extends: ⟦no.yaml\n",
        "extends no.yaml, but there is no file no.yaml, nor a shipped sweep of that name",
    ),
    "extends itself": (BASE + "extends: ⟦sweep.yaml\n", "extends sweep.yaml, which extends this file in turn"),
    "extends a list": (
        BASE + "extends: ⟦[a.yaml]\n",
        'extends should be one file or a shipped sweep\'s name, got ["a.yaml"]',
    ),
    "plug-in that is no name": (
        BASE + "plugins: [a.py, ⟦3]\n",
        "a plug-in is a Python file or the name of a module, got 3",
    ),
    "plugins that are no list": (BASE + "plugins: ⟦ema.py\n", 'plugins should be a list, got "ema.py"'),
}


@pytest.mark.parametrize("case", FAULTS)
def test_fault(case: str) -> None:
    text, message = FAULTS[case]
    text, places = marked(text)
    assert faults(text) == [(places[0] if places else "sweep.yaml:1:1: ") + message]


def test_all_faults_are_told_at_once_in_the_order_of_the_file() -> None:
    text, places = marked(
        BASE.replace("epochs: 2", "epochs: 2, ⟦batchsize: 3, lr: ⟦x").replace("d_model: 32", "d_model: ⟦0")
        + "sweep:\n  grid: {⟦model.dmodel: [1], train.warmup: [0, ⟦2]}\n  when: [⟦{if: {mixer: attention}}]\n"
        + "seeds: ⟦7\nreport: {⟦row: mixer}\nname: ⟦other\n".replace("name: ⟦", "⟦name: ")
    )
    found = faults(text)
    assert [line[: len(place)] for line, place in zip(found, places, strict=True)] == places


def test_a_fault_of_many_cells_is_told_once() -> None:
    text, places = marked(BASE.replace("epochs: 2", "epochs: ⟦2, steps: 3") + GRID)
    assert [line.startswith(places[0]) for line in faults(text)] == [True]


def test_a_fault_of_the_extended_file_points_into_it() -> None:
    Path("sub").mkdir()
    base, places = marked(BASE.replace("epochs: 2", "epochs: 2, ⟦batchsize: 3"), "sub/../sub/base.yaml")
    write(Path("sub"), base, "base.yaml")
    write(Path("sub"), "extends: ../sub/base.yaml\nname: child\n", "child.yaml")
    with pytest.raises(UserError) as caught:
        Sweep.load("sub/child.yaml")
    assert str(caught.value) == places[0] + 'unknown key "train.batchsize". Did you mean "batch_size"?'


OVERRIDES = {
    "train.stps=100": 'unknown key "train.stps". Did you mean "steps"?',
    "train.lr=x": 'train.lr should be a number, got "x"',
    "trian.lr=1": 'unknown key "trian". Did you mean "train"?',
    "extends=other.yaml": "has no effect: what a file extends is read before; write it into the file",
    "seeds=0-99999999999": 'seeds should name 10,000 seeds at most, got "0-99999999999"',
    "sweep.grid.train.lr={logspace: [1, 2, 999999999]}": "train.lr should have 10,000 values at most,"
    ' got {"logspace": [1, 2, 999999999]}',
    "sweep.grid.model.n_layers={range: [1, 999999999]}": "model.n_layers should have 10,000 values at most,"
    ' got {"range": [1, 999999999]}',
    "train.lr.x=1": "nothing can be set inside 0.1 (sweep.yaml:6:24)",
    "model.d_model=64": "has no effect: the sweep sets model.d_model; override sweep.grid.model.d_model=[64]",
    "sweep.grid.model.dmodel=[64]": 'sweep path "model.dmodel" is not a config field. Did you mean "model.d_model"?',
}


@pytest.mark.parametrize("text", OVERRIDES)
def test_a_fault_of_an_override_names_it(text: str) -> None:
    sweep = BASE.replace("epochs: 2", "epochs: 2, lr: 0.1") + GRID
    assert faults(sweep, text) == [f'override "{text}": {OVERRIDES[text]}']


def test_an_override_of_what_is_tuned_or_zipped_says_what_to_do() -> None:
    tuned = BASE + "sweep: {select: {axes: {train.lr: [1, 2]}, seeds: [9]}}\n"
    (found,) = faults(tuned, "train.lr=3")
    assert found.endswith("has no effect: the sweep sets train.lr; override sweep.select.axes.train.lr=[3]")
    zipped = BASE + "sweep: {zip: {s: [{train.lr: 1}, {train.lr: 2}]}}\n"
    (found,) = faults(zipped, "train.lr=3")
    assert found.endswith("has no effect: the sweep sets train.lr; use --only")


def test_only_that_matches_nothing() -> None:
    sweep = load(BASE + "sweep: {grid: {mixer: [attention, {name: mamba2, d_state: 16}]}}\n")
    with pytest.raises(UserError, match=r'^--only: none has mixer=mamba\. Did you mean "mamba2"\?$'):
        sweep.only(conditions("mixer=mamba"))
    with pytest.raises(UserError, match=r'^--only: "mixr" is not a config field\. Did you mean "mixer"\?$'):
        sweep.only({"mixr": "attention"})
    with pytest.raises(UserError, match="none has all of these values together"):
        sweep.only({"mixer": "attention", "mixer.d_state": 16})


def test_only_is_told_by_its_name_and_says_each_thing_once() -> None:
    with pytest.raises(UserError, match=r"^--only names mixer twice; any of several values is mixer=\[A, B\]$"):
        conditions("mixer=attention,mixer=mamba2")
    with pytest.raises(UserError, match=r'^--only "mixer": write key=value'):
        conditions("mixer")


def test_reported_runs_need_the_chosen_values() -> None:
    sweep = load(BASE + "sweep: {select: {axes: {train.lr: [0.1, 0.2]}, seeds: [9]}}\n")
    with pytest.raises(UserError, match=r"needs chosen values of \[train.lr\], got \[\]"):
        sweep.reported(sweep.cells()[0])
