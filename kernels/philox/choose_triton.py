"""Draws without replacement in Triton: `distinct` and `race` of `mixassay.draws`, bit for bit, a launch each.

Rows are sorted in registers, BR of them at a time, padded to BM words.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 1024  # words of a row
NOBODY = tl.constexpr(-1 << 40)


@triton.jit(do_not_specialize=["N", "m", "n", "limit"])
def distinct_kernel(words, found, N, m, n, limit, BR: tl.constexpr, BM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    j = tl.arange(0, BM)[None, :]
    live = (row < N) & (j < m)
    drawn = (tl.load(words + row * m + j, mask=live, other=0) * limit) >> 32
    ranked = tl.sort((tl.where(j < m, drawn, 1 << 31) << 31) | j, dim=1)  # of equal ids the first drawn comes first
    ids, at = ranked >> 31, ranked & 0x7FFFFFFF
    before = tl.gather(ids, tl.maximum(j - 1, 0) + tl.zeros([BR, BM], dtype=tl.int32), 1)
    new = (j == 0) | (ids != before)
    new = tl.sort((at << 1) | new.to(tl.int64), dim=1) & 1  # in the order drawn again
    place = tl.cumsum(new, 1) - 1
    tl.store(found + row * n + place, drawn, mask=live & (new == 1) & (place < n))
    count = tl.sum(tl.where(j < m, new, 0), 1)[:, None]
    tl.store(found + row * n + j, tl.zeros([BR, BM], dtype=tl.int64) + NOBODY, mask=(row < N) & (j >= count) & (j < n))


@triton.jit(do_not_specialize=["N", "S", "n", "low"])
def race_kernel(words, quantiles, handicaps, found, N, S, n, low, BR: tl.constexpr, BM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)[:, None]
    j = tl.arange(0, BM)[None, :]
    live = (row < N) & (j < S)
    word = tl.load(words + row * S + j, mask=live, other=0)
    knot = quantiles + (word >> 16)
    wait = tl.load(knot, mask=live, other=0) + (tl.load(knot + 65536, mask=live, other=0) * (word & 0xFFFF) >> 16)
    arrival = wait * tl.load(handicaps + j, mask=j < S, other=0)
    never = ~(tl.full([BR, BM], 1, dtype=tl.int64) << 63)
    arrived = tl.sort((tl.where(j < S, arrival, never) & ~low) | j, dim=1)
    tl.store(found + row * n + j, arrived & low, mask=(row < N) & (j < n))


def distinct(words: Tensor, n: int, limit: int) -> Tensor:
    """int64 [N, n] of words [N, m], m <= WIDEST."""
    return _launch(distinct_kernel, words, (), n, limit)


def race(words: Tensor, quantiles: Tensor, handicaps: Tensor, n: int, low: int) -> Tensor:
    """int64 [N, n] of words [N, S], S <= WIDEST; quantiles int64 [2, 65536], handicaps int64 [S]."""
    return _launch(race_kernel, words, (quantiles, handicaps), n, low)


def _launch(kernel: Any, words: Tensor, tables: tuple[Tensor, ...], n: int, last: int) -> Tensor:
    (N, m), found = words.shape, words.new_empty((len(words), n))
    width = max(2, triton.next_power_of_2(m))
    rows = max(1, 1024 // width)
    if N:
        with torch.cuda.device(words.device) if words.is_cuda else torch.no_grad():
            kernel[(triton.cdiv(N, rows),)](words.contiguous(), *tables, found, N, m, n, last, BR=rows, BM=width)
    return found
