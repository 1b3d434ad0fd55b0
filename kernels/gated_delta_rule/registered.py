"""The Triton kernels as torch operators: autograd, vmap (the mapped axis joins the batch), fake tensors, opcheck.

An operator returns tensors only, so what is absent is a tensor without elements.
"""

from typing import Any

import torch
from torch import Tensor

from mixassay.kernels.common.registered import nothing, on_device, operand_dtype, present, vmap_joins
from mixassay.kernels.common.triton import segment_length
from mixassay.kernels.gated_delta_rule import triton


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    dtype = operand_dtype(q, k, v)
    o, final, *_ = forward(
        q.to(dtype), k.to(dtype), v.to(dtype), beta, log_decay, initial_state, cu_seqlens, scale, output_final_state
    )
    return o.to(v.dtype), final if output_final_state else None


@torch.library.custom_op("mixassay::gated_delta_rule", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    output_final_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, the final state, and what the backward needs (`triton.Saved`)."""
    with on_device(q):
        made = triton.forward(q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, output_final_state)
    return _tensors(q, *made)


@torch.library.custom_op("mixassay::gated_delta_rule_backward", mutates_args=())
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    M: Tensor,
    G: Tensor,
    starts: Tensor,
    transitions: Tensor,
    do: Tensor,
    dfinal: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    B, T = q.shape[:2]
    # Under vmap the batch may be another than in the forward: sequences must be cut as they were.
    length = None
    if cu_seqlens is None:
        length = segment_length(T, starts.shape[0] // B - 1 if starts.numel() else 1)
    saved = triton.Saved(M, G, present(starts), present(transitions))
    with on_device(q):
        dq, dk, dv, dbeta, dg, dinitial = triton.backward(
            q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, saved, do, dfinal, length=length
        )
    return dq, dk, dv, dbeta, nothing(q) if dg is None else dg, nothing(q) if dinitial is None else dinitial


def _tensors(
    q: Tensor, o: Tensor, final: Tensor | None, saved: triton.Saved
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    final, starts, transitions = (nothing(q) if x is None else x for x in (final, saved.starts, saved.transitions))
    return o, final, saved.M, saved.G, starts, transitions


@forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    output_final_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _tensors(q, *triton.room(q, v, cu_seqlens, output_final_state))


@backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dg = nothing(q) if log_decay is None else log_decay.new_empty(log_decay.shape)
    dinitial = nothing(q) if initial_state is None else initial_state.new_empty(initial_state.shape)
    dq, dk, dv, dbeta = (x.new_empty(x.shape) for x in (q, k, v, beta))
    return dq, dk, dv, dbeta, dg, dinitial


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale, _ = inputs
    ctx.save_for_backward(*tensors, *output[2:])


def _gradients(ctx: Any, do: Tensor | None, dfinal: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, *others = ctx.saved_tensors
    do = torch.zeros_like(v) if do is None else do
    grads = backward(q, k, v, *others, do, present(dfinal), ctx.scale)
    return *map(present, grads), None, None, None


forward.register_autograd(_gradients, setup_context=_remember)


vmap_joins(forward, backward, packed=6)
