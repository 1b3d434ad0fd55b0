"""Mamba's time step in Triton: one pass over memory forward, one backward.

    dt = softplus(raw + bias)      v = dt x      g = -a dt, a = exp(A_log)

Backward, with everything recomputed:

    ddt = sum over channels of dv x - a dg      draw = ddt sigmoid(raw + bias)      dx = dt dv
    dbias = sum over tokens of draw             dA_log = sum over tokens of g dg

A program takes a share of one model's tokens, a few at a time, and adds up a row of the last two.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mixassay.kernels.norm.triton import accumulator, scope

kernel = triton.jit(do_not_specialize=["tokens", "share", "programs"])


@triton.jit
def softplus(z):
    """As torch's: z itself above 20."""
    return tl.where(z > 20.0, z, tl.log(1.0 + tl.exp(tl.minimum(z, 20.0))))


@kernel
def forward_kernel(
    x, raw, bias, A_log, v, g, x_row, raw_row, tokens, share, programs,
    H: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, BP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    first, last, _, member = scope(tokens, share, programs, 1)
    h, p = tl.arange(0, BH)[None, :], tl.arange(0, BP)[None, None, :]
    b = tl.load(bias + member * H + h, mask=h < H, other=0.0).to(ACC)
    a = tl.exp(tl.load(A_log + member * H + h, mask=h < H, other=0.0).to(ACC))
    for token in range(first, last, BT):
        t = token + tl.arange(0, BT)[:, None]
        keep = (t < last) & (h < H)
        dt = softplus(tl.load(raw + t * raw_row + h, mask=keep, other=0.0).to(ACC) + b)
        tl.store(g + t * H + h, -a * dt, mask=keep)
        inside = keep[:, :, None] & (p < P)
        at = h[:, :, None] * P + p
        xs = tl.load(x + t[:, :, None] * x_row + at, mask=inside, other=0.0).to(ACC)
        tl.store(v + t[:, :, None] * (H * P) + at, (xs * dt[:, :, None]).to(v.dtype.element_ty), mask=inside)


@kernel
def backward_kernel(
    x, raw, bias, A_log, dv, dg, dx, draw, sums, x_row, raw_row, tokens, share, programs,
    H: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, BP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    first, last, _, member = scope(tokens, share, programs, 1)
    h, p = tl.arange(0, BH)[None, :], tl.arange(0, BP)[None, None, :]
    b = tl.load(bias + member * H + h, mask=h < H, other=0.0).to(ACC)
    a = tl.exp(tl.load(A_log + member * H + h, mask=h < H, other=0.0).to(ACC))
    dbias = tl.zeros([BT, BH], ACC)
    dA = tl.zeros([BT, BH], ACC)
    for token in range(first, last, BT):
        t = token + tl.arange(0, BT)[:, None]
        keep = (t < last) & (h < H)
        z = tl.load(raw + t * raw_row + h, mask=keep, other=0.0).to(ACC) + b
        dt = softplus(z)
        inside = keep[:, :, None] & (p < P)
        at = h[:, :, None] * P + p
        xs = tl.load(x + t[:, :, None] * x_row + at, mask=inside, other=0.0).to(ACC)
        place = t[:, :, None] * (H * P) + at
        dvs = tl.load(dv + place, mask=inside, other=0.0).to(ACC)
        tl.store(dx + place, (dvs * dt[:, :, None]).to(dx.dtype.element_ty), mask=inside)
        dgs = tl.load(dg + t * H + h, mask=keep, other=0.0).to(ACC)
        dz = (tl.sum(dvs * xs, axis=2) - a * dgs) / (1.0 + tl.exp(-z))
        tl.store(draw + t * H + h, dz.to(draw.dtype.element_ty), mask=keep)
        dbias += tl.where(keep, dz, 0.0)
        dA -= a * dt * dgs
    at = tl.program_id(0).to(tl.int64) * (2 * H) + tl.arange(0, BH)
    live = tl.arange(0, BH) < H
    tl.store(sums + at, tl.sum(dbias, axis=0), mask=live)
    tl.store(sums + at + H, tl.sum(dA, axis=0), mask=live)


class Shares(NamedTuple):
    """How the tokens of M models are shared among programs."""

    share: int  # tokens a program
    programs: int  # a model
    tokens: int  # at a time
    heads: int  # a power of two
    channels: int  # a power of two

    @classmethod
    def of(cls, tokens: int, M: int, H: int, P: int) -> "Shares":
        heads, channels = triton.next_power_of_2(H), triton.next_power_of_2(P)
        rows = max(1, 2048 // (heads * channels))
        share = triton.cdiv(triton.cdiv(tokens, max(1, 4096 // M)), rows) * rows
        return cls(share, triton.cdiv(tokens, share), rows, heads, channels)


def forward(x: Tensor, raw: Tensor, dt_bias: Tensor, A_log: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """dt x in `dtype` and the log decays, for x [M, ..., H, P], raw [M, ..., H] and parameters [M, H] of M models."""
    (M, H), P = dt_bias.shape, x.shape[-1]
    tokens = raw.numel() // (M * H)
    how = Shares.of(tokens, M, H, P)
    v = x.new_empty(x.shape, dtype=dtype)
    g = dt_bias.new_empty(raw.shape)
    (x, x_row), (raw, raw_row) = rows(x, H * P), rows(raw, H)
    forward_kernel[(M * how.programs,)](
        x, raw, dt_bias.contiguous(), A_log.contiguous(), v, g, x_row, raw_row, tokens, how.share, how.programs,
        H=H, P=P, BT=how.tokens, BH=how.heads, BP=how.channels, ACC=accumulator(dt_bias),
    )  # fmt: skip
    return v, g


def backward(
    x: Tensor, raw: Tensor, dt_bias: Tensor, A_log: Tensor, dv: Tensor, dg: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, raw, dt_bias and A_log."""
    (M, H), P = dt_bias.shape, x.shape[-1]
    tokens = raw.numel() // (M * H)
    how = Shares.of(tokens, M, H, P)
    dx, draw = x.new_empty(x.shape), raw.new_empty(raw.shape)
    sums = dt_bias.new_empty((M, how.programs, 2, H))
    (x, x_row), (raw, raw_row) = rows(x, H * P), rows(raw, H)
    backward_kernel[(M * how.programs,)](
        x, raw, dt_bias.contiguous(), A_log.contiguous(), dv.contiguous(), dg.contiguous(), dx, draw, sums,
        x_row, raw_row, tokens, how.share, how.programs,
        H=H, P=P, BT=how.tokens, BH=how.heads, BP=how.channels, ACC=accumulator(dt_bias),
    )  # fmt: skip
    dbias, dA = sums.sum(1).unbind(1)
    return dx, draw, dbias, dA


def rows(x: Tensor, width: int) -> tuple[Tensor, int]:
    """x as rows of `width` numbers that lie side by side, equally far apart, and how far."""
    axes = [(n, s) for n, s in zip(x.shape, x.stride(), strict=True) if n != 1]
    inner = 1
    while axes and inner < width and axes[-1][1] == inner:
        inner *= axes.pop()[0]
    stride = axes[-1][1] if axes else width
    regular = inner == width and all(a[1] == b[0] * b[1] for a, b in pairwise(axes))
    return (x, stride) if regular else (x.contiguous(), width)
