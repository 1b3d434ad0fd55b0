"""The Triton kernels as torch operators: autograd, fake tensors, and vmap with weights for each member."""

from typing import Any

import torch
from torch import Tensor

from mixassay.kernels.common.registered import on_device, vmap_joins
from mixassay.kernels.gated_conv import triton


def gated_conv(x: Tensor, weight: Tensor, bias: Tensor, p: Tensor, offset: Tensor, dtype: torch.dtype) -> Tensor:
    y: Tensor = forward(*(given.unsqueeze(0) for given in (x, weight, bias, p, offset)), dtype)
    return y.squeeze(0)


@torch.library.custom_op("mixassay::gated_conv", mutates_args=())
def forward(x: Tensor, weight: Tensor, bias: Tensor, p: Tensor, offset: Tensor, dtype: torch.dtype) -> Tensor:
    """x and p [M, B, T, D], weight [M, D, W], bias and offset [M, D] of M members."""
    with on_device(x):
        return triton.forward(x, weight, bias, p, offset, dtype)


@torch.library.custom_op("mixassay::gated_conv_backward", mutates_args=())
def backward(
    x: Tensor, weight: Tensor, bias: Tensor, p: Tensor, offset: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with on_device(x):
        return triton.backward(x, weight, bias, p, offset, dy)


@forward.register_fake
def _(x: Tensor, *others: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=others[-1])


@backward.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, p: Tensor, offset: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx, dweight, dbias, dp, doffset = (given.new_empty(given.shape) for given in (x, weight, bias, p, offset))
    return dx, dweight, dbias, dp, doffset


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return *backward(*ctx.saved_tensors, dy), None


forward.register_autograd(_gradients, setup_context=_remember)


vmap_joins(forward, backward)
