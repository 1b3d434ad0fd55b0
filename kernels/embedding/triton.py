"""What a model begins with, in Triton: one pass over memory forward, one backward, then sums over equal words.

    x = (E[token] + P[t]) keep / (1 - p)      h = norm(x) w + b

Backward: g = (dx + norm'(dh)) keep / (1 - p) for every token, its sums over equal words (sums_triton.py) and over
sequences; the sums for w and b are added up in a fixed order.
"""

import torch
import triton.language as tl
from torch import Tensor

from mixassay.kernels.embedding.sums_triton import magnitude, raise_peak, sums
from mixassay.kernels.norm.triton import Shares, accumulator, scope
from mixassay.kernels.residual_norm.triton import kernel, unit, unit_gradient, vector, whole


@kernel
def forward_kernel(
    ids, table, position, keep, weight, bias, x, h, tokens, share, programs, V, T, scale, eps,
    N: tl.constexpr, CENTRE: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    first, last, _, member = scope(tokens, share, programs, 1)
    column = tl.arange(0, BN)[None, :]
    inside = column < N
    w = vector(weight, member * N + column, inside, ACC)
    if bias is not None:
        b = vector(bias, member * N + column, inside, ACC)
    for token in range(first, last, BR):
        rows = token + tl.arange(0, BR)
        live = (rows < last)[:, None] & inside
        word = member * V + tl.load(ids + rows, mask=rows < last, other=0)
        u = tl.load(table + word[:, None] * N + column, mask=live, other=0.0).to(ACC)
        if position is not None:
            u += tl.load(position + (member * T + rows % T)[:, None] * N + column, mask=live, other=0.0).to(ACC)
        place = rows[:, None] * N + column
        if keep is not None:
            u = tl.where(tl.load(keep + place, mask=live, other=0) != 0, u * scale, 0.0)
        tl.store(x + place, u, mask=live)
        n = unit(u, inside, eps, N, CENTRE)[0] * w
        if bias is not None:
            n += b
        tl.store(h + place, n.to(h.dtype.element_ty), mask=live)


@kernel
def backward_kernel(
    x, keep, weight, dx, dh, g, peaks, shares, bias_shares, tokens, share, programs, scale, eps,
    N: tl.constexpr, CENTRE: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    first, last, _, member = scope(tokens, share, programs, 1)
    column = tl.arange(0, BN)[None, :]
    inside = column < N
    w = vector(weight, member * N + column, inside, ACC)
    dw = tl.zeros([BR, BN], ACC)
    db = tl.zeros([BR, BN], ACC)
    peak = tl.zeros([BR], ACC)
    for token in range(first, last, BR):
        rows = token + tl.arange(0, BR)[:, None]
        live = (rows < last) & inside
        place = rows * N + column
        n, r = unit(tl.load(x + place, mask=live, other=0.0).to(ACC), inside, eps, N, CENTRE)
        e = tl.load(dh + place, mask=live, other=0.0).to(ACC)
        db += e
        dw += e * n
        d = unit_gradient(e * w, n, r, inside, N, CENTRE)
        if dx is not None:
            d += tl.load(dx + place, mask=live, other=0.0).to(ACC)
        if keep is not None:
            d = tl.where(tl.load(keep + place, mask=live, other=0) != 0, d * scale, 0.0)
        tl.store(g + place, d, mask=live)
        peak = tl.maximum(peak, tl.max(magnitude(d), axis=1))
    raise_peak(peaks, member, tl.max(peak))
    at = tl.program_id(0).to(tl.int64) * N + column
    tl.store(shares + at, tl.sum(dw, axis=0)[None, :], mask=inside)
    if bias_shares is not None:
        tl.store(bias_shares + at, tl.sum(db, axis=0)[None, :], mask=inside)


def forward(
    tokens: Tensor,
    table: Tensor,
    position: Tensor | None,
    keep: Tensor | None,
    p: float,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """x, and h in `dtype`, for tokens [M, B, T], tables [M, V, D], positions [M, T, D] and weights [M, D]."""
    M, V, D = table.shape
    x = table.new_empty((*tokens.shape, D))
    how, h = Shares.of(x, 1, M), torch.empty_like(x, dtype=dtype)
    tokens, table, position, keep, weight, bias = whole(tokens, table, position, keep, weight, bias)
    forward_kernel[(M * how.programs,)](
        tokens, table, position, keep, weight, bias, x, h, how.tokens, how.share, how.programs, V, tokens.shape[-1],
        1 / (1 - p), eps, N=D, CENTRE=bias is not None, BR=how.rows, BN=how.width, ACC=accumulator(x),
        num_warps=how.warps,
    )  # fmt: skip
    return x, h


def backward(
    x: Tensor,
    tokens: Tensor,
    keep: Tensor | None,
    p: float,
    weight: Tensor,
    bias: Tensor | None,
    dx: Tensor | None,
    dh: Tensor,
    V: int,
    eps: float,
    positioned: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Gradients of table, positions where there are any, weight and bias."""
    M, D = weight.shape
    how, g = Shares.of(x, 1, M), torch.empty_like(x)
    x, tokens, keep, weight, dx, dh = whole(x, tokens, keep, weight, dx, dh)
    peaks = x.new_zeros(M, dtype=torch.int32)
    shares, bias_shares = (None if v is None else x.new_empty((M, how.programs, D)) for v in (weight, bias))
    backward_kernel[(M * how.programs,)](
        x, keep, weight, dx, dh, g, peaks, shares, bias_shares, how.tokens, how.share, how.programs, 1 / (1 - p), eps,
        N=D, CENTRE=bias is not None, BR=how.rows, BN=how.width, ACC=accumulator(x), num_warps=how.warps,
    )  # fmt: skip
    dweight, dbias = (None if part is None else part.sum(1) for part in (shares, bias_shares))
    return sums(g, tokens, peaks, V, how), g.sum(1) if positioned else None, dweight, dbias
