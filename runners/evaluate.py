"""Scores a stack on validation or test rows, cell by cell.

All runs face the same questions: these rows depend on (task, split) alone, never on a seed. A prediction is the
argmax over the whole vocabulary at a scored position; accuracy and loss are means over the scored positions of a
cell, and a run's number is the mean over cells.
"""

from dataclasses import dataclass
from typing import Any

import torch

from mixassay.kernels.common.registered import against_triton
from mixassay.runners.stack import Stack
from mixassay.runners.stream import make
from mixassay.spec import TaskSpec, cell_labels, task_cells
from mixassay.tasks import IGNORE, Rows, Split, Task

LOGITS_AT_ONCE = 2**24
"""Logits held at a time in an evaluation, over all models: 64 MiB in float32."""

ACTIVATIONS_AT_ONCE = 2**27
"""On a GPU, where logits are not held and few calls are wanted: numbers of one layer, over all models."""


@dataclass(frozen=True)
class Questions:
    """The rows of one evaluation cell and the values that tell it from the other cells."""

    label: dict[str, Any]
    task: Task
    rows: Rows


def questions(spec: TaskSpec, split: Split, device: str) -> list[Questions]:
    """The evaluation rows of a task, the same for every run."""
    n = spec.valid_examples if split == "valid" else spec.test_examples
    index = torch.arange(n, device=device)
    found = []
    for (args, _, _), label in zip(task_cells(spec, "eval"), cell_labels(spec), strict=True):
        asked = make(spec.name, args)
        found.append(Questions(label, asked, asked.rows(index, seed=0, split=split)))
    return found


def evaluate(
    stack: Stack, asked: list[Questions], split: Split, rows: list[int], *, soft: bool = False
) -> list[list[dict[str, Any]]]:
    """For each of the models `rows` a list with one entry per cell: split, cell, rows, scored, accuracy, loss."""
    results: list[list[dict[str, Any]]] = [[] for _ in rows]
    for cell in asked if rows else []:
        hits, loss, scored = score(stack, cell.rows, cell.task.vocab_size, rows, soft)
        for i, result in enumerate(results):
            result.append(
                {
                    "split": split,
                    "cell": cell.label,
                    "rows": cell.rows.tokens.shape[0],
                    "scored": scored,
                    "accuracy": hits[i] / scored,
                    "loss": loss[i] / scored,
                }
            )
    return results


def score(
    stack: Stack, asked: Rows, vocab_size: int, rows: list[int], soft: bool = False
) -> tuple[list[float], list[float], int]:
    """Right answers and summed loss of each model, and the number of scored positions."""
    (N, Q), M = asked.labels.shape, len(rows)
    logits_of_row, activations_of_row = Q * vocab_size, asked.tokens.shape[1] * 64  # few labels: the body is larger
    batch = max(1, LOGITS_AT_ONCE // (M * max(logits_of_row, activations_of_row)))
    if stack.params.is_cuda and against_triton(stack.params) is None:
        batch = max(batch, ACTIVATIONS_AT_ONCE // (M * activations_of_row))
    hits = stack.params.new_zeros(M, dtype=torch.int64)
    loss = stack.params.new_zeros(M, dtype=torch.float64)
    for start in range(0, N, batch):
        part = slice(start, start + batch)
        those = asked.tokens[part], asked.positions[part], asked.labels[part]
        each, right = stack.scores(*those, rows, soft=soft)  # [M, B, Q]
        hits += right.flatten(1).sum(1)
        loss += each.flatten(1).double().sum(1)
    return hits.tolist(), loss.tolist(), int((asked.labels != IGNORE).sum())


OBSERVED = 64
"""Rows of each cell that the mixers' own numbers are taken from."""


def observe(stack: Stack, asked: list[Questions], split: Split, rows: list[int]) -> list[dict[str, float]]:
    """For each of the models `rows` what its mixers say of themselves, as `split/NAME`: means over layers and cells."""
    cells = [stack.observe(cell.rows.tokens[:OBSERVED], rows) for cell in asked]
    found = [
        {f"{split}/{name}": sum(said[i][name] for said in cells) / len(cells) for name in cells[0][i]}
        for i in range(len(rows))
    ]
    if stack.softens:
        for said, soft in zip(found, evaluate(stack, asked, split, rows, soft=True), strict=True):
            said[f"{split}/soft_accuracy"] = means(soft, split)[f"{split}/accuracy"]
    return found


def means(cells: list[dict[str, Any]], split: Split) -> dict[str, float]:
    """`split/accuracy` and `split/loss`, averaged over the cells."""
    return {f"{split}/{name}": sum(c[name] for c in cells) / len(cells) for name in ("accuracy", "loss")}
