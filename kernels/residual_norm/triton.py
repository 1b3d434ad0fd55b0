"""The step from branch to branch in Triton: one pass over memory forward, one backward.

    t = x + y      s = t + n2 w2 + b2, or t without an inner norm      h = n w + b

n and n2 are s and t, centred in a layer norm, over the roots of their mean squares plus eps. Backward, with n and n2
recomputed from t (from s = t without an inner norm):

    ds += norm'(dh)      dt = ds + norm2'(ds), or ds      dx = dy = dt      dw, db, dw2, db2: sums over tokens

A program takes a share of one model's tokens, a few rows at a time: so it has the weights in registers, and one row of
each weight's gradient, which are added up in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.norm.triton import Shares, accumulator, scope

kernel = triton.jit(do_not_specialize=["tokens", "share", "programs"])


@triton.jit
def unit(u, inside, eps, N: tl.constexpr, CENTRE: tl.constexpr):
    """u normed, and what it was multiplied by."""
    if CENTRE:
        u = tl.where(inside, u - tl.sum(u, axis=1)[:, None] / N, 0.0)
    r = tl.rsqrt(tl.sum(u * u, axis=1) / N + eps)[:, None]
    return u * r, r


@triton.jit
def unit_gradient(e, n, r, inside, N: tl.constexpr, CENTRE: tl.constexpr):
    """The gradient of what was normed to n, for a gradient e of n."""
    du = r * (e - n * (tl.sum(e * n, axis=1) / N)[:, None])
    if CENTRE:
        du = tl.where(inside, du - tl.sum(du, axis=1)[:, None] / N, 0.0)
    return du


@triton.jit
def vector(p, at, inside, ACC: tl.constexpr):
    return tl.load(p + at, mask=inside, other=0.0).to(ACC)


@kernel
def forward_kernel(
    x, y, weight, bias, inner_weight, inner_bias, t, s, h, tokens, share, programs, eps,
    N: tl.constexpr, CENTRE: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    first, last, _, member = scope(tokens, share, programs, 1)
    column = tl.arange(0, BN)[None, :]
    inside = column < N
    at = member * N + column
    w = vector(weight, at, inside, ACC)
    if bias is not None:
        b = vector(bias, at, inside, ACC)
    if inner_weight is not None:
        w2 = vector(inner_weight, at, inside, ACC)
        if inner_bias is not None:
            b2 = vector(inner_bias, at, inside, ACC)
    for token in range(first, last, BR):
        rows = token + tl.arange(0, BR)[:, None]
        keep = (rows < last) & inside
        place = rows * N + column
        u = tl.load(x + place, mask=keep, other=0.0).to(ACC) + tl.load(y + place, mask=keep, other=0.0).to(ACC)
        if inner_weight is not None:
            tl.store(t + place, u, mask=keep)
            u += unit(u, inside, eps, N, CENTRE)[0] * w2
            if inner_bias is not None:
                u += b2
        tl.store(s + place, u, mask=keep)
        n = unit(u, inside, eps, N, CENTRE)[0] * w
        if bias is not None:
            n += b
        tl.store(h + place, n.to(h.dtype.element_ty), mask=keep)


@kernel
def backward_kernel(
    t, weight, inner_weight, inner_bias, ds, dh, dx, dy, sums, bias_sums, inner_sums, inner_bias_sums,
    tokens, share, programs, eps,
    N: tl.constexpr, CENTRE: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    first, last, _, member = scope(tokens, share, programs, 1)
    column = tl.arange(0, BN)[None, :]
    inside = column < N
    at = member * N + column
    w = vector(weight, at, inside, ACC)
    dw = tl.zeros([BR, BN], ACC)
    db = tl.zeros([BR, BN], ACC)
    dw2 = tl.zeros([BR, BN], ACC)
    db2 = tl.zeros([BR, BN], ACC)
    if inner_weight is not None:
        w2 = vector(inner_weight, at, inside, ACC)
        if inner_bias is not None:
            b2 = vector(inner_bias, at, inside, ACC)
    for token in range(first, last, BR):
        rows = token + tl.arange(0, BR)[:, None]
        keep = (rows < last) & inside
        place = rows * N + column
        u = tl.load(t + place, mask=keep, other=0.0).to(ACC)
        e = tl.load(dh + place, mask=keep, other=0.0).to(ACC)
        if inner_weight is not None:
            n2, r2 = unit(u, inside, eps, N, CENTRE)
            u += n2 * w2
            if inner_bias is not None:
                u += b2
        n, r = unit(u, inside, eps, N, CENTRE)
        db += e
        dw += e * n
        d = unit_gradient(e * w, n, r, inside, N, CENTRE)
        if ds is not None:
            d += tl.load(ds + place, mask=keep, other=0.0).to(ACC)
        if inner_weight is not None:
            db2 += d
            dw2 += d * n2
            d += unit_gradient(d * w2, n2, r2, inside, N, CENTRE)
        tl.store(dx + place, d, mask=keep)
        tl.store(dy + place, d.to(dy.dtype.element_ty), mask=keep)
    at = tl.program_id(0).to(tl.int64) * N + column
    tl.store(sums + at, tl.sum(dw, axis=0)[None, :], mask=inside)
    if bias_sums is not None:
        tl.store(bias_sums + at, tl.sum(db, axis=0)[None, :], mask=inside)
    if inner_weight is not None:
        tl.store(inner_sums + at, tl.sum(dw2, axis=0)[None, :], mask=inside)
        if inner_bias is not None:
            tl.store(inner_bias_sums + at, tl.sum(db2, axis=0)[None, :], mask=inside)


def forward(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inner_weight: Tensor | None,
    inner_bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """t (None without an inner norm), s, and h in `dtype`, for x and y [M ..., D] and weights [M, D] of M models."""
    M, D = weight.shape
    how = Shares.of(x, 1, M)
    x, y, weight, bias, inner_weight, inner_bias = whole(x, y, weight, bias, inner_weight, inner_bias)
    t = None if inner_weight is None else torch.empty_like(x)
    s, h = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    forward_kernel[(M * how.programs,)](
        x, y, weight, bias, inner_weight, inner_bias, t, s, h, how.tokens, how.share, how.programs, eps,
        N=D, CENTRE=bias is not None, BR=how.rows, BN=how.width, ACC=accumulator(x), num_warps=how.warps,
    )  # fmt: skip
    return t, s, h


def backward(
    t: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inner_weight: Tensor | None,
    inner_bias: Tensor | None,
    ds: Tensor | None,
    dh: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, of y in `dtype`, of weight and bias, of the inner weight and bias."""
    M, D = weight.shape
    how = Shares.of(t, 1, M)
    t, weight, inner_weight, inner_bias, ds, dh = whole(t, weight, inner_weight, inner_bias, ds, dh)
    dx, dy = torch.empty_like(t), torch.empty_like(t, dtype=dtype)
    vectors = (weight, bias, inner_weight, inner_bias)
    sums = [None if p is None else t.new_empty((M, how.programs, D)) for p in vectors]
    backward_kernel[(M * how.programs,)](
        t, weight, inner_weight, inner_bias, ds, dh, dx, dy, *sums, how.tokens, how.share, how.programs, eps,
        N=D, CENTRE=bias is not None, BR=max(1, how.rows // 2), BN=how.width, ACC=accumulator(t), num_warps=how.warps,
    )  # fmt: skip
    dweight, *others = (
        None if parts is None else parts.sum(1).to(p.dtype) for p, parts in zip(vectors, sums, strict=True)
    )
    return dx, dy, dweight, *others


def whole(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]
