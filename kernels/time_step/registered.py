"""The Triton kernels as torch operators: autograd, fake tensors, and vmap with parameters for each member."""

from typing import Any

import torch
from torch import Tensor

from mixassay.kernels.common.registered import on_device, vmap_joins
from mixassay.kernels.time_step import triton


def time_step(x: Tensor, raw: Tensor, dt_bias: Tensor, A_log: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    v, g = forward(*(given.unsqueeze(0) for given in (x, raw, dt_bias, A_log)), dtype)
    return v.squeeze(0), g.squeeze(0)


@torch.library.custom_op("mixassay::time_step", mutates_args=())
def forward(x: Tensor, raw: Tensor, dt_bias: Tensor, A_log: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [M, ..., H, P], raw [M, ..., H], and parameters [M, H] of M members."""
    with on_device(x):
        return triton.forward(x, raw, dt_bias, A_log, dtype)


@torch.library.custom_op("mixassay::time_step_backward", mutates_args=())
def backward(
    x: Tensor, raw: Tensor, dt_bias: Tensor, A_log: Tensor, dv: Tensor, dg: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with on_device(x):
        dx, draw, dbias, dA = triton.backward(x, raw, dt_bias, A_log, dv, dg)
    return dx, draw, dbias.clone(), dA.clone()


@forward.register_fake
def _(x: Tensor, raw: Tensor, dt_bias: Tensor, A_log: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), dt_bias.new_empty(raw.shape)


@backward.register_fake
def _(x: Tensor, raw: Tensor, dt_bias: Tensor, A_log: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx, draw, dbias, dA = (given.new_empty(given.shape) for given in (x, raw, dt_bias, A_log))
    return dx, draw, dbias, dA


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4])


def _gradients(ctx: Any, dv: Tensor, dg: Tensor) -> tuple[Tensor | None, ...]:
    return *backward(*ctx.saved_tensors, dv, dg), None


forward.register_autograd(_gradients, setup_context=_remember)


vmap_joins(forward, backward)
