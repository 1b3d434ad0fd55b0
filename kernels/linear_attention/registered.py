"""The Triton kernels as torch operators: autograd, vmap (the mapped axis joins the batch), fake tensors, opcheck.

An operator returns tensors only, so what is absent is a tensor without elements.
"""

from typing import Any

import torch
from torch import Tensor

from mixassay.kernels.common.registered import nothing, on_device, operand_dtype, present, vmap_joins
from mixassay.kernels.common.triton import segment_length
from mixassay.kernels.linear_attention import triton


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    dtype = operand_dtype(q, k, v)
    o, final, _ = forward(
        q.to(dtype), k.to(dtype), v.to(dtype), log_decay, initial_state, cu_seqlens, scale, output_final_state
    )
    return o.to(v.dtype), final if output_final_state else None


@torch.library.custom_op("mixassay::linear_attention", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    output_final_state: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """o, the final state, and the states at the borders of segments for the backward."""
    with on_device(q):
        o, final, states = triton.forward(q, k, v, log_decay, scale, initial_state, cu_seqlens, output_final_state)
    return o, nothing(q) if final is None else final, nothing(q) if states is None else states


@torch.library.custom_op("mixassay::linear_attention_backward", mutates_args=())
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    states: Tensor,
    do: Tensor,
    dfinal: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    B, T = q.shape[:2]
    # Under vmap the batch may be another than in the forward: sequences must be cut as they were.
    length = None
    if cu_seqlens is None:
        length = segment_length(T, states.shape[0] // B - 1 if states.numel() else 1)
    with on_device(q):
        dq, dk, dv, dg, dinitial = triton.backward(
            q, k, v, log_decay, scale, initial_state, cu_seqlens, present(states), do, dfinal, length=length
        )
    return dq, dk, dv, nothing(q) if dg is None else dg, nothing(q) if dinitial is None else dinitial


@forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    output_final_state: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    cut, state, dtype = triton.sizes(q, v, cu_seqlens)
    final = q.new_empty((cut.sequences, *state), dtype=dtype) if output_final_state else nothing(q)
    states = q.new_empty((cut.borders, *state), dtype=dtype) if cut.inner else nothing(q)
    return v.new_empty(v.shape), final, states


@backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dg = nothing(q) if log_decay is None else log_decay.new_empty(log_decay.shape)
    dinitial = nothing(q) if initial_state is None else initial_state.new_empty(initial_state.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dg, dinitial


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.scale, _ = inputs
    ctx.save_for_backward(*tensors, output[2])


def _gradients(ctx: Any, do: Tensor | None, dfinal: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, log_decay, initial_state, cu_seqlens, states = ctx.saved_tensors
    do = torch.zeros_like(v) if do is None else do
    grads = backward(q, k, v, log_decay, initial_state, cu_seqlens, states, do, present(dfinal), ctx.scale)
    return *map(present, grads), None, None, None


forward.register_autograd(_gradients, setup_context=_remember)


vmap_joins(forward, backward, packed=5)
