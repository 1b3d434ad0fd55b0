"""Which rows are trained on at which step: a pure function of (task, training settings, seed).

A batch holds rows of one cell of the mixture, so that it has one shape. The order of the cells over the steps is a
property of the configuration, the same for all seeds: members of a stack must agree on the shape of a step. What
a seed moves is the rows themselves (unless `data_seed` fixes them) and the order of the rows within their cell.

    fixed set   every epoch visits each row once, in an order of its own; a remainder smaller than a batch waits
                for the next epoch's order. With explicit weights the cells are drawn by weight instead, and each
                cell goes through its own epochs.
    endless     cells are drawn by weight, and no row is ever seen twice
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from mixassay import draws
from mixassay.registry import bind
from mixassay.spec import TaskSpec, TrainSpec, task_cells
from mixassay.tasks import Openings, Rows, Task, task

ORDER = draws.stream("order")


@dataclass(frozen=True)
class Cell:
    """One cell of the mixture: its task, its number of rows (None: endless), and its share of the batches."""

    task: Task
    examples: int | None
    weight: float | None


class Stream:
    """`steps` batches of `batch_size` rows for each member of a stack."""

    def __init__(self, spec: TaskSpec, train: TrainSpec) -> None:
        self.batch_size, self.data_seed = train.batch_size, spec.data_seed
        self.cells = [Cell(make(spec.name, args), n, weight) for args, n, weight in task_cells(spec, "train")]
        which = self._order(train)
        self.steps = len(which)
        self._which: list[int] = which.tolist()
        self._turn: list[int] = turns(which, len(self.cells)).tolist()
        self._shuffled: dict[int, tuple[int, tuple[int, ...], Tensor]] = {}

    def task_at(self, step: int) -> Task:
        return self.cells[self._which[step]].task

    def cell_at(self, step: int) -> int:
        return self._which[step]

    def rows(self, step: int, seeds: tuple[int, ...], device: str, part: slice = slice(None)) -> Rows:
        """The batch of every member at `step`, [M * B] rows, members one after another; of each the rows `part`."""
        index, seed = self.numbers(step, seeds, device, part)
        return self.task_at(step).rows(index, seed=seed, split="train")

    def numbers(
        self, step: int, seeds: tuple[int, ...], device: str, part: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """Which rows of the task these are: their numbers and seeds, int64 [M * B] twice."""
        at, turn = self._which[step], self._turn[step]
        cell, B = self.cells[at], self.batch_size
        if cell.examples is None:
            index = torch.arange(turn * B, (turn + 1) * B, device=device).expand(len(seeds), B)
        else:
            epoch, batch = divmod(turn, cell.examples // B)
            index = self._permutation(at, epoch, seeds, device)[:, batch * B : (batch + 1) * B]
        index = index[:, part]
        drawn = seeds if self.data_seed is None else (self.data_seed,) * len(seeds)
        return index.flatten(), seeds_on(device, drawn).repeat_interleave(index.shape[1])

    def _permutation(self, at: int, epoch: int, seeds: tuple[int, ...], device: str) -> Tensor:
        """Row order of one epoch of a fixed set, [M, examples]; one epoch a cell is remembered."""
        known = self._shuffled.get(at)
        if known is None or known[:2] != (epoch, seeds):
            n = self.cells[at].examples
            assert n is not None
            order = draws.permutation(seeds_on(device, seeds), draws.stream("order", at), n, epoch)
            self._shuffled[at] = known = (epoch, seeds, order)
        return known[2]

    def _order(self, train: TrainSpec) -> Tensor:
        """int64 [steps]: the cell of every step."""
        weights = [cell.weight for cell in self.cells]
        batches = [cell.examples // self.batch_size for cell in self.cells if cell.examples is not None]
        per_epoch = sum(batches)
        steps = train.steps if train.steps is not None else (train.epochs or 0) * per_epoch
        if len(batches) == len(self.cells) and all(w is None for w in weights):
            deck = torch.repeat_interleave(torch.arange(len(batches)), torch.tensor(batches))
            epochs = [deck[draws.permutation(0, ORDER, per_epoch, epoch)] for epoch in range(-(-steps // per_epoch))]
            return torch.cat(epochs)[:steps]
        share = torch.tensor([1.0 if w is None else w for w in weights], dtype=torch.float64)
        edges = (share.cumsum(0) / share.sum() * 2**32).round().long()
        words = draws.bits(0, torch.arange(steps), ORDER, 1)[:, 0].contiguous()
        return torch.bucketize(words, edges, right=True).clamp(max=len(self.cells) - 1)


def changes(spec: TaskSpec) -> Openings | None:
    """What tells a model's mixers where segments begin, if the task's rows show it, in all cells alike."""
    kinds: tuple[Literal["train", "eval"], ...] = ("train", "eval")
    tasks = [make(spec.name, args) for kind in kinds for args, _, _ in task_cells(spec, kind)]
    found: set[Openings | None] = {getattr(x, "openings", None) for x in tasks}
    return found.pop() if len(found) == 1 else None


def decodes(spec: TaskSpec) -> bool:
    """Whether the task's answers are all read from one vector (`readout.py`)."""
    return bool(getattr(task[spec.name], "decodes", False))


@lru_cache(maxsize=8)
def seeds_on(device: str, seeds: tuple[int, ...]) -> Tensor:
    """int64 [M], made once: copying them to a GPU in every step would wait for it."""
    return torch.tensor(seeds, device=device)


def make(name: str, args: dict[str, object]) -> Task:
    return task[name](**bind(task[name], args))


def turns(which: Tensor, cells: int) -> Tensor:
    """How often the cell of each step was visited before: [0,1,0,0] -> [0,0,1,2]."""
    seen = torch.nn.functional.one_hot(which, cells).cumsum(0)
    return seen.gather(1, which[:, None])[:, 0] - 1
