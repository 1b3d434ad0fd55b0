"""The Triton kernels as torch operators: autograd, vmap (the mapped axis joins the batch), fake tensors, opcheck.

One operator serves `hla2`, `ahla` and `hla3`; it returns tensors only, so what is absent is a tensor without elements.
"""

from typing import Any

import torch
from torch import Tensor

from mixassay.kernels.common.registered import nothing, on_device, operand_dtype, present, vmap_joins
from mixassay.kernels.common.triton import segment_length
from mixassay.kernels.hla import triton
from mixassay.kernels.hla.state import State
from mixassay.kernels.hla.tokens import Tokens
from mixassay.kernels.hla.triton import Kept, States

Eight = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Nine = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def hla(
    kind: type[State],
    x: Tokens,
    scale: float,
    ridge: float,
    state: State | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
) -> tuple[Tensor, State | None]:
    """The operator whose state is `kind`: HLA2State, AHLAState or HLA3State."""
    letters: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    metric, values = "S" in letters, "P" in letters
    given = dict(zip(letters, state or (), strict=False))
    dtype = operand_dtype(x.q, x.k, x.v)
    q, k, v = (y.to(dtype) for y in (x.q, x.k, x.v))
    S, P, F = given.get("S"), given.get("P"), given.get(letters[-1])
    flags = (metric, values, output_final_state)
    o, S, P, F, *_ = forward(q, k, v, x.inner, x.outer, S, P, F, cu_seqlens, scale, ridge, *flags)
    last = [y for y, there in ((S, metric), (P, values), (F, True)) if there]
    return o.to(x.v.dtype), kind(*last) if output_final_state else None


@torch.library.custom_op("mixassay::hla", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inner: Tensor | None,
    outer: Tensor | None,
    S: Tensor | None,
    P: Tensor | None,
    F: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    ridge: float,
    metric: bool,
    values: bool,
    output_final_state: bool,
) -> Nine:
    """o, the final S, P and F, and for the backward kappa, nu, and S, P and F at the borders of segments."""
    first, flags = States(S, P, F), (metric, values, output_final_state)
    with on_device(q):
        o, last, kept = triton.forward(q, k, v, inner, outer, first, cu_seqlens, scale, ridge, *flags)
    given = (o, *last, kept.kappa, kept.nu, *kept.states)
    return tuple(nothing(q) if x is None else x for x in given)  # type: ignore[return-value]


@torch.library.custom_op("mixassay::hla_backward", mutates_args=())
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inner: Tensor | None,
    outer: Tensor | None,
    S: Tensor | None,
    P: Tensor | None,
    F: Tensor | None,
    cu_seqlens: Tensor | None,
    kappa: Tensor,
    nu: Tensor,
    kept_S: Tensor,
    kept_P: Tensor,
    kept_F: Tensor,
    do: Tensor,
    dS: Tensor | None,
    dP: Tensor | None,
    dF: Tensor | None,
    scale: float,
    ridge: float,
) -> Eight:
    B, T = q.shape[:2]
    # Under vmap the batch may be another than in the forward: sequences must be cut as they were.
    length = None
    if cu_seqlens is None:
        length = segment_length(T, kept_F.shape[0] // B - 1 if kept_F.numel() else 1)
    first, last = States(S, P, F), States(dS, dP, dF)
    kept = Kept(present(kappa), present(nu), States(*map(present, (kept_S, kept_P, kept_F))))
    with on_device(q):
        *grads, made = triton.backward(
            q, k, v, inner, outer, first, cu_seqlens, kept, do, last, scale, ridge, length=length
        )
    return tuple(nothing(q) if x is None else x for x in (*grads, *made))  # type: ignore[return-value]


@forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inner: Tensor | None,
    outer: Tensor | None,
    S: Tensor | None,
    P: Tensor | None,
    F: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    ridge: float,
    metric: bool,
    values: bool,
    output_final_state: bool,
) -> tuple[Tensor, ...]:
    cut, dtype = triton.sizes(q, v, cu_seqlens)
    (B, T, H, K), (G, V) = q.shape, v.shape[2:]

    def made(wanted: bool, *shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return q.new_empty(shape, dtype=dtype) if wanted else nothing(q)

    def states(wanted: bool, rows: int, heads: int) -> list[Tensor]:
        shapes = ((metric, heads, K, K), (values, heads, K, V), (True, H, K, V))
        return [made(there and wanted, rows, *shape) for there, *shape in shapes]

    kappa, nu = made(metric, B, T, H, K, dtype=q.dtype), made(values, B, T, H, V, dtype=q.dtype)
    last, kept = states(output_final_state, cut.sequences, G), states(cut.inner, cut.borders, H)
    return q.new_empty((B, T, H, V)), *last, kappa, nu, *kept


@backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inner: Tensor | None,
    outer: Tensor | None,
    S: Tensor | None,
    P: Tensor | None,
    F: Tensor | None,
    *_: Any,
) -> tuple[Tensor, ...]:
    given = (q, k, v, inner, outer, S, P, F)
    return tuple(nothing(q) if x is None else x.new_empty(x.shape) for x in given)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Nine) -> None:
    *tensors, ctx.scale, ctx.ridge, _, _, _ = inputs
    ctx.save_for_backward(*tensors, *output[4:])


def _gradients(ctx: Any, do: Tensor | None, *dstates: Tensor | None) -> tuple[Tensor | None, ...]:
    *saved, kappa, nu, kept_S, kept_P, kept_F = ctx.saved_tensors
    q, _, v = saved[:3]
    do = q.new_zeros((*q.shape[:3], v.shape[-1])) if do is None else do
    last = map(present, dstates[:3])
    grads = backward(*saved, kappa, nu, kept_S, kept_P, kept_F, do, *last, ctx.scale, ctx.ridge)
    return *map(present, grads), *(None,) * 6


forward.register_autograd(_gradients, setup_context=_remember)


vmap_joins(forward, backward, packed=8)
