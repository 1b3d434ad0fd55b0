"""A task as a Hugging Face dataset, for trainers that are not ours.

Our runs need none: rows are a pure function of (task, seed, split). What is written is read back and compared with
the rows that a run is asked. Splits: `train`, `validation`, `test`. Columns of a row:

    cell, index            the cell of the mixture, counted from 0, and the row's number in it
    tokens                 [T]
    positions, labels      [Q]: after reading tokens[: p + 1] the right prediction is the label; -100 where a row has
                           fewer questions than others
    slices.NAME            [Q] or one number, as in `Rows.slices`

The description is JSON: the task with its version, the seed, and the arguments of each cell.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mixassay.errors import UserError
from mixassay.runners.extras import need
from mixassay.runners.stream import make
from mixassay.spec import TaskCell, TaskSpec, task_cells
from mixassay.tasks import Rows, Split, task

NAMES: dict[Split, str] = {"train": "train", "valid": "validation", "test": "test"}


def write(spec: TaskSpec, folder: Path, *, seed: int, rows: int | None = None) -> dict[str, int]:
    """Write the task's dataset to a new folder; the number of rows of each split. `rows`: of each train cell.

    Training rows are those of a run with this seed (or of the task's `data_seed`). Raises `UserError` for an endless
    task without `rows`, a folder that is in use, and rows that do not read back the same.
    """
    datasets = need("datasets", "export", "a Hugging Face dataset")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already and not empty; choose another folder")
    about = {
        "mixassay": f"{spec.name}/{task[spec.name].version}",
        "task": spec.model_dump(mode="json"),
        "seed": seed if spec.data_seed is None else spec.data_seed,
        "cells": {NAMES[split]: [cell.args for cell in _cells(spec, split)] for split in NAMES},
    }
    whole = datasets.DatasetDict()
    for split, name in NAMES.items():
        parts = [_table(n, found) for n, found in enumerate(_drawn(spec, split, seed, rows))]
        whole[name] = datasets.concatenate_datasets(parts)
        whole[name].info.description = json.dumps(about)
    with _quiet(datasets):
        try:
            whole.save_to_disk(str(folder))
            stored = datasets.load_from_disk(str(folder))
        except OSError as problem:
            raise UserError(f"cannot write to {folder}: {problem.strerror or problem}") from problem
    for split, name in NAMES.items():
        for n, expected in enumerate(_drawn(spec, split, seed, rows)):
            found = rows_of(stored[name], n)
            if not all(torch.equal(a, b) for a, b in zip(found.tensors(), expected.tensors(), strict=True)):
                shutil.rmtree(folder)
                raise UserError(f"split {name}, cell {n} did not read back the same; nothing is left in {folder}")
    return {name: len(stored[name]) for name in NAMES.values()}


def rows_of(part: Any, cell: int) -> Rows:
    """The rows of one cell, from a split of the dataset."""
    starts = torch.tensor(part.with_format("numpy", columns=["cell"])[:]["cell"])
    own = (starts == cell).nonzero().flatten().tolist()
    columns = part.select(range(own[0], own[-1] + 1)).with_format("torch")[:]  # a cell's rows stand together
    slices = {name.removeprefix("slices."): columns[name] for name in columns if name.startswith("slices.")}
    return Rows(columns["tokens"], columns["positions"], columns["labels"], slices)


def _cells(spec: TaskSpec, split: Split) -> list[TaskCell]:
    return task_cells(spec, "train" if split == "train" else "eval")


def _drawn(spec: TaskSpec, split: Split, seed: int, rows: int | None) -> Iterator[Rows]:
    """The rows of each cell, as `stream.Stream` and `evaluate.questions` draw them."""
    for cell in _cells(spec, split):
        if split == "train":
            n = rows or cell.examples
            drawn = seed if spec.data_seed is None else spec.data_seed
        else:
            n, drawn = spec.valid_examples if split == "valid" else spec.test_examples, 0
        if n is None:
            raise UserError("task.train_examples is endless: say how many training rows are wanted, --rows 10000")
        yield make(spec.name, cell.args).rows(torch.arange(n), seed=drawn, split=split)


def _table(cell: int, rows: Rows) -> Any:
    datasets = need("datasets", "export", "a Hugging Face dataset")
    n = len(rows.tokens)
    tensors = {"tokens": rows.tokens, "positions": rows.positions, "labels": rows.labels}
    tensors |= {f"slices.{name}": values for name, values in rows.slices.items()}
    number = datasets.Value("int64")
    kinds = {name: number if t.ndim == 1 else datasets.List(number) for name, t in tensors.items()}
    columns = {"cell": [cell] * n, "index": range(n)} | {name: list(t.numpy()) for name, t in tensors.items()}
    features = datasets.Features({"cell": number, "index": number, **kinds})
    return datasets.Dataset.from_dict(columns, features=features)


@contextlib.contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Without its progress bars, which are on unless a user has turned them off."""
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
