"""A task asks questions: rows of tokens, and at some positions the token that must be predicted there.

A task is a frozen dataclass whose fields are its YAML keys. Its rows are stateless: row `i` of (task, seed, split)
is a pure function of these, the same bits on every device and in any batch. Tasks know nothing of mixers.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from mixassay import draws
from mixassay.registry import Registry

IGNORE = -100
"""Label of a position that is not scored (PyTorch's own convention)."""

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")


@dataclass(frozen=True)
class Rows:
    """N rows of T tokens with Q scored positions each.

    tokens: int64 [N, T]. positions: int64 [N, Q], where a prediction is scored. labels: int64 [N, Q], the right
    token there, or IGNORE in a place that a row with fewer questions leaves empty (its position is then 0).
    slices: named int64 [N] or [N, Q] by which results may be split (e.g. distance to the answer).
    """

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    slices: dict[str, Tensor] = field(default_factory=dict)

    def targets(self) -> Tensor:
        """Dense labels int64 [N, T], IGNORE wherever nothing is scored."""
        N, T = self.tokens.shape
        dense = self.tokens.new_full((N, T + 1), IGNORE)
        at = self.positions.masked_fill(self.labels == IGNORE, T)  # empty places go to a spare column
        return dense.scatter(1, at, self.labels)[:, :-1].contiguous()

    def map(self, fn: Callable[[Tensor], Tensor]) -> "Rows":
        """`fn` on every tensor: `rows.map(lambda x: x[:8])`, `rows.map(torch.Tensor.cuda)`."""
        return Rows(fn(self.tokens), fn(self.positions), fn(self.labels), {k: fn(v) for k, v in self.slices.items()})

    def tensors(self) -> list[Tensor]:
        return [self.tokens, self.positions, self.labels, *self.slices.values()]


Openings = Callable[[Tensor], Tensor]
"""Tokens int64 [N, T] -> bool [N, T], where the segments of these rows begin. A task whose rows show it may have one as
its attribute `openings`; two that compare equal say the same."""


@runtime_checkable
class Task(Protocol):
    """What the runners ask of a task. Raise `UserError` in `__post_init__` for values that cannot be generated."""

    version: ClassVar[int]  # raised whenever the same arguments give other bits

    @property
    def vocab_size(self) -> int: ...

    @property
    def seq_len(self) -> int: ...

    def rows(self, index: Tensor, *, seed: int | Tensor, split: Split) -> Rows:
        """Rows `index` int64 [N], on `index.device`. `seed` is one int, or int64 [N] with one seed per row.

        Validation and test rows are asked for with seed 0 whatever the run's seed: all runs face the same questions.
        """
        ...


def draw_rows(
    draw: Callable[[Tensor], Rows], words: int, index: Tensor, *, seed: int | Tensor, split: Split, stream: int
) -> Rows:
    """Rows of a task from `draw`, a function of `words` random 32-bit words a row, int64 [n, words] -> n Rows.

    Row numbers stay below 2^61; the bits above hold the split, so that no two splits ever share a word. A big
    request is drawn in pieces that fit the cache, straight into the tensors that are returned.
    """
    counter = index + (SPLITS.index(split) << 61)
    size = max(1, draws.piece(index.device) // words)

    def some(here: slice) -> Rows:
        return draw(draws.bits(seed if isinstance(seed, int) else seed[here], counter[here], stream, words))

    if len(index) <= size:
        return some(slice(None))
    out = some(slice(1)).map(lambda x: x.new_empty(len(index), *x.shape[1:]))

    def fill(start: int) -> None:
        here = slice(start, start + size)
        for whole, part in zip(out.tensors(), some(here).tensors(), strict=True):
            whole[here] = part

    each(fill, range(0, len(index), size), index.device)
    return out


def each(work: Callable[[int], None], items: Iterable[int], device: torch.device) -> None:
    """`work` on every item; on the CPU one core an item.

    PyTorch's own threads share every operation and wait at its end for the slowest: on a busy machine that costs
    more than the work, which is thousands of operations of some ten microseconds.
    """
    if device.type != "cpu":
        for item in items:
            work(item)
        return
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(work, items))  # the list raises what a piece raised
    finally:
        torch.set_num_threads(threads)  # the number is also the default of threads yet to come


task: Registry[type[Task]] = Registry("task", "mixassay.tasks")
