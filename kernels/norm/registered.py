"""The Triton kernels as torch operators: autograd, fake tensors, and vmap with a weight for each member.

An operator returns tensors only, so what is absent is a tensor without elements.
"""

from typing import Any

import torch
from torch import Tensor

from mixassay.kernels.common.registered import nothing, on_device, present, vmap_joins
from mixassay.kernels.norm import triton


def norm(
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
    others = (None if t is None else t.unsqueeze(0) for t in (weight, bias, before, after, skip, gain))
    y: Tensor = forward(x.unsqueeze(0), *others, groups, eps, mean, centre, dtype)
    return y.squeeze(0)


@torch.library.custom_op("mixassay::norm", mutates_args=())
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
    """x, before, after, skip [M, ..., D], weight, bias [M, D] and gain [M, H] of M members."""
    with on_device(x):
        return triton.forward(x, weight, bias, before, after, skip, gain, groups, eps, mean, centre, dtype)


@torch.library.custom_op("mixassay::norm_backward", mutates_args=())
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    with on_device(x):
        dx, *others = triton.backward(x, weight, bias, before, after, skip, gain, dy, groups, eps, mean, centre)
    dweight, dbias, dbefore, dafter, dskip, dgain = (nothing(x) if t is None else t for t in others)
    return dx, dweight, dbias, dbefore, dafter, dskip, dgain


@forward.register_fake
def _(
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
    return x.new_empty(x.shape, dtype=dtype)


@backward.register_fake
def _(x: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), *(nothing(x) if t is None else t.new_empty(t.shape) for t in others[:6])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.groups, ctx.eps, ctx.mean, ctx.centre, _ = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    grads = backward(*ctx.saved_tensors, dy, ctx.groups, ctx.eps, ctx.mean, ctx.centre)
    return *map(present, grads), None, None, None, None, None


forward.register_autograd(_gradients, setup_context=_remember)


vmap_joins(forward, backward)
