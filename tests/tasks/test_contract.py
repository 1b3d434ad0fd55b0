"""What every task owes its users: rows that are pure functions of (task, seed, split, index), and well-formed.

Cells are small, and cover every branch of a task. What a row means is tested task by task.
"""

import doctest
import hashlib
import importlib
from dataclasses import fields
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from mixassay import draws
from mixassay.registry import arguments
from mixassay.tasks import IGNORE, SPLITS, Rows, Split, Task, task

CELLS: dict[str, list[dict[str, Any]]] = {
    "niah": [
        {"seq_len": 40},
        {"seq_len": 40, "keys": 4, "depth": 25},
        {"seq_len": 40, "keys": 4, "queries": 3, "filler": "repeated"},
        {"seq_len": 41, "keys": 2, "values": 3, "queries": 2, "filler": "text"},
        {"seq_len": 40, "keys": 2, "filler": "needles", "depth": 100},
    ],
    "in_context_recall": [{"seq_len": 40}, {"vocab_size": 5, "seq_len": 40, "train_on": "answers"}],
    "noisy_recall": [{"seq_len": 40}, {"seq_len": 40, "noise": 1, "train_on": "answers"}],
    "fuzzy_recall": [{"seq_len": 50}, {"vocab_size": 9, "seq_len": 51, "key_len": 1, "value_len": 4}],
    "selective_copying": [{"seq_len": 41}, {"vocab_size": 4, "seq_len": 81, "num_copy": 40}],
    "compression": [{}, {"vocab_size": 3, "seq_len": 40}],
    "memorization": [{}, {"vocab_size": 8, "seq_len": 40}],
    "key_update": [
        {"seq_len": 80},
        {"seq_len": 72, "filler": "zero", "ask": "updated"},
        {"vocab_size": 32, "seq_len": 40, "num_kv": 8, "filler": "random_no_keys", "ask": "untouched"},
    ],
    "compositional_recall": [
        {"seq_len": 40},
        {"seq_len": 31, "filler": "zero"},
        {"vocab_size": 30, "seq_len": 61, "grid": 3, "filler": "random_no_keys"},
    ],
    "induction_heads": [{"seq_len": 40}, {"vocab_size": 3, "seq_len": 64}],
    "modular_arithmetic": [{"min_len": 36}, {"min_len": 38, "ask": "every", "modulus": 7}],
    "word_problem": [{"group": "S3"}, {"group": "A4xZ5", "seq_len": 17}, {"group": "S5", "moved": 2}],
    "parity": [{"min_len": 30}, {"ask": "every", "min_len": 39}],
}
"""Name -> what to set; the first cell is the one of which every field is changed in turn."""

CHANGES: dict[str, dict[str, Any]] = {
    "niah": {"filler": "text", "depth": 50.0, "queries": 1, "keys": 2, "values": 2},
    "in_context_recall": {"train_on": "answers", "seq_len": 42},
    "noisy_recall": {"train_on": "answers", "seq_len": 42, "noise": 0.3},
    "fuzzy_recall": {"train_on": "answers"},
    "memorization": {"seq_len": 34},
    "key_update": {"seq_len": 82, "power_a": 0.5, "filler": "zero"},
    "compositional_recall": {"power_a": 0.5, "filler": "zero", "grid": 1},
    "modular_arithmetic": {"seq_len": 42, "min_len": 38, "ask": "every"},
    "word_problem": {"group": "Z6", "moved": 2},
    "parity": {"ask": "every"},
}
"""Other values of fields that do not become others by adding 1."""

APART = {"niah": ["queries"], "key_update": ["ask"]}
"""Fields that cannot move on their own in the first cell, or that move no token."""

PINNED = {
    "niah": "5b14217f384895ae",
    "in_context_recall": "28ffeb8bd55b4eb3",
    "noisy_recall": "c1f96630eb58abd4",
    "fuzzy_recall": "6e26e08c71e6e56b",
    "selective_copying": "38e6acdda1e7a4ad",
    "compression": "bf056c1efe8798f4",
    "memorization": "d86be8b7085592e1",
    "key_update": "0f2b436a973452b5",
    "compositional_recall": "e8772aca8b588e8f",
    "induction_heads": "def1dc49a5d41f44",
    "modular_arithmetic": "32e980c6594d48cf",
    "word_problem": "46900f7e7e0ee3d1",
    "parity": "8bb6d5065b5fa16d",
}
"""Hash of rows of version 1. If one fails, the same arguments give other rows: raise the task's version."""


def made(name: str, given: dict[str, Any]) -> Task:
    cell: Task = task[name](**given)
    return cell


each_cell = pytest.mark.parametrize(
    "cell",
    [
        pytest.param(made(name, given), id="-".join([name, *(f"{k}={v}" for k, v in given.items())]))
        for name, some in CELLS.items()
        for given in some
    ],
)
each_task = pytest.mark.parametrize("name", CELLS)


def rows(cell: Task, n: int | Tensor = 50, seed: int | Tensor = 3, split: Split = "train") -> Rows:
    return cell.rows(torch.arange(n) if isinstance(n, int) else n, seed=seed, split=split)


