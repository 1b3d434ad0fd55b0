"""Batches that are halved where memory runs out: with other processes on a GPU, what fits is not known beforehand."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


def out_of_memory(problem: BaseException) -> bool:
    """Of the accelerator or of the machine; torch names both only in words where it has no class for them."""
    text = str(problem)
    return (
        isinstance(problem, MemoryError)
        or type(problem).__name__ == "OutOfMemoryError"
        or (isinstance(problem, RuntimeError) and ("DefaultCPUAllocator" in text or "out of memory" in text))
    )


def in_batches(items: Sequence[T], size: int, work: Callable[[Sequence[T]], None]) -> int:
    """`work` on all items in their order, at most `size` at a time; returns the size that was left.

    Where memory runs out, half of that batch is tried next, and no larger one again. So `work` may see items twice,
    and must keep nothing of a call that fails. The error of a single item that does not fit is raised.
    """
    start = 0
    while start < len(items):
        batch = items[start : start + size]
        if _fits(work, batch):
            start += len(batch)
        else:
            size = len(batch) // 2
    return size


def _fits(work: Callable[[Sequence[T]], None], batch: Sequence[T]) -> bool:
    try:
        work(batch)
        return True
    except (RuntimeError, MemoryError) as problem:
        if len(batch) == 1 or not out_of_memory(problem):
            raise
    torch.cuda.empty_cache()  # out here the error is gone, and with its frames all tensors of the batch
    return False
