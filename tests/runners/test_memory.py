"""Batches where memory runs out, without a GPU."""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mixassay.runners.memory import in_batches, out_of_memory


class Memory:
    """Room for so many items; `tried` are the sizes of batches, `done` the items of those that fitted."""

    def __init__(self, room: int, error: BaseException | None = None) -> None:
        self.room, self.error = room, error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 918 MiB")
        self.tried: list[int] = []
        self.done: list[int] = []

    def work(self, batch: Sequence[int]) -> None:
        self.tried.append(len(batch))
        if len(batch) > self.room:
            raise self.error
        self.done += batch


@pytest.mark.parametrize(
    ("n", "size", "room", "tried", "left"),
    [
        (7, 3, 9, [3, 3, 1], 3),
        (10, 8, 3, [8, 4, 2, 2, 2, 2, 2], 2),
        (5, 100, 3, [5, 2, 2, 1], 2),  # half of what was there
        (3, 4, 1, [3, 1, 1, 1], 1),
        (0, 4, 1, [], 4),
    ],
)
def test_a_batch_is_halved_until_it_fits_and_grows_no_more(
    n: int, size: int, room: int, tried: list[int], left: int
) -> None:
    memory = Memory(room)
    assert in_batches(range(n), size, memory.work) == left
    assert memory.tried == tried
    assert memory.done == list(range(n))


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            True,
        ),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_is_too_little_memory(error: Exception, known: bool) -> None:
    assert out_of_memory(error) == known
    memory = Memory(2, error)
    if known:
        in_batches(range(8), 8, memory.work)
        assert memory.done == list(range(8))
    else:
        with pytest.raises(type(error)):
            in_batches(range(8), 8, memory.work)
        assert memory.tried == [8]


def test_one_item_that_does_not_fit_is_an_error_and_what_was_done_is_kept() -> None:
    done: list[int] = []

    def work(batch: Sequence[int]) -> None:
        if 4 in batch:
            raise torch.OutOfMemoryError("CUDA out of memory")
        done.extend(batch)

    with pytest.raises(torch.OutOfMemoryError):
        in_batches(range(6), 2, work)
    assert done == [0, 1, 2, 3]


def test_what_a_batch_held_is_free_before_the_next() -> None:
    """Also what a generator under way holds; and without waiting for the garbage collector."""
    held: list[Any] = []

    def parts(n: int) -> Any:
        state = torch.zeros(n)
        held.append(weakref.ref(state))
        yield state

    def work(batch: Sequence[int]) -> None:
        assert all(ref() is None for ref in held)
        for state in parts(len(batch)):
            if len(state) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")

    gc.disable()
    try:
        in_batches(range(4), 4, work)
    finally:
        gc.enable()
    assert len(held) == 2 + 4