def same(a: Rows, b: Rows) -> bool:
    return a.slices.keys() == b.slices.keys() and all(map(torch.equal, a.tensors(), b.tensors()))


@each_cell
def test_a_row_is_the_same_in_any_company(cell: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    shuffled = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    for split in SPLITS:
        whole = rows(cell, 30, split=split)
        assert same(rows(cell, shuffled, split=split), whole.map(lambda x: x[shuffled]))
        assert same(rows(cell, torch.tensor([29]), split=split), whole.map(lambda x: x[29:]))
        with monkeypatch.context() as patch:
            patch.setattr(draws, "piece", lambda device: 1500)  # rows are drawn a few at a time
            assert same(rows(cell, 30, split=split), whole)


@each_cell
def test_seeds_can_be_given_row_by_row(cell: Task) -> None:
    seeds = torch.tensor([0, 1, 2**40]).repeat_interleave(5)
    mixed = rows(cell, torch.arange(5).repeat(3), seed=seeds)
    for at, seed in enumerate((0, 1, 2**40)):
        assert same(mixed.map(lambda x, at=at: x[5 * at : 5 * at + 5]), rows(cell, 5, seed=seed))


@each_cell
def test_splits_and_seeds_share_no_row(cell: Task) -> None:
    """The last row numbers of a split do not run into the first of the next."""
    index = torch.cat((torch.arange(100), torch.tensor([2**60, 2**61 - 1])))
    drawn = [rows(cell, index, seed, split).tokens for split in SPLITS for seed in (0, 1)]
    assert len({tuple(row) for tokens in drawn for row in tokens.tolist()}) == 6 * 102


@each_cell
def test_global_generators_neither_matter_nor_move(cell: Task) -> None:
    before = torch.get_rng_state()
    first = rows(cell, 10)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    assert same(first, rows(cell, 10))


@each_cell
def test_rows_are_well_formed(cell: Task) -> None:
    assert isinstance(cell, Task)
    for split in SPLITS:
        drawn = rows(cell, 200, split=split)
        assert all(x.dtype == torch.int64 for x in drawn.tensors())
        assert drawn.tokens.shape == (200, cell.seq_len)
        assert drawn.positions.shape == drawn.labels.shape
        assert drawn.tokens.min() >= 0
        assert drawn.tokens.max() < cell.vocab_size
        scored = drawn.labels != IGNORE
        assert scored.any(), "something is asked"
        assert (drawn.labels[scored] >= 0).all()
        assert (drawn.labels[scored] < cell.vocab_size).all()
        assert drawn.positions.min() >= 0
        assert drawn.positions.max() < cell.seq_len
        assert not drawn.positions[~scored].any(), "empty places point at 0"
        for values in drawn.slices.values():
            assert values.shape in (drawn.labels.shape, (200,))
            assert values.min() >= 0
        none = rows(cell, 0, split=split)
        assert [x.shape[1:] for x in none.tensors()] == [x.shape[1:] for x in drawn.tensors()]


@each_task
def test_every_field_gives_other_rows(name: str) -> None:
    """Also where the field says nothing about a token: cells of a mixture share no rows."""
    cls, given = task[name], CELLS[name][0]
    ours = made(name, given)
    for field in fields(cls):  # type: ignore[arg-type]  # tasks are dataclasses
        if field.name in APART.get(name, ()):
            continue
        other = CHANGES.get(name, {}).get(field.name, getattr(ours, field.name))
        other = other if other != getattr(ours, field.name) else getattr(ours, field.name) + 1
        theirs = made(name, given | {field.name: other})
        T = min(ours.seq_len, theirs.seq_len)
        pairs = [rows(cell, 40).tokens[:, :T].tolist() for cell in (ours, theirs)]
        assert pairs[0] != pairs[1], field.name


@each_task
def test_rows_are_pinned(name: str) -> None:
    assert task[name].version == 1
    found = hashlib.sha256()
    for given in CELLS[name]:
        for split in SPLITS:
            for tensor in rows(made(name, given), torch.tensor([0, 1, 2**33]), seed=5, split=split).tensors():
                found.update(tensor.numpy().astype("<i8").tobytes())
    assert found.hexdigest()[:16] == PINNED[name]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@each_cell
def test_rows_are_the_same_bits_on_the_gpu(cell: Task) -> None:
    index = torch.arange(500) * 7919
    for split in SPLITS:
        there = rows(cell, index.cuda(), split=split)
        assert all(x.is_cuda for x in there.tensors())
        assert same(there.map(Tensor.cpu), rows(cell, index, split=split))


@each_task
def test_the_signature_is_the_schema(name: str) -> None:
    cls = task[name]
    assert vars(arguments(cls)(**CELLS[name][0])).items() >= CELLS[name][0].items()
    for wrong in ({"seq_lens": 4}, {"seq_len": "4"}):
        with pytest.raises(ValidationError):
            arguments(cls)(**wrong)


@each_task
def test_the_examples_in_the_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(task[name].__module__), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0
    assert result.failed == 0
