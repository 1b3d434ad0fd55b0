"""Held-out rows of a language model: loss and accuracy of every cell, whole answers, bits a byte, loss by position."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mixassay.kernels.common.precision import cast, rounding
from mixassay.kernels.linear_cross_entropy import linear_cross_entropy_score
from mixassay.mixers import Mixer
from mixassay.model import Model
from mixassay.runners.lm.loss import LOGITS_AT_ONCE
from mixassay.runners.memory import in_batches
from mixassay.runners.stack import number
from mixassay.runners.stream import make
from mixassay.spec import TaskSpec, cell_labels, task_cells
from mixassay.tasks import IGNORE, Rows, Split

WINDOW = 501
"""Positions of the running mean of the loss, as in the log-linear paper; of short rows an eighth."""

POINTS = 128
"""Positions that a record keeps of it."""

TOKENS_AT_ONCE = 2**15


@dataclass(frozen=True)
class Questions:
    """The rows of one evaluation cell, on the CPU, and the values that tell it from the other cells."""

    label: dict[str, Any]
    rows: Rows


def questions(spec: TaskSpec, split: Split) -> list[Questions]:
    """The evaluation rows of a task, the same for every run."""
    index = torch.arange(spec.valid_examples if split == "valid" else spec.test_examples)
    cells = zip(task_cells(spec, "eval"), cell_labels(spec), strict=True)
    return [Questions(label, make(spec.name, args).rows(index, seed=0, split=split)) for (args, _, _), label in cells]


def evaluate(
    model: Model, asked: list[Questions], split: Split, device: str, precision: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, float]]:
    """A record's evaluation cells, its losses by position, and its metrics: means over the cells."""
    was = model.training
    model.eval()
    cells: list[dict[str, Any]] = []
    positions: list[dict[str, Any]] = []
    metrics: list[tuple[str, float]] = []
    for cell in asked:
        loss, right = score(model, cell.rows, device, precision)  # [N, T]
        found = summary(cell.rows, loss, right)
        cells.append({"split": split, "cell": cell.label} | found)
        for name in ("accuracy", "loss", "answer_accuracy"):
            if found.get(name) is not None:
                metrics.append((f"{split}/{name}", found[name]))
        if bool((cell.rows.labels != IGNORE).all()):
            positions.append({"split": split, "cell": cell.label} | by_position(loss.mean(0)))
        if "bytes" in cell.rows.slices:
            bits = loss.sum().item() / math.log(2) / int(cell.rows.slices["bytes"].sum())
            metrics.append((f"{split}/bits_per_byte", bits))
    model.train(was)
    return cells, positions, means(metrics)


def means(found: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Of all values of a name."""
    by_name: dict[str, list[float]] = {}
    for name, value in found:
        by_name.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in by_name.items()}


@torch.no_grad()
def observe(model: Model, asked: list[Questions], split: Split, device: str, precision: str) -> dict[str, float]:
    """What the mixers say of themselves (`Mixer.observe`), as `split/NAME`: means over layers, rows and cells."""
    if all(type(inner).observe is Mixer.observe for inner in model.mixers()):
        return {}
    was = model.training
    model.eval()
    cells = [means(_said(model, cell.rows.tokens, device, precision)) for cell in asked]
    model.train(was)
    return means((f"{split}/{name}", value) for cell in cells for name, value in cell.items())


def _said(model: Model, tokens: Tensor, device: str, precision: str) -> list[tuple[str, float]]:
    """By every layer about every batch, all of one size but where memory runs out."""
    said: list[tuple[str, float]] = []

    def work(batch: Sequence[int]) -> None:
        new: list[tuple[str, float]] = []

        def look(inner: Mixer, given: tuple[Tensor, ...]) -> None:
            new.extend((name, number(inner, name, value)) for name, value in inner.observe(*given).items())

        with rounding(precision), cast(device, precision), model.watched(look):
            here = tokens[batch[0] : batch[-1] + 1].to(device)
            model(here, torch.zeros_like(here[:, :1]))
        said.extend(new)

    rows = max(1, TOKENS_AT_ONCE // tokens.shape[1])
    in_batches(range(min(len(tokens), rows)), rows, work)
    return said


@torch.no_grad()
def score(model: Model, rows: Rows, device: str, precision: str) -> tuple[Tensor, Tensor]:
    """Loss float64 [N, T], 0 where nothing is scored, and whether the likeliest token is right, on the CPU."""
    N, T = rows.tokens.shape
    labels = rows.targets()
    losses: list[Tensor] = []
    rights: list[Tensor] = []

    def work(batch: Sequence[int]) -> None:
        part = slice(batch[0], batch[-1] + 1)
        its = labels[part].to(device)

        def head(h: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            size = max(1, LOGITS_AT_ONCE // len(weight))
            pieces = zip(torch.split(h.flatten(0, 1), size), torch.split(its.flatten(), size), strict=True)
            made = [linear_cross_entropy_score(h, weight, y, ignore_index=IGNORE) for h, y in pieces]
            loss, right = (torch.cat(x).view_as(its) for x in zip(*made, strict=True))
            return loss, right

        with rounding(precision), cast(device, precision):
            loss, right = model(rows.tokens[part].to(device), head=head)
        loss, right = loss.double().cpu(), right.cpu()
        losses.append(loss)
        rights.append(right)

    in_batches(range(N), max(1, TOKENS_AT_ONCE // T), work)
    return torch.cat(losses), torch.cat(rights)


def summary(rows: Rows, loss: Tensor, right: Tensor) -> dict[str, Any]:
    """Means over the scored positions, and over the answers where there are any."""
    labelled = rows.targets() != IGNORE
    scored = int(labelled.sum())
    found: dict[str, Any] = {
        "rows": len(labelled),
        "scored": scored,
        "accuracy": int((right & labelled).sum()) / scored,
        "loss": loss.sum().item() / scored,
    }
    if not bool(labelled.all()):
        found["answer_accuracy"] = answer_accuracy(labelled, right)
    return found


def answer_accuracy(labelled: Tensor, right: Tensor) -> float:
    """Share of unbroken stretches of scored positions that are right throughout, all bool [N, T]: what greedy
    generation from the prompt would write word for word."""
    before = torch.nn.functional.pad(labelled, (1, 0))[:, :-1]
    begins = labelled & ~before
    number = begins.flatten().cumsum(0) - 1  # of the stretch that a position is in
    wrong = torch.zeros(int(begins.sum()), dtype=torch.bool)
    wrong[number[(labelled & ~right).flatten()]] = True
    return 1 - wrong.double().mean().item()


def by_position(loss: Tensor) -> dict[str, Any]:
    """The mean loss of every position [T] -> its running mean at some of them, cut short at both ends."""
    T = len(loss)
    window = min(WINDOW, max(1, T // 8) | 1)
    total = torch.nn.functional.pad(loss.cumsum(0), (1, 0))
    at = torch.linspace(0, T - 1, min(POINTS, T)).round().long()
    first, last = (at - window // 2).clamp(min=0), (at + window // 2 + 1).clamp(max=T)
    means = (total[last] - total[first]) / (last - first)
    return {"window": window, "at": at.tolist(), "loss": means.tolist()}
