"""BaseConv's elementwise part in Triton: one pass over memory forward, one backward.

    z_t = sum_w c_w x_{t - (W - 1) + w} + b      y = z (p + o) + x

Backward, with z recomputed and dz = dy (p + o):

    dp = dy z      dx_t = dy_t + sum_w c_w dz_{t + (W - 1) - w}      dc_w = sum_t dz_t x_{t - (W - 1) + w}
    db = sum dz    do = sum dp

A program takes some tokens of one sequence, a few at a time. Neighbours come from the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.norm.triton import accumulator

kernel = triton.jit(do_not_specialize=["T", "share", "programs", "sequences"])


@triton.jit
def rows_of(x, row, t, T, d, D: tl.constexpr, ACC: tl.constexpr):
    """Tokens t of the sequence that begins at `row`, zeros outside."""
    keep = ((t >= 0) & (t < T))[:, None] & (d < D)
    return tl.load(x + (row + t)[:, None] * D + d, mask=keep, other=0.0).to(ACC)


@triton.jit
def tap(weight, member, d, w: tl.constexpr, D: tl.constexpr, W: tl.constexpr, ACC: tl.constexpr):
    return tl.load(weight + (member * D + d) * W + w, mask=d < D, other=0.0).to(ACC)


@kernel
def forward_kernel(
    x, weight, bias, p, offset, y, T, share, programs, sequences,
    D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    sequence, first = program // programs, program % programs * share
    member, row = sequence // sequences, sequence * T
    d = tl.arange(0, BD)[None, :]
    b = tl.load(bias + member * D + d, mask=d < D, other=0.0).to(ACC)
    o = tl.load(offset + member * D + d, mask=d < D, other=0.0).to(ACC)
    for start in range(first, tl.minimum(first + share, T), BT):
        t = start + tl.arange(0, BT)
        z = tl.zeros([BT, BD], ACC) + b
        for w in tl.static_range(W):
            z += tap(weight, member, d, w, D, W, ACC) * rows_of(x, row, t - (W - 1) + w, T, d, D, ACC)
        u = z * (rows_of(p, row, t, T, d, D, ACC) + o) + rows_of(x, row, t, T, d, D, ACC)
        tl.store(y + (row + t)[:, None] * D + d, u.to(y.dtype.element_ty), mask=(t < T)[:, None] & (d < D))


@kernel
def backward_kernel(
    x, weight, bias, p, offset, dy, dx, dp, sums, T, share, programs, sequences,
    D: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    sequence, first = program // programs, program % programs * share
    member, row = sequence // sequences, sequence * T
    d = tl.arange(0, BD)[None, :]
    b = tl.load(bias + member * D + d, mask=d < D, other=0.0).to(ACC)
    o = tl.load(offset + member * D + d, mask=d < D, other=0.0).to(ACC)
    dweight = ()
    for _ in tl.static_range(W):
        dweight = dweight + (tl.zeros([BT, BD], ACC),)
    dbias = tl.zeros([BT, BD], ACC)
    doffset = tl.zeros([BT, BD], ACC)
    for start in range(first, tl.minimum(first + share, T), BT):
        t = start + tl.arange(0, BT)
        given = rows_of(dy, row, t, T, d, D, ACC)
        dz = given * (rows_of(p, row, t, T, d, D, ACC) + o)
        z = tl.zeros([BT, BD], ACC) + b
        more = ()
        for w in tl.static_range(W):
            shifted = rows_of(x, row, t - (W - 1) + w, T, d, D, ACC)
            z += tap(weight, member, d, w, D, W, ACC) * shifted
            more = more + (dweight[w] + dz * shifted,)
        dweight = more
        dbias += dz
        du = given + tap(weight, member, d, W - 1, D, W, ACC) * dz
        for w in tl.static_range(W - 1):
            later = t + (W - 1) - w
            ahead = rows_of(dy, row, later, T, d, D, ACC) * (rows_of(p, row, later, T, d, D, ACC) + o)
            du += tap(weight, member, d, w, D, W, ACC) * ahead
        given *= z
        doffset += given
        at = (row + t)[:, None] * D + d
        keep = (t < T)[:, None] & (d < D)
        tl.store(dp + at, given.to(dp.dtype.element_ty), mask=keep)
        tl.store(dx + at, du.to(dx.dtype.element_ty), mask=keep)
    at = program * (W + 2) * D + d
    for w in tl.static_range(W):
        tl.store(sums + at + w * D, tl.sum(dweight[w], axis=0)[None, :], mask=d < D)
    tl.store(sums + at + W * D, tl.sum(dbias, axis=0)[None, :], mask=d < D)
    tl.store(sums + at + (W + 1) * D, tl.sum(doffset, axis=0)[None, :], mask=d < D)


def cut(B: int, T: int, D: int, share: int | None = None) -> tuple[int, int, int, int]:
    """Tokens a program and programs a sequence, tokens at a time, and a power of two of channels."""
    width = triton.next_power_of_2(D)
    rows = max(1, 1024 // width)
    if share is None:
        share = max(rows, triton.cdiv(T, max(1, 4096 // B)))
    return share, triton.cdiv(T, share), min(rows, triton.next_power_of_2(share)), width


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    p: Tensor,
    offset: Tensor,
    dtype: torch.dtype,
    share: int | None = None,
) -> Tensor:
    """x and p [M, B, T, D], weight [M, D, W], bias and offset [M, D] of M models."""
    M, B, T, D = x.shape
    share, programs, rows, width = cut(M * B, T, D, share)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    given = (x, weight, bias, p, offset)
    forward_kernel[(M * B * programs,)](
        *(v.contiguous() for v in given), y, T, share, programs, B,
        D=D, W=weight.shape[2], BT=rows, BD=width, ACC=accumulator(weight),
    )  # fmt: skip
    return y


def backward(
    x: Tensor, weight: Tensor, bias: Tensor, p: Tensor, offset: Tensor, dy: Tensor, share: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias, p and offset."""
    (M, B, T, D), W = x.shape, weight.shape[2]
    share, programs, rows, width = cut(M * B, T, D, share)
    dx, dp = x.new_empty(x.shape), p.new_empty(p.shape)
    sums = weight.new_empty((M, B * programs, W + 2, D))
    given = (x, weight, bias, p, offset, dy)
    backward_kernel[(M * B * programs,)](
        *(v.contiguous() for v in given), dx, dp, sums, T, share, programs, B,
        D=D, W=W, BT=rows, BD=width, ACC=accumulator(weight),
    )  # fmt: skip
    total = sums.sum(1)
    return dx, total[:, :W].mT.contiguous(), total[:, W].clone(), dp, total[:, W + 1].clone()
