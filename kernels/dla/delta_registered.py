"""The Triton kernels of dynamic linear attention on the delta rule as torch operators: autograd, vmap (the mapped axis
joins the batch), fake tensors, opcheck.

An operator returns tensors only, so what is absent is a tensor without elements.
"""

from typing import Any

import torch
from torch import Tensor

from mixassay.kernels.common.registered import nothing, on_device, operand_dtype, present, vmap_joins
from mixassay.kernels.dla import delta_triton as triton
from mixassay.kernels.dla.slots import Schedule


def dla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank_scale: Tensor,
    schedule: Schedule,
    beta: Tensor,
    log_decay: Tensor | None,
    gate: Tensor | None,
    scale: float,
) -> Tensor:
    dtype, out = operand_dtype(q, k, v), v.dtype
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v, rank_scale, beta = q.to(dtype), k.to(dtype), v.to(dtype), rank_scale.to(wide), beta.to(wide)
    log_decay, gate = (None if x is None else x.to(wide) for x in (log_decay, gate))
    o: Tensor = forward(q, k, v, rank_scale, schedule.until, beta, log_decay, gate, scale)[0]
    return o.to(out)


@torch.library.custom_op("mixassay::dla_delta", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank_scale: Tensor,
    until: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    gate: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """o, which a gate does not change: it is for the backward, as is the inverse."""
    with on_device(q):
        return triton.forward(q, k, v, rank_scale, until, beta, log_decay, scale)


@torch.library.custom_op("mixassay::dla_delta_backward", mutates_args=())
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank_scale: Tensor,
    until: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    inverse: Tensor,
    gated: bool,
    do: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    with on_device(q):
        *grads, dg, dgate = triton.backward(q, k, v, rank_scale, until, beta, log_decay, gated, inverse, do, scale)
    dq, dk, dv, dweights, dbeta = grads
    return dq, dk, dv, dweights, dbeta, nothing(q) if dg is None else dg, nothing(q) if dgate is None else dgate


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return triton.room(q, v)


@backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank_scale: Tensor,
    until: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    inverse: Tensor,
    gated: bool,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dweights, dbeta = (x.new_empty(x.shape) for x in (q, k, v, rank_scale, beta))
    absent = nothing(q)
    dg, dgate = (torch.empty_like(dbeta if given else absent) for given in (log_decay is not None, gated))
    return dq, dk, dv, dweights, dbeta, dg, dgate


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, gate, ctx.scale = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.gated = gate is not None


def _gradients(ctx: Any, do: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk, dv, dweights, dbeta, dg, dgate = backward(*ctx.saved_tensors, ctx.gated, do, ctx.scale)
    return dq, dk, dv, dweights, None, dbeta, present(dg), present(dgate), None


forward.register_autograd(_gradients, setup_context=_remember)


vmap_joins(forward, backward)
