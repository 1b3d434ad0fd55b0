"""The Triton kernels as torch operators: autograd, fake tensors, and vmap (the mapped axis joins the batch)."""

from typing import Any

import torch
from torch import Tensor

from mixassay.kernels.common.registered import on_device, operand_dtype, vmap_joins
from mixassay.kernels.softmax_attention import triton


def packed_attention(qkv: Tensor, scale: float) -> Tensor:
    o: Tensor = forward(qkv.to(operand_dtype(qkv, qkv, qkv)), scale)[0]
    return o.to(qkv.dtype)


@torch.library.custom_op("mixassay::softmax_attention", mutates_args=())
def forward(qkv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """o, and the logarithms of the sums of weights for the backward."""
    with on_device(qkv):
        return triton.forward(qkv, scale)


@torch.library.custom_op("mixassay::softmax_attention_backward", mutates_args=())
def backward(qkv: Tensor, o: Tensor, lse: Tensor, do: Tensor, scale: float) -> Tensor:
    with on_device(qkv):
        return triton.backward(qkv, o, lse, do, scale)


@forward.register_fake
def _(qkv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    B, T, _, H, K = qkv.shape
    return qkv.new_empty((B, T, H, K)), qkv.new_empty((B, H, T), dtype=triton.wide(qkv))


@backward.register_fake
def _(qkv: Tensor, *_: Any) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, ctx.scale = inputs
    ctx.save_for_backward(qkv, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, do: Tensor | None, _: None) -> tuple[Tensor | None, None]:
    return None if do is None else backward(*ctx.saved_tensors, do, ctx.scale), None


forward.register_autograd(_gradients, setup_context=_remember)


vmap_joins(forward, backward)
