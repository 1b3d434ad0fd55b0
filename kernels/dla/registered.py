"""The Triton kernels as torch operators: autograd, vmap (the mapped axis joins the batch), fake tensors, opcheck.

An operator returns tensors only, so what is absent is a tensor without elements.
"""

from typing import Any

import torch
from torch import Tensor

from mixassay.kernels.common.registered import nothing, on_device, operand_dtype, present, vmap_joins
from mixassay.kernels.dla import triton
from mixassay.kernels.dla.slots import Schedule


def dla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank_scale: Tensor,
    schedule: Schedule,
    log_decay: Tensor | None,
    gate: Tensor | None,
    scale: float,
) -> Tensor:
    dtype, out = operand_dtype(q, k, v), v.dtype
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v, rank_scale = q.to(dtype), k.to(dtype), v.to(dtype), rank_scale.to(wide)
    log_decay, gate = (None if x is None else x.to(wide) for x in (log_decay, gate))
    o: Tensor = forward(q, k, v, rank_scale, schedule.starts, schedule.until, log_decay, gate, scale)
    return o.to(out)


@torch.library.custom_op("mixassay::dla", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank_scale: Tensor,
    starts: Tensor,
    until: Tensor,
    log_decay: Tensor | None,
    gate: Tensor | None,
    scale: float,
) -> Tensor:
    """o, which a gate does not change: it is for the backward."""
    with on_device(q):
        return triton.forward(q, k, v, rank_scale, starts, until, log_decay, scale)


@torch.library.custom_op("mixassay::dla_backward", mutates_args=())
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank_scale: Tensor,
    starts: Tensor,
    until: Tensor,
    log_decay: Tensor | None,
    gated: bool,
    do: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    with on_device(q):
        *grads, dg, dgate = triton.backward(q, k, v, rank_scale, starts, until, log_decay, gated, do, scale)
    dq, dk, dv, dweights = grads
    return dq, dk, dv, dweights, nothing(q) if dg is None else dg, nothing(q) if dgate is None else dgate


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return v.new_empty(v.shape)


@backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank_scale: Tensor,
    starts: Tensor,
    until: Tensor,
    log_decay: Tensor | None,
    gated: bool,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dweights = (x.new_empty(x.shape) for x in (q, k, v, rank_scale))
    absent = nothing(q)
    each = rank_scale.new_empty(rank_scale.shape[:3])
    dg = absent if log_decay is None else each
    return dq, dk, dv, dweights, dg, torch.empty_like(each if gated else absent)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, gate, ctx.scale = inputs
    ctx.save_for_backward(*tensors)
    ctx.gated = gate is not None


def _gradients(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk, dv, dweights, dg, dgate = backward(*ctx.saved_tensors, ctx.gated, do, ctx.scale)
    return dq, dk, dv, dweights, None, None, present(dg), present(dgate), None


forward.register_autograd(_gradients, setup_context=_remember)


vmap_joins(forward, backward)
