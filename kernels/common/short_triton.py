"""What Triton kernels for short rows of narrow heads share: which heads a program has, their tiles, and a call's sizes.

A program has all the tokens of a few heads, side by side as a batch of small products: `HB` heads that share q and k,
whose gradients it adds, or one head of each of `HB` groups. A batch of one has no axis.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.common.triton import LOG2_E, WEAKEST, operands, sum_dtype

LONGEST = 256
"""Tokens of a row, at most: few enough for the backward to find in the cache what it reads a second time."""
WIDEST = 32
"""Columns of q, k and v, at most. Not yet measured. Wider heads fill the tiles of triton.py."""


def serves(dtype: torch.dtype, T: int, K: int, V: int) -> bool:
    """Whether rows of T tokens are short, and heads narrow enough. The batch must not matter: vmap changes it."""
    exact = dtype == torch.float32 and operands(dtype)[2] == "ieee"  # products without tensor cores
    return T <= LONGEST and max(K, V) <= WIDEST and not exact


@triton.jit
def heads(G, R, HB: tl.constexpr, SHARED: tl.constexpr):
    """Part of its group, sequence, and group and head of each of a program's heads, and whether there is such a one."""
    index, one = tl.program_id(0).to(tl.int64), 0
    if HB > 1:
        one = tl.arange(0, HB)
    if SHARED:
        parts = tl.cdiv(R, HB)
        group, part = (index // parts % G).to(tl.int32), index % parts
        r = part.to(tl.int32) * HB + one
        return part, index // parts // G, group + 0 * one, group * R + r, r < R
    else:
        parts = tl.cdiv(G, HB)
        h = (index % parts).to(tl.int32) * HB + one
        return 0, index // parts, h, h, h < G


@triton.jit
def tiles(x, HB: tl.constexpr):
    """One number for each of a batch of tiles."""
    if HB > 1:
        return x[:, None, None]
    else:
        return x


@triton.jit
def lines(x, HB: tl.constexpr):
    """One number for each of a batch of lines."""
    if HB > 1:
        return x[:, None]
    else:
        return x


@triton.jit
def turned(x, HB: tl.constexpr):
    if HB > 1:
        return tl.trans(x, 0, 2, 1)
    else:
        return tl.trans(x)


@triton.jit
def zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr, HB: tl.constexpr, ACC: tl.constexpr):
    if HB > 1:
        return tl.zeros([HB, ROWS, COLUMNS], dtype=ACC)
    else:
        return tl.zeros([ROWS, COLUMNS], dtype=ACC)


@triton.jit
def load(at, keep, live, DOT: tl.constexpr):
    return tl.load(at, mask=keep & live[:, None], other=0.0).to(DOT)


@triton.jit
def store(at, x, keep, live):
    tl.store(at, x.to(at.dtype.element_ty), mask=keep & live[:, None])


@triton.jit
def load_decay(at, keep, SUM: tl.constexpr):
    """Log decays in base 2, 0 (no decay) where there is no token or head."""
    return tl.maximum(tl.load(at, mask=keep, other=0.0).to(SUM), WEAKEST) * LOG2_E


class Launch(NamedTuple):
    """How a call is laid out on the machine. It changes speed and rounding, nothing else."""

    C: int  # tokens in a chunk
    HB: int  # heads of a program, at most
    num_warps: int  # of so many heads; fewer have fewer
    num_stages: int
    maxnreg: int | None = None


def padded(width: int) -> int:
    """Columns of a tile that holds so many."""
    return max(16, triton.next_power_of_2(width))


class Call:
    """The sizes of one call, its operands made contiguous, and what both launches have in common."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, how: Launch) -> None:
        (B, T, G, self.K), (H, self.V) = q.shape, v.shape[2:]
        R = H // G
        shared = H > G
        most = R if shared else G
        HB = min(how.HB, triton.next_power_of_2(most))
        dot, acc, precision = operands(q.dtype)
        self.acc = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.q, self.k, self.v = q.contiguous(), k.contiguous(), v.contiguous()
        self.g = None if log_decay is None else log_decay.to(self.acc).contiguous()
        blocks = triton.cdiv(most, HB)
        self.parts = blocks if shared else 1
        self.grid = (B * blocks * (G if shared else 1),)
        self.shared: dict[str, Any] = {
            "T": T,
            "G": G,
            "R": R,
            "C": how.C,
            "HB": HB,
            "SHARED": shared,
            "DECAY": log_decay is not None,
            "DOT": dot,
            "SUM": sum_dtype(q.dtype),
            "ACC": acc,
            "PREC": precision,
            "num_warps": max(1, how.num_warps * HB // how.HB),
            "num_stages": how.num_stages,
            "maxnreg": how.maxnreg,
        }

    def widths(self) -> dict[str, int]:
        return {"K": self.K, "V": self.V, "BK": padded(self.K), "BV": padded(self.V)}
