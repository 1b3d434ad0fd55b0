"""The Triton kernels as torch operators: autograd, fake tensors, and vmap with weights for each member.

An operator returns tensors only, so what is absent is a tensor without elements.
"""

from typing import Any

import torch
from torch import Tensor

from mixassay.kernels.common.registered import nothing, on_device, present, vmap_joins
from mixassay.kernels.residual_norm import triton


def residual_norm(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inner_weight: Tensor | None,
    inner_bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    given = (None if p is None else p.unsqueeze(0) for p in (x, y, weight, bias, inner_weight, inner_bias))
    _, s, h = forward(*given, eps, dtype)
    return s.squeeze(0), h.squeeze(0)


@torch.library.custom_op("mixassay::residual_norm", mutates_args=())
def forward(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inner_weight: Tensor | None,
    inner_bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """t for the backward, s and h, for x and y [M, ..., D] and weights [M, D] of M members."""
    with on_device(x):
        t, s, h = triton.forward(x, y, weight, bias, inner_weight, inner_bias, eps, dtype)
    return nothing(x) if t is None else t, s, h


@torch.library.custom_op("mixassay::residual_norm_backward", mutates_args=())
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    with on_device(t):
        dx, dy, dweight, *others = triton.backward(t, weight, bias, inner_weight, inner_bias, ds, dh, eps, dtype)
    dbias, dinner_weight, dinner_bias = (nothing(t) if d is None else d for d in others)
    return dx, dy, dweight, dbias, dinner_weight, dinner_bias


@forward.register_fake
def _(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, inner_weight: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    t = nothing(x) if inner_weight is None else x.new_empty(x.shape)
    return t, x.new_empty(x.shape), x.new_empty(x.shape, dtype=others[-1])


@backward.register_fake
def _(t: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    vectors = (nothing(t) if p is None else p.new_empty(p.shape) for p in (weight, bias, *others[:2]))
    return t.new_empty(t.shape), t.new_empty(t.shape, dtype=others[-1]), *vectors


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, y, *vectors, ctx.eps, _ = inputs
    t, s, _ = output
    ctx.dtype = y.dtype
    ctx.save_for_backward(t if vectors[2] is not None else s, *vectors)
    ctx.mark_non_differentiable(t)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, _: None, ds: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
    t, *vectors = ctx.saved_tensors
    dh = torch.zeros_like(t) if dh is None else dh
    return *map(present, backward(t, *vectors, ds, dh, ctx.eps, ctx.dtype)), None, None


forward.register_autograd(_gradients, setup_context=_remember)


vmap_joins(forward, backward)
