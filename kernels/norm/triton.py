"""Norms in Triton: one pass over memory forward, one backward.

    u = (x + gain skip) silu(before)      r = (sum(u^2) / N + eps)^-1/2, or without the mean 1 for N       n = r u
    y = (n weight + bias) silu(after)

A layer norm centres u first, u - sum(u) / N. Backward, with e = dy silu(after) weight and everything recomputed:

    du = r (e - n sum(e n) / N)     dweight = sum over tokens of dy silu(after) n     dbias = the same without n
    dx = du silu(before)            dbefore = du (x + gain skip) silu'(before)
    dskip = gain dx                 dgain = sum over tokens and a head's channels of skip dx
    dafter = dy (n weight + bias) silu'(after)

and du is centred as u was.

A row is one group of one token. A program takes a share of one model's tokens, for one group, a few rows at a time:
so it has the weight in registers, and one row of the weight's gradient, which are added up in a fixed order.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

kernel = triton.jit(
    do_not_specialize=["tokens", "share", "programs", "x_inner", "b_inner", "a_inner", "s_inner", "dy_inner"]
)


@triton.jit
def offsets(row, inner, stride, N: tl.constexpr):
    """Offsets of rows, of which `inner` lie one after the other, then the next as many `stride` further on."""
    return ((row // inner) * stride + (row % inner) * N)[:, None]


@triton.jit
def silu(z):
    """silu(z) and its derivative."""
    gate = 1.0 / (1.0 + tl.exp(-z))
    return z * gate, gate * (1.0 + z * (1.0 - gate))


@triton.jit
def scope(tokens, share, programs, GROUPS: tl.constexpr):
    """First token of a program, and the one after its last; its group and its model."""
    program = tl.program_id(0).to(tl.int64)
    group, p, member = program % GROUPS, program // GROUPS % programs, program // GROUPS // programs
    first = member * tokens + p * share
    return first, tl.minimum(first + share, (member + 1) * tokens), group, member


@kernel
def forward_kernel(
    x, weight, bias, before, after, skip, gain, y,
    x_inner, x_stride, b_inner, b_stride, a_inner, a_stride, s_inner, s_stride, tokens, share, programs, eps,
    GROUPS: tl.constexpr, N: tl.constexpr, P: tl.constexpr, COUNT: tl.constexpr, CENTRE: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    first, last, group, member = scope(tokens, share, programs, GROUPS)
    column = tl.arange(0, BN)[None, :]
    inside = column < N
    if weight is not None:
        w = tl.load(weight + (member * GROUPS + group) * N + column, mask=inside, other=0.0).to(ACC)
    if bias is not None:
        b = tl.load(bias + (member * GROUPS + group) * N + column, mask=inside, other=0.0).to(ACC)
    if skip is not None:
        g = tl.load(gain + (member * GROUPS + group) * (N // P) + column // P, mask=inside, other=0.0).to(ACC)
    for token in range(first, last, BR):
        at = token + tl.arange(0, BR)
        row = at * GROUPS + group
        keep = (at < last)[:, None] & inside
        u = tl.load(x + offsets(row, x_inner, x_stride, N) + column, mask=keep, other=0.0).to(ACC)
        if skip is not None:
            u += g * tl.load(skip + offsets(row, s_inner, s_stride, N) + column, mask=keep, other=0.0).to(ACC)
        if before is not None:
            z = tl.load(before + offsets(row, b_inner, b_stride, N) + column, mask=keep, other=0.0).to(ACC)
            u *= silu(z)[0]
        if CENTRE:
            u = tl.where(inside, u - tl.sum(u, axis=1)[:, None] / N, 0.0)
        n = u * tl.rsqrt(tl.sum(u * u, axis=1) / COUNT + eps)[:, None]
        if weight is not None:
            n *= w
        if bias is not None:
            n += b
        if after is not None:
            z = tl.load(after + offsets(row, a_inner, a_stride, N) + column, mask=keep, other=0.0).to(ACC)
            n *= silu(z)[0]
        tl.store(y + row[:, None] * N + column, n.to(y.dtype.element_ty), mask=keep)


@kernel
def backward_kernel(
    x, weight, bias, before, after, skip, gain, dy, dx, sums, bias_sums, dbefore, dafter, dskip, gain_sums,
    x_inner, x_stride, b_inner, b_stride, a_inner, a_stride, s_inner, s_stride, dy_inner, dy_stride,
    tokens, share, programs, eps,
    GROUPS: tl.constexpr, N: tl.constexpr, P: tl.constexpr, COUNT: tl.constexpr, CENTRE: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    first, last, group, member = scope(tokens, share, programs, GROUPS)
    column = tl.arange(0, BN)[None, :]
    inside = column < N
    if weight is not None:
        w = tl.load(weight + (member * GROUPS + group) * N + column, mask=inside, other=0.0).to(ACC)
        dw = tl.zeros([BR, BN], ACC)
    if bias is not None:
        b = tl.load(bias + (member * GROUPS + group) * N + column, mask=inside, other=0.0).to(ACC)
        db = tl.zeros([BR, BN], ACC)
    if skip is not None:
        g = tl.load(gain + (member * GROUPS + group) * (N // P) + column // P, mask=inside, other=0.0).to(ACC)
        dg = tl.zeros([BR, BN], ACC)
    for token in range(first, last, BR):
        at = token + tl.arange(0, BR)
        row = at * GROUPS + group
        keep = (at < last)[:, None] & inside
        out = row[:, None] * N + column
        e = tl.load(dy + offsets(row, dy_inner, dy_stride, N) + column, mask=keep, other=0.0).to(ACC)
        x_ = tl.load(x + offsets(row, x_inner, x_stride, N) + column, mask=keep, other=0.0).to(ACC)
        if skip is not None:
            other = tl.load(skip + offsets(row, s_inner, s_stride, N) + column, mask=keep, other=0.0).to(ACC)
            x_ += g * other
        u = x_
        if before is not None:
            z = tl.load(before + offsets(row, b_inner, b_stride, N) + column, mask=keep, other=0.0).to(ACC)
            opened, slope = silu(z)
            u = x_ * opened
        if CENTRE:
            u = tl.where(inside, u - tl.sum(u, axis=1)[:, None] / N, 0.0)
        r = tl.rsqrt(tl.sum(u * u, axis=1) / COUNT + eps)[:, None]
        n = u * r
        if after is not None:
            z = tl.load(after + offsets(row, a_inner, a_stride, N) + column, mask=keep, other=0.0).to(ACC)
            passed, steep = silu(z)
            plain = n
            if weight is not None:
                plain *= w
            if bias is not None:
                plain += b
            da = e * plain * steep
            tl.store(dafter + out, da.to(dafter.dtype.element_ty), mask=keep)
            e *= passed
        if bias is not None:
            db += e
        if weight is not None:
            dw += e * n
            e *= w
        du = r * (e - n * (tl.sum(e * n, axis=1) / COUNT)[:, None])
        if CENTRE:
            du -= tl.sum(du, axis=1)[:, None] / N
        if before is not None:
            tl.store(dbefore + out, (du * x_ * slope).to(dbefore.dtype.element_ty), mask=keep)
            du *= opened
        tl.store(dx + out, du.to(dx.dtype.element_ty), mask=keep)
        if skip is not None:
            tl.store(dskip + out, (g * du).to(dskip.dtype.element_ty), mask=keep)
            dg += du * other
    at = tl.program_id(0).to(tl.int64) * N + column
    if weight is not None:
        tl.store(sums + at, tl.sum(dw, axis=0)[None, :], mask=inside)
    if bias is not None:
        tl.store(bias_sums + at, tl.sum(db, axis=0)[None, :], mask=inside)
    if skip is not None:
        tl.store(gain_sums + at, tl.sum(dg, axis=0)[None, :], mask=inside)


class Shares(NamedTuple):
    """How the rows of M models are shared among programs."""

    tokens: int  # of a model
    share: int  # tokens a program
    programs: int  # a model and group
    rows: int  # at a time
    width: int  # columns, a power of two
    warps: int

    @classmethod
    def of(cls, x: Tensor, groups: int, M: int) -> "Shares":
        N = x.shape[-1] // groups
        tokens = x.numel() // x.shape[-1] // M
        width = triton.next_power_of_2(N)
        rows = max(1, 2048 // width)
        share = triton.cdiv(triton.cdiv(tokens, max(1, 4096 // (M * groups))), rows) * rows
        return cls(tokens, share, triton.cdiv(tokens, share), rows, width, 4 if width <= 2048 else 8)


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    before: Tensor | None,
    after: Tensor | None,
    skip: Tensor | None,
    gain: Tensor | None,
    groups: int,
    eps: float,
    mean: bool,
    centre: bool,
    dtype: torch.dtype,
) -> Tensor:
    """x, before, after and skip [M ..., groups N] of M models, one after the other; weight and bias [M, groups N], gain
    [M, H]."""
    members = 1 if weight is None else len(weight)
    N, how = x.shape[-1] // groups, Shares.of(x, groups, members)
    y = x.new_empty(x.shape, dtype=dtype)
    x, *x_rows = _rows(x, N)
    before, *b_rows = _rows(before, N)
    after, *a_rows = _rows(after, N)
    skip, *s_rows = _rows(skip, N)
    forward_kernel[(members * how.programs * groups,)](
        x, _whole(weight), _whole(bias), before, after, skip, _whole(gain), y, *x_rows, *b_rows, *a_rows, *s_rows,
        how.tokens, how.share, how.programs, eps, GROUPS=groups, N=N, P=_channels(x, gain, N),
        COUNT=N if mean else 1, CENTRE=centre, BR=how.rows, BN=how.width, ACC=accumulator(x), num_warps=how.warps,
    )  # fmt: skip
    return y


def backward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    before: Tensor | None,
    after: Tensor | None,
    skip: Tensor | None,
    gain: Tensor | None,
    dy: Tensor,
    groups: int,
    eps: float,
    mean: bool,
    centre: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight, bias, before, after, skip and gain."""
    members = 1 if weight is None else len(weight)
    N, how = x.shape[-1] // groups, Shares.of(x, groups, members)
    dx, dbefore, dafter, dskip = (None if t is None else t.new_empty(t.shape) for t in (x, before, after, skip))
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    sums, bias_sums, gain_sums = (
        None if t is None else x.new_empty((members, how.programs, groups * N), dtype=acc) for t in (weight, bias, gain)
    )
    x, *x_rows = _rows(x, N)
    before, *b_rows = _rows(before, N)
    after, *a_rows = _rows(after, N)
    skip, *s_rows = _rows(skip, N)
    dy, *dy_rows = _rows(dy, N)
    backward_kernel[(members * how.programs * groups,)](
        x, _whole(weight), _whole(bias), before, after, skip, _whole(gain), dy, dx, sums, bias_sums, dbefore, dafter,
        dskip, gain_sums, *x_rows, *b_rows, *a_rows, *s_rows, *dy_rows, how.tokens, how.share, how.programs, eps,
        GROUPS=groups, N=N, P=_channels(x, gain, N), COUNT=N if mean else 1, CENTRE=centre, BR=how.rows, BN=how.width,
        ACC=accumulator(x), num_warps=how.warps,
    )  # fmt: skip
    dweight, dbias = (
        None if t is None else parts.sum(1).to(t.dtype) for t, parts in ((weight, sums), (bias, bias_sums))
    )
    dgain = None
    if gain is not None and gain_sums is not None:
        dgain = gain_sums.sum(1).unflatten(1, (gain.shape[1], -1)).sum(2).to(gain.dtype)
    return dx, dweight, dbias, dbefore, dafter, dskip, dgain


def _channels(x: Tensor, gain: Tensor | None, N: int) -> int:
    """Of a head, for which there is one gain."""
    return N if gain is None else x.shape[-1] // gain.shape[1]


def _whole(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _rows(x: Tensor | None, N: int) -> tuple[Tensor | None, int, int]:
    """x, the number of rows of N that lie one after the other, and how far apart such runs are."""
    if x is None:
        return None, 1, 0
    sizes = [*x.shape[:-1], x.shape[-1] // N]
    strides = [*x.stride()[:-1], N]
    axes = [(n, s) for n, s in zip(sizes, strides, strict=True) if n != 1]
    inner = 1
    while axes and axes[-1][1] == inner * N:
        inner *= axes.pop()[0]
    stride = axes[-1][1] if axes else 0
    regular = all(a[1] == b[0] * b[1] for a, b in pairwise(axes))
    if x.stride(-1) != 1 or not regular:
        return x.contiguous(), x.numel() // N, 0
    return x, inner, stride


def accumulator(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32
