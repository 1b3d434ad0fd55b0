"""The Triton kernels as torch operators: autograd, vmap (the mapped axis joins the batch), fake tensors, opcheck.

An operator returns tensors only, so what is absent is a tensor without elements.
"""

from typing import Any

import torch
from torch import Tensor

from mixassay.kernels.common.registered import nothing, operand_dtype, present, vmap_joins
from mixassay.kernels.log_linear_gated_delta_rule import triton


def log_linear_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
) -> Tensor:
    """o of the public function for sequences that begin with no state. Products read q, k and v in one dtype."""
    dtype, out = operand_dtype(q, k, v), v.dtype
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    log_decay = None if log_decay is None else log_decay.float()
    o: Tensor
    o, _ = forward(q, k, v, beta.float(), level_scale.float(), log_decay, cu_seqlens, scale)
    return o.to(out)


@torch.library.custom_op("mixassay::log_linear_gated_delta_rule", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """o, and what the backward needs."""
    return triton.forward(q, k, v, beta, level_scale, log_decay, scale, cu_seqlens)


@torch.library.custom_op("mixassay::log_linear_gated_delta_rule_backward", mutates_args=())
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    cu_seqlens: Tensor | None,
    M: Tensor,
    do: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    *grads, dg = triton.backward(q, k, v, beta, level_scale, log_decay, scale, cu_seqlens, M, do)
    dq, dk, dv, dbeta, dlevel = grads
    return dq, dk, dv, dbeta, dlevel, nothing(q) if dg is None else dg


@forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return triton.room(q, v)


@backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dbeta, dlevel = (x.new_empty(x.shape) for x in (q, k, v, beta, level_scale))
    return dq, dk, dv, dbeta, dlevel, nothing(q) if log_decay is None else log_decay.new_empty(log_decay.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, output[1])


def _gradients(ctx: Any, do: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, *others = ctx.saved_tensors
    grads = backward(q, k, v, *others, torch.zeros_like(v) if do is None else do, ctx.scale)
    return *map(present, grads), None, None


forward.register_autograd(_gradients, setup_context=_remember)


vmap_joins(forward, backward, packed=6)
