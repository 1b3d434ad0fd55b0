"""The Triton kernels as torch operators: autograd, fake tensors, and vmap with a weight for each member.

An operator returns tensors only, so what is absent is a tensor without elements.
"""

from typing import Any

import torch
from torch import Tensor

from mixassay.kernels.causal_conv import triton
from mixassay.kernels.common.registered import folded, looped, nothing, on_device, present, unfolded


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str | None,
) -> Tensor:
    bias = None if bias is None else bias.unsqueeze(0)
    y: Tensor = forward(x, weight.unsqueeze(0), bias, initial_state, cu_seqlens, activation == "silu")
    return y


@torch.library.custom_op("mixassay::causal_conv", mutates_args=())
def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> Tensor:
    """weight [M, D, W] and bias [M, D] of M members, which share the batch equally, one after the other."""
    with on_device(x):
        return triton.forward(x, weight, bias, initial_state, cu_seqlens, silu)


@torch.library.custom_op("mixassay::causal_conv_backward", mutates_args=())
def backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    dy: Tensor,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with on_device(x):
        dx, dweight, dbias, dstate = triton.backward(x, weight, bias, initial_state, cu_seqlens, dy, silu)
    return dx, dweight, nothing(x) if dbias is None else dbias, nothing(x) if dstate is None else dstate


@forward.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@backward.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dbias = nothing(x) if bias is None else bias.new_empty(bias.shape)
    dstate = nothing(x) if initial_state is None else initial_state.new_empty(initial_state.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias, dstate


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return *map(present, backward(*ctx.saved_tensors, dy, ctx.silu)), None, None


forward.register_autograd(_gradients, setup_context=_remember)


def _members(op: Any, info: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, Any]:
    """Members join the batch. Packed sequences lie alike in all of them, or each member is a call of its own."""

    def call(*args: Any) -> tuple[Tensor, ...]:
        results = op(*args)
        return (results,) if isinstance(results, Tensor) else results

    if in_dims[4] is not None:
        results, dims = looped(call, info, in_dims, args)
    else:
        joined = folded(info, (*in_dims[:4], None, *in_dims[5:]), (*args[:4], None, *args[5:]))
        joined[4] = args[4]
        results, dims = unfolded(info, call(*joined))
    first, *others = results
    return (results, dims) if others else (first, 0)


@forward.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    return _members(forward, info, in_dims, args)


@backward.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    return _members(backward, info, in_dims, args)
