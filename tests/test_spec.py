"""The contract of a run: every field counts, cells and labels, and the hashes that pair runs."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from mixassay.fields import SECTIONS, inner_model, known_paths
from mixassay.spec import (
    MEMBER_FIELDS,
    MixerSpec,
    ModelSpec,
    RunSpec,
    Stop,
    TaskCell,
    TaskSpec,
    TrainSpec,
    cell_labels,
    digest,
    mixer_labels,
    problems,
    task_cells,
)

ROOT = Path(__file__).parents[1]

OTHER: dict[str, Any] = {
    "task": {"name": "niah"},
    "task.name": "niah",
    "task.train_examples": 10,
    "task.valid_examples": 10,
    "task.test_examples": 10,
    "task.train_cells": [{"num_kv": 3}],
    "task.eval_cells": [{"num_kv": 3}],
    "task.data_seed": 1,
    "mixer": {"name": "mamba2"},
    "mixer.name": "mamba2",
    "model": {"n_layers": 3},
    "model.n_layers": 3,
    "model.d_model": 8,
    "model.block": "swiglu",
    "model.hybrid": {"name": "mamba2"},
    "model.hybrid.name": "mamba2",
    "model.positions": "learned",
    "model.dropout": 0.5,
    "model.mlp_ratio": 2.0,
    "train": {"steps": 3},
    "train.steps": 3,
    "train.epochs": 3,
    "train.batch_size": 3,
    "train.lr": 0.5,
    "train.weight_decay": 0.5,
    "train.decay": "all",
    "train.betas": [0.5, 0.5],
    "train.schedule": "linear",
    "train.warmup": 0.5,
    "model.init_std": 0.1,
    "train.clip": 0.5,
    "train.precision": "bf16",
    "train.eval_every": 3,
    "train.loop": "lm",
    "train.stop": {"above": 0.5},
    "train.stop.metric": "valid/loss",
    "train.stop.above": 0.5,
    "train.stop.below": 0.5,
}
"""For each config path another value than that of `run()`."""


def run(**parts: Any) -> RunSpec:
    sections: dict[str, Any] = {
        "task": TaskSpec(name="mqar", num_kv=4),  # type: ignore[call-arg]
        "mixer": MixerSpec(name="attention"),
        "model": ModelSpec(hybrid=MixerSpec(name="base_conv")),
        "train": TrainSpec(steps=10, stop=Stop(above=0.9, below=None)),
        "suite": "demo",
        "seed": 0,
    }
    return RunSpec(**sections | parts)


def test_a_field_at_its_default_leaves_the_hashes_alone() -> None:
    assert run().cell == run(model=ModelSpec(hybrid=MixerSpec(name="base_conv"), dropout=0.0)).cell
    assert '"dropout":0.0' in run().model_dump_json()


def test_the_list_of_other_values_is_whole() -> None:
    assert set(OTHER) == set(known_paths())


@pytest.mark.parametrize("path", OTHER)
def test_changing_any_field_changes_cell_and_stack(path: str) -> None:
    changed = run().having({path: OTHER[path]})
    assert changed != run()
    assert changed.cell != run().cell
    same_stack = path.removeprefix("train.") in MEMBER_FIELDS
    assert (changed.stack == run().stack) is same_stack


@pytest.mark.parametrize("path", [path for path in OTHER if "." in path and path != "task.name"])
def test_a_tuned_field_does_not_change_the_cell(path: str) -> None:
    tuned = [run(tuned={path: value}).having({path: value}) for value in (OTHER[path],)]
    assert {one.cell for one in tuned} == {run(tuned={path: None}).cell}


def test_seed_role_suite_and_axes_do_not_change_the_cell() -> None:
    others = [run(seed=5), run(role="tune"), run(suite="other"), run(axes={"model.d_model": 64})]
    assert {one.cell for one in others} == {run().cell}
    assert {one.stack for one in others} == {run().stack}


def test_every_field_is_read_by_the_code_that_runs() -> None:
    """A setting that nobody reads is a setting that lies."""
    read: set[str] = set()
    for path in (*ROOT.glob("runners/*.py"), ROOT / "src/mixassay/model.py", ROOT / "src/mixassay/spec.py"):
        tree = ast.parse(path.read_text())
        read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}

    def unread(model: type[BaseModel]) -> list[str]:
        inner = [found for f in model.model_fields.values() if (found := inner_model(f.annotation))]
        below = [name for one in inner for name in unread(one)]
        return [f"{model.__name__}.{name}" for name in model.model_fields if name not in read] + below

    assert [name for model in SECTIONS.values() for name in unread(model)] == []


def test_a_run_survives_json() -> None:
    one = run(tuned={"train.lr": 1e-3}, axes={"mixer": {"name": "gla", "expand_k": 0.5}})
    assert RunSpec.model_validate_json(one.model_dump_json()) == one


def test_having_validates() -> None:
    with pytest.raises(ValidationError):
        run().having({"train.lr": -1})


def test_digest_knows_neither_key_order_nor_how_a_number_is_written() -> None:
    assert digest({"a": 1, "b": [2.0, 0.5]}) == digest({"b": [2, 0.5], "a": 1.0})
    assert digest({"a": 1}) != digest({"a": True})
    assert digest({"a": 1}) != digest({"a": "1"})
    assert digest([1, 2]) != digest([2, 1])
    with pytest.raises(ValueError, match="not JSON compliant"):
        digest(float("nan"))


def test_steering_by_test_metrics_is_refused_in_python_too() -> None:
    with pytest.raises(ValidationError, match="biases the report"):
        Stop(metric="test/accuracy", above=0.9)  # type: ignore[arg-type]


def task(**parts: Any) -> TaskSpec:
    return TaskSpec.model_validate_json(json.dumps({"name": "mqar", "vocab_size": 64, **parts}))


def test_a_task_without_cells_is_one_cell() -> None:
    assert task_cells(task(num_kv=4), "train") == [TaskCell({"vocab_size": 64, "num_kv": 4}, None, None)]
    assert task_cells(task(train_examples=50), "train") == [TaskCell({"vocab_size": 64}, 50, None)]
    assert task_cells(task(train_examples=50), "eval") == [TaskCell({"vocab_size": 64}, None, None)]


def test_cells_override_arguments_and_carry_their_shares() -> None:
    mixture = task(
        seq_len=32,
        train_examples=50,
        train_cells=[{"num_kv": 2, "weight": 3}, {"num_kv": 4, "seq_len": 64, "examples": 7}],
    )
    assert task_cells(mixture, "train") == [
        TaskCell({"vocab_size": 64, "seq_len": 32, "num_kv": 2}, 50, 3),
        TaskCell({"vocab_size": 64, "seq_len": 64, "num_kv": 4}, 7, None),
    ]
    assert task_cells(mixture, "eval") == [
        TaskCell({"vocab_size": 64, "seq_len": 32, "num_kv": 2}, None, None),
        TaskCell({"vocab_size": 64, "seq_len": 64, "num_kv": 4}, None, None),
    ]
    apart = task(train_cells=[{"num_kv": 2}], eval_cells=[{"num_kv": 8}])
    assert [cell.args["num_kv"] for cell in task_cells(apart, "eval")] == [8]


def test_labels_hold_what_differs() -> None:
    assert cell_labels(task(num_kv=4)) == [{}]
    assert cell_labels(task(eval_cells=[{"num_kv": 2, "seq_len": 64}, {"num_kv": 4, "seq_len": 64}])) == [
        {"num_kv": 2},
        {"num_kv": 4},
    ]
    assert cell_labels(task(num_kv=4, eval_cells=[{}, {"seq_len": 64}, {"num_kv": 8}])) == [
        {"num_kv": 4},
        {"num_kv": 4, "seq_len": 64},
        {"num_kv": 8},
    ]


def mixers(*data: Any) -> list[MixerSpec]:
    return [MixerSpec.model_validate_json(json.dumps(one if isinstance(one, dict) else {"name": one})) for one in data]


def test_mixers_are_labelled_by_what_they_do_not_share() -> None:
    gla = {"name": "gla", "expand_k": 0.5, "gate": True}
    assert mixer_labels(mixers("attention", gla)) == ["attention", "gla expand_k=0.5 gate=true"]
    assert mixer_labels(mixers(gla, gla | {"expand_k": 1})) == ["gla expand_k=0.5", "gla expand_k=1"]
    assert mixer_labels(mixers(gla)) == ["gla"]
    assert mixer_labels(mixers(gla, gla | {"expand_k": 1}), hide=["expand_k"]) == ["gla", "gla"]
    assert mixer_labels([]) == []


def test_a_right_run_has_no_problems() -> None:
    assert list(problems(run())) == []
    fixed = task(train_cells=[{"num_kv": 2, "examples": 100}, {"num_kv": 3, "examples": 200}])
    assert list(problems(run(task=fixed, train=TrainSpec(epochs=2)))) == []
