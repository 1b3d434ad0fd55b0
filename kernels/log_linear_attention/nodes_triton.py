"""Log-linear attention in Triton: which chunk a program has, where the nodes of the tree lie, and how chunks see them.

Nodes lie in Fenwick's order. Only left children are ever seen, and the one that ends with chunk e, of height m = the
trailing zeros of e + 1, has slot e. Chunk n sees slots x - 1 for x = n, x & (x - 1), ... while x > 0, and is part of
the nodes in slots x - 1 for x = n + 1, x + (x & -x), ... The last chunk of a sequence is in no node that is seen.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.common.triton import weight

LEAVES = tl.constexpr(4)  # chunks that one program of the tree's lower end takes
FAR = tl.constexpr(8)  # chunks over which one program sums the gradients of the nodes that they see


class Chunks(NamedTuple):
    """Sequences cut into chunks: the numbers that `chunk_of` reads."""

    total: int  # exact, or enough if packed
    sequences: int  # rows of [sequences, H, NT] tensors: packed sequences lie in one
    T: int
    NT: int  # chunks in such a row
    table: Tensor | None  # [chunks, 4] first row, rows left, number, number of chunks in the sequence

    @classmethod
    def of(cls, B: int, T: int, C: int, cu_seqlens: Tensor | None) -> "Chunks":
        NT = -(-T // C)
        if cu_seqlens is None:
            return cls(B * NT, B, T, NT, None)
        total = T // C + cu_seqlens.shape[0] - 1
        return cls(total, 1, T, total, _packed(cu_seqlens, C, total))

    def groups(self, size: int) -> int:
        """Programs that groups of so many chunks need."""
        return self.total if self.table is not None else self.sequences * -(-self.NT // size)


def _packed(cu_seqlens: Tensor, C: int, total: int) -> Tensor:
    """Computed on the device without waiting for it. Superfluous chunks have no rows, empty sequences no chunks."""
    begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    count = (end - begin + C - 1) // C
    after = count.cumsum(0)
    index = torch.arange(total, device=begin.device)
    sequence = torch.searchsorted(after, index, right=True).clamp(max=len(begin) - 1)
    n = index - (after - count)[sequence]
    first = begin[sequence] + n * C
    return torch.stack([first, (end[sequence] - first).clamp(min=0), n, count[sequence]], dim=1)


@triton.jit
def program_of(H, KEYS: tl.constexpr, VALUES: tl.constexpr, INNER: tl.constexpr):
    """Index along the chunks, head, key block, value block, and the fastest axis of length INNER."""
    index = tl.program_id(0).to(tl.int64)
    inner, index = (index % INNER).to(tl.int32), index // INNER
    vb, index = (index % VALUES).to(tl.int32), index // VALUES
    kb, index = (index % KEYS).to(tl.int32), index // KEYS
    return index // H, index % H, kb, vb, inner


@triton.jit
def chunk_of(index, table, T, NT, GROUP: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr):
    """Of the first chunk of a group: its index, its first row, the rows left in its sequence, its number in the
    sequence, and the sequence's number of chunks. Packed sequences start a program at every chunk: those within a group
    have no rows left."""
    if PACKED:
        first = tl.load(table + 4 * index)
        left = tl.load(table + 4 * index + 1).to(tl.int32)
        n = tl.load(table + 4 * index + 2).to(tl.int32)
        count = tl.load(table + 4 * index + 3).to(tl.int32)
        left = tl.where(n % GROUP == 0, left, 0)
    else:
        groups = tl.cdiv(NT, GROUP)
        b = index // groups
        n = (index % groups * GROUP).to(tl.int32)
        index = b * NT + n
        first = b * T + n * C
        left = T - n * C
        count = NT
    return index, first, left, n, count


@triton.jit
def log2(x):
    """Of powers of two below 2^24; negative for 0."""
    return (x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def between(sums, end, steps, keep):
    """Log decay from the end of a chunk to the end of that `steps` later, 0 unless `keep`."""
    later = tl.load(sums + end + steps, mask=keep, other=0.0)
    return later - tl.load(sums + end, mask=keep, other=0.0)


@triton.jit
def how_seen(at_level, sums, ends, G, i, left, n, x, seen, H, L: tl.constexpr, LOG: tl.constexpr, DECAY: tl.constexpr):
    """How the rows of chunk n see the node before chunk x, if `seen`: lambda [C], and the decay from the node's end."""
    level = tl.minimum(LOG + 1 + log2(x & -x), L - 1)
    lam = tl.load(at_level + i * H * L + level, mask=(i < left) & seen, other=0.0)
    if DECAY:
        w = weight(G + between(sums, ends + x - 1, n - x, seen).to(G.dtype), lam.dtype)
    else:
        w = tl.full(lam.shape, 1.0, lam.dtype)
    return lam, w
