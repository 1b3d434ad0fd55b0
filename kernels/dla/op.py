"""Dynamic linear attention: the public functions."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from mixassay.errors import UserError
from mixassay.kernels import resolve
from mixassay.kernels.common.precision import accumulator, no_autocast
from mixassay.kernels.common.registered import against_triton
from mixassay.kernels.common.shapes import Axes
from mixassay.kernels.dla import chunked, dense, reference
from mixassay.kernels.dla.slots import Schedule, move
from mixassay.kernels.dla.straight_through import with_gate

Scope = Literal["all", "segment"]
DENSE = 512
"""Tokens up to which one product of all pairs is used; about the slots' R K, above which states are cheaper."""
CHUNK = 64
WIDEST = 128
"""Of keys and values in the Triton kernels."""
DELTA_LONGEST = 2048
"""Tokens up to which there are Triton kernels for the delta rule; they keep K numbers for each token and chunk."""


def dla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank_scale: Tensor,
    schedule: Schedule,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    scope: Scope = "all",
    gate: Tensor | None = None,
    opening: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Causal linear attention whose past is cut into slots, each read with a weight of its own (Wang et al. 2026).

    o_t = scale sum_r rank_scale_t[r] q_t^T S_r with S_r the base's state of the tokens in the slot of rank r: a sum of
    k_s v_s^T with decay or, with beta, what the gated delta rule makes of them. With rank_scale = 1 and scope "all"
    this is `linear_attention` or `gated_delta_rule`, whatever the schedule.

    q, k         [B, T, G, K]; G divides H. With beta: keys of beta |k|^2 in [0, 2]
    v            [B, T, H, V]
    rank_scale   [B, T, H, R], a token's weights by rank: 0 for the open slot, 1 for the last closed, ...
    schedule     of R slots (`schedule.schedule`, or `slots.slots` for boundaries from elsewhere). No gradient
    log_decay    [B, T, H], <= 0 (-inf forgets everything); None: no decay
    beta         [B, T, H], write strength of the delta rule; None: tokens are added
    scale        None: K**-0.5
    scope        "all": decay and delta rule act on every slot; "segment": on the open one, closed slots are frozen
    gate         [B, T, H], None or probabilities of a boundary. Alone, they change nothing but receive the gradient of
                 `straight_through.py` (for scope "segment" as if what is frozen were given); with `opening`
                 (`register.openings`) slots move that much (scope "all")
    chunk_size   tokens of a chunk of the torch form; None: all in one for up to 512 tokens, and for scope "segment"
    returns      o [B, T, H, V] in v's dtype

    Sums are float32, or float64 if an input is. May run under vmap. Raises UserError for shapes that do not fit and for
    a backend that cannot serve. On a GPU the Triton kernels (of a scalar decay or none; of the delta rule up to 2048
    tokens) multiply in the dtype of q, k and v, or autocast's; what they do not do takes the torch form.
    """
    axes = Axes("dla")
    axes.check("q", q, "BTGK")
    axes.check("k", k, "BTGK")
    axes.check("v", v, "BTHV")
    axes.check("rank_scale", rank_scale, "BTHR")
    for name, x in (("log_decay", log_decay), ("beta", beta), ("gate", gate)):
        if x is not None:
            axes.check(name, x, "BTH")
    axes.check_groups("q", "v")
    axes.check_positive("T", q.shape[1])
    axes.check_positive("R", rank_scale.shape[-1])
    axes.check_positive("chunk_size", chunk_size)
    if schedule.starts.shape != rank_scale.shape:
        shape = list(schedule.starts.shape)
        axes.fail(f"the schedule's starts have shape {shape}, expected rank_scale's {list(rank_scale.shape)}")
    if scope not in get_args(Scope):
        raise UserError(f'dla: unknown scope "{scope}", expected one of {", ".join(get_args(Scope))}')
    if opening is not None and (gate is None or scope != "all"):
        raise UserError('dla: a soft register (opening) needs a gate, and scope "all"')
    against = against_triton(q, k, v, rank_scale, schedule.starts, log_decay, beta, gate)
    frozen = scope == "segment" and (log_decay is not None or beta is not None)
    chosen = resolve("dla", backend, against_triton=_no_kernel(q, v, beta, opening, frozen) or against)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if chosen == "triton":
        from mixassay.kernels.dla import delta_registered, registered  # the package triton may not be there

        if beta is not None:
            return delta_registered.dla(q, k, v, rank_scale, schedule, beta, log_decay, gate, scale)
        return registered.dla(q, k, v, rank_scale, schedule, log_decay, gate, scale)
    dtype, out = accumulator(q, k, v, rank_scale, log_decay, beta, gate), v.dtype
    with no_autocast(q):
        q, k, v, rank_scale = (x.to(dtype) for x in (q, k, v, rank_scale))
        log_decay, beta, gate = (None if x is None else x.to(dtype) for x in (log_decay, beta, gate))
        if chosen == "reference" and (gate is None or opening is not None):
            o = reference.dla(q, k, v, rank_scale, schedule, log_decay, beta, scale, scope, gate, opening)
        elif chosen == "torch" and (scope == "segment" or opening is not None or (chunk_size or DENSE) >= q.shape[1]):
            o = dense.dla(q, k, v, rank_scale, schedule, log_decay, beta, scale, scope, gate, opening)
        else:

            def form(weights: Tensor, values: Tensor) -> Tensor:
                if chosen == "reference":
                    return reference.dla(q, k, values, weights, schedule, log_decay, beta, scale, scope)
                return chunked.dla(q, k, values, weights, schedule.starts, log_decay, beta, scale, chunk_size or CHUNK)

            o = form(rank_scale, v) if gate is None else with_gate(form, rank_scale, v, schedule.boundary, gate)
    return o.to(out)


def _no_kernel(q: Tensor, v: Tensor, beta: Tensor | None, opening: Tensor | None, frozen: bool) -> str | None:
    """Why there is no Triton kernel for such a call, or None."""
    if opening is not None:
        return "it has no kernels for a soft register"
    if frozen:
        return "it has no kernels for decays, or a delta rule, that stop where a slot ends"
    if beta is not None and q.shape[1] > DELTA_LONGEST:
        return f"it has kernels for the delta rule up to {DELTA_LONGEST} tokens, not for {q.shape[1]}"
    K, V = q.shape[-1], v.shape[-1]
    return f"its heads are K = {K} and V = {V} wide, more than {WIDEST}" if max(K, V) > WIDEST else None


def dla_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank_scale: Tensor,
    shift: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    slots: Tensor,
    *,
    scale: float | None = None,
    scope: Scope = "all",
    gate: Tensor | None = None,
    opening: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One token of `dla`: q, k [B, G, K], v [B, H, V], rank_scale [B, H, R], shift int64 [B, H] (the highest rank that
    moves up, -1 at no boundary), log_decay and beta (or None) [B, H], slots [B, H, R, K, V], zeros before any token.
    A gate [B, H] receives the slope of the soft register at the boundaries as they are, exact also where slots meet;
    `opening` int64 [B, H], needed with it, is the shift that a boundary makes or would have made.

    Returns o [B, H, V] in v's dtype and the new slots in their old dtype; keep them in float32 or wider.
    """
    axes = Axes("dla_step")
    axes.check("q", q, "BGK")
    axes.check("k", k, "BGK")
    axes.check("v", v, "BHV")
    axes.check("rank_scale", rank_scale, "BHR")
    axes.check("slots", slots, "BHRKV")
    for name, x in (("log_decay", log_decay), ("beta", beta)):
        if x is not None:
            axes.check(name, x, "BH")
    axes.check_groups("q", "v")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    dtype, heads = accumulator(q, k, v, rank_scale, log_decay, beta, slots), v.shape[1] // q.shape[1]
    with no_autocast(q):
        q, k = (x.to(dtype).repeat_interleave(heads, dim=1) for x in (q, k))  # [B, H, K]
        before = slots.to(dtype).flatten(0, 1)
        S = move(before, shift.flatten())
        if gate is not None and opening is not None:
            zero = (gate - gate.detach()).to(dtype).flatten()[:, None, None, None]
            S = S + zero * (move(before, opening.flatten()) - before)
        S = S.view(slots.shape)
        moved, S = (S, S[:, :, :0]) if scope == "all" else (S[:, :, :1], S[:, :, 1:])
        if log_decay is not None:
            moved = log_decay.to(dtype).exp()[..., None, None, None] * moved
        write = v.to(dtype)
        if beta is not None:
            b, key = beta.to(dtype)[..., None, None], k[:, :, None, :, None]  # [B, H, 1, 1], [B, H, 1, K, 1]
            moved = moved - key * (b * (k[:, :, None, None] @ moved).squeeze(-2)).unsqueeze(-2)
            write = b.squeeze(-1) * write
        new = (k[..., None] * write[..., None, :]).unsqueeze(2)
        S = torch.cat((moved[:, :, :1] + new, moved[:, :, 1:], S), dim=2)
        weighted = rank_scale.to(dtype)[..., None] * q[..., None, :] * scale  # [B, H, R, K]
        o = (weighted.flatten(2).unsqueeze(2) @ S.flatten(2, 3)).squeeze(2)
    return o.to(v.dtype), S.to(slots.dtype)
