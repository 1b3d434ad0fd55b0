"""The Triton kernels as torch operators: autograd, vmap (the mapped axis joins the batch), fake tensors, opcheck.

An operator returns tensors only, so what is absent is a tensor without elements.
"""

from typing import Any

import torch
from torch import Tensor

from mixassay.kernels.common.registered import nothing, on_device, operand_dtype, present, vmap_joins
from mixassay.kernels.log_linear_attention import triton


def log_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """o of the public function for sequences that begin with no state. Products read q, k and v in one dtype."""
    dtype = operand_dtype(q, k, v)
    o: Tensor = forward(q.to(dtype), k.to(dtype), v.to(dtype), level_scale, log_decay, cu_seqlens, scale)[0]
    return o.to(v.dtype)


@torch.library.custom_op("mixassay::log_linear_attention", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """o, and the tree of chunk states for the backward."""
    with on_device(q):
        o, tree = triton.forward(q, k, v, level_scale, log_decay, scale, cu_seqlens)
    return o, nothing(q) if tree is None else tree


@torch.library.custom_op("mixassay::log_linear_attention_backward", mutates_args=())
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    cu_seqlens: Tensor | None,
    tree: Tensor,
    do: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with on_device(q):
        *grads, dg = triton.backward(q, k, v, level_scale, log_decay, scale, cu_seqlens, present(tree), do)
    dq, dk, dv, dlevel = grads
    return dq, dk, dv, dlevel, nothing(q) if dg is None else dg


@forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    shape = triton.tree_shape(q, v, cu_seqlens)
    tree = nothing(q) if shape is None else q.new_empty(shape, dtype=triton.state_dtype(q.dtype))
    return v.new_empty(v.shape), tree


@backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dg = nothing(q) if log_decay is None else log_decay.new_empty(log_decay.shape)
    dq, dk, dv, dlevel = (x.new_empty(x.shape) for x in (q, k, v, level_scale))
    return dq, dk, dv, dlevel, dg


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, output[1])


def _gradients(ctx: Any, do: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, tree = ctx.saved_tensors
    do = torch.zeros_like(tensors[2]) if do is None else do
    *grads, dg = backward(*tensors, tree, do, ctx.scale)
    return *grads, present(dg), None, None


forward.register_autograd(_gradients, setup_context=_remember)


vmap_joins(forward, backward, packed=5)
