"""What the chunked Triton kernels share: where a program's tokens lie, tiles of them, and the decay between them.

Token axes are flattened: row b T + t of a [B T, heads, width] tensor. A sequence is cut into P segments of `length`
tokens (a multiple of the chunk C), each walked by programs of its own; the states at the P + 1 borders of a sequence's
segments lie side by side in "slots", slot p before segment p. With P = 1 there are no inner borders, and slot b is
row b of the caller's initial (or final) state.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
WEAKEST = tl.constexpr(-87.0)  # as `bounded` in chunks.py: stronger log decays would swallow the digits of later ones


@triton.jit
def segment_of(index, table, T, length, P, PACKED: tl.constexpr):
    """First row, number of tokens and slot of a segment; packed sequences have them in `table` [segments, 3]."""
    if PACKED:
        first = tl.load(table + 3 * index)
        live = (tl.load(table + 3 * index + 1) - first).to(tl.int32)
        slot = tl.load(table + 3 * index + 2)
    else:
        sequence, p = index // P, index % P
        first = sequence * T + p * length
        live = tl.minimum(length, T - p * length).to(tl.int32)
        slot = index + tl.where(P > 1, sequence, 0)
    return first, live, slot


@triton.jit
def load_rows(at, rows, live, columns, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A [C, BLOCK] tile of rows `rows < live`, zeros elsewhere; `at` points to row 0, column 0."""
    keep = (rows < live)[:, None]
    if WIDTH % BLOCK != 0:
        keep = keep & (columns < WIDTH)[None, :]
    return tl.load(at + rows[:, None] * stride + columns[None, :], mask=keep, other=0.0)


@triton.jit
def store_rows(at, x, rows, live, columns, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    keep = (rows < live)[:, None]
    if WIDTH % BLOCK != 0:
        keep = keep & (columns < WIDTH)[None, :]
    tl.store(at + rows[:, None] * stride + columns[None, :], x.to(at.dtype.element_ty), mask=keep)


@triton.jit
def load_turned(at, rows, live, columns, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """`load_rows`, transposed: [BLOCK, C]."""
    keep = (rows < live)[None, :]
    if WIDTH % BLOCK != 0:
        keep = keep & (columns < WIDTH)[:, None]
    return tl.load(at + rows[None, :] * stride + columns[:, None], mask=keep, other=0.0)


@triton.jit
def store_turned(at, x, rows, live, columns, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The transpose of x [BLOCK, C] to rows of memory."""
    keep = (rows < live)[None, :]
    if WIDTH % BLOCK != 0:
        keep = keep & (columns < WIDTH)[:, None]
    tl.store(at + rows[None, :] * stride + columns[:, None], x.to(at.dtype.element_ty), mask=keep)


@triton.jit
def load_log_decay(at, rows, live, stride, SUM: tl.constexpr):
    """Log decays of rows `rows < live` in base 2 and in dtype SUM, 0 (no decay) elsewhere."""
    g = tl.load(at + rows * stride, mask=rows < live, other=0.0).to(SUM)
    return tl.maximum(g, WEAKEST) * LOG2_E


@triton.jit
def weight(exponent, ACC: tl.constexpr):
    """2^exponent, clamped: rounding can make a difference positive, and where a mask follows it may be large."""
    return tl.exp2(tl.minimum(exponent, 0.0).to(ACC))


@triton.jit
def decay(exponent, keep):
    """2^exponent where `keep`, else 0. Masked before exp2, and clamped: rounding can make a difference positive."""
    return tl.exp2(tl.where(keep, tl.minimum(exponent, 0.0), float("-inf")))


def half(dtype: torch.dtype) -> bool:
    """Whether tensor cores multiply it at their full rate."""
    return dtype in (torch.bfloat16, torch.float16)


def sum_dtype(dtype: torch.dtype) -> Any:
    """In what log decays are summed. float32 is no more exact than products of half precision need: in it, a strong
    decay swallows the digits of the weak ones after it."""
    return tl.float32 if half(dtype) else tl.float64


def tile(width: int) -> int:
    """Columns of a tile that holds `width` of a product's: a power of two from 16 on, but for 32, with which products
    of four warps read illegal addresses on a Hopper GPU (Triton 3.6; flash-linear-attention #807)."""
    columns = max(16, triton.next_power_of_2(width))
    return 64 if columns == 32 else columns


def operands(dtype: torch.dtype) -> tuple[Any, Any, str]:
    """Operand dtype of the products, accumulator dtype and input precision for tensors of this dtype.

    Of float16, states are operands too: above 65,504 they are inf, gradients below 6e-8 are 0. float32 is exact unless
    torch.backends.cuda.matmul.allow_tf32 says otherwise.
    """
    if half(dtype):
        return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16, tl.float32, "ieee"
    if dtype == torch.float64:
        return tl.float64, tl.float64, "ieee"
    return tl.float32, tl.float32, "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


class Cut(NamedTuple):
    """Sequences cut into segments: the numbers that `segment_of` reads."""

    sequences: int
    segments: int  # programs to launch for each head: exact, or enough if packed
    borders: int  # slots for states at borders
    inner: bool  # whether any sequence may have more than one segment
    T: int
    length: int
    P: int
    table: Tensor | None  # [segments, 3] first row, end row, slot
    slots: Tensor | None  # [sequences + 1] first slot of each packed sequence

    @classmethod
    def of(
        cls,
        B: int,
        T: int,
        cu_seqlens: Tensor | None,
        wanted: int,
        length: int | None = None,
        longest: int | None = None,
    ) -> "Cut":
        """About `wanted` segments in all, none shorter than 256 tokens or longer than `longest`, a multiple of 128,
        unless `length` says so."""
        if length is None:
            fewest = 1 if longest is None else -(-T // longest)
            length = segment_length(T, max(fewest, min(wanted // B, T // 256)))
            length = segment_length(T, -(-T // length))
        length = min(length, T)
        P = -(-T // length)
        if cu_seqlens is None:
            return cls(B, B * P, B * (P + 1), P > 1, T, length, P, None, None)
        N = cu_seqlens.shape[0] - 1
        segments = N if P == 1 else T // length + N
        table, slots = packed(cu_seqlens, length, segments, P > 1)
        return cls(N, segments, segments + N, P > 1, T, length, 1, table, slots)


def segment_length(T: int, P: int) -> int:
    """Tokens of a segment when T tokens are cut into P, which are again P for the length returned."""
    return -(-T // (128 * P)) * 128


def packed(cu_seqlens: Tensor, length: int, segments: int, inner: bool) -> tuple[Tensor, Tensor]:
    """Computed on the device without waiting for it. Superfluous segments are empty; empty sequences have none."""
    begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    count = (end - begin + length - 1) // length
    before = count.cumsum(0) - count
    index = torch.arange(segments, device=begin.device)
    n = torch.searchsorted(before + count, index, right=True).clamp(max=len(begin) - 1) if inner else index
    first = begin[n] + (index - before[n] if inner else 0) * length
    last = torch.minimum(first + length, end[n])
    table = torch.stack([first, torch.maximum(first, last), index + n if inner else index], dim=1)
    slots = torch.nn.functional.pad((count + 1).cumsum(0), (1, 0))
    return table.contiguous(), slots
