"""The log-linear gated delta rule: the public functions."""

import math
from typing import Any

from torch import Tensor

from mixassay.kernels.common import carry
from mixassay.kernels.common.fenwick import FenwickState, merge, write_and_read
from mixassay.kernels.common.precision import accumulator, no_autocast
from mixassay.kernels.common.shapes import Axes
from mixassay.kernels.gated_delta_rule import gated_delta_rule
from mixassay.kernels.log_linear_gated_delta_rule import chunked, reference
from mixassay.kernels.recurrent_step import fused


def _triton(**given: Any) -> Tensor:
    from mixassay.kernels.log_linear_gated_delta_rule import registered  # the package triton may not be there

    return registered.log_linear_gated_delta_rule(**given)


OPERATOR = carry.Operator(
    "log_linear_gated_delta_rule",
    definition=reference.log_linear_gated_delta_rule,
    chunked=chunked.log_linear_gated_delta_rule,
    triton=_triton,
    parent=gated_delta_rule,
)


def log_linear_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: FenwickState | None = None,
    output_final_state: bool = False,
    chunk_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, FenwickState | None]:
    """The gated delta rule with a logarithm of states, not one (Guo et al. 2025, arXiv 2506.04761).

    Every slot of the state takes the step S_l <- a_t (I - b_t k_t k_t^T) S_l, the new b_t k_t v_t^T goes to slot 0, and
    o_t = scale sum_l level_scale_t[l] q_t^T S_l; a = exp(log_decay), b = beta. Slot l holds the tokens s that t sees at
    level(t, s) = bit_length(t xor s), at most L - 1. If all L weights of a token are c, this is c times
    `gated_delta_rule`. Keys are taken as they come: the caller normalises them. Stable for b |k|^2 in [0, 2].

    q, k            [B, T, G, K]; G divides H, and q/k head i serves the heads i H/G ... (i + 1) H/G - 1
    v               [B, T, H, V]
    beta            [B, T, H], write strength
    level_scale     [B, T, H, L], what a token's query gives to each level. T tokens have ceil(log2 T) + 1 levels; with
                    fewer, all levels from L - 1 on have the last weight and share a slot, so that no state grows
    log_decay       [B, T, H], natural logarithm, <= 0 (-inf forgets everything); None: no decay
    scale           None: K**-0.5, as in every operator of this package
    initial_state   slots [B, H, L, K, V] and positions [B], which may differ; a slot without tokens is zero. None: no
                    tokens yet
    chunk_size      tokens in a chunk of the torch form, rounded up to a power of two: changes the speed, not the
                    result; None: chosen from T
    cu_seqlens      int64 [N + 1], for N sequences packed into one row (B = 1): sequence n is the tokens cu_seqlens[n]
                    ... cu_seqlens[n + 1] - 1, possibly none. There are N states instead of B
    returns         o [B, T, H, V] in v's dtype, and the final state or None

    Sums and states are float32, or float64 if an input is. Raises UserError for shapes that do not fit together and
    for a backend that cannot serve. On a GPU the Triton kernels multiply in the dtype of q, k and v, or autocast's;
    with a state, which is composed around them, in that of the sums.
    """
    tokens: carry.Tokens = {"q": q, "k": k, "v": v, "beta": beta, "level_scale": level_scale, "log_decay": log_decay}
    return carry.serve(OPERATOR, tokens, scale, initial_state, output_final_state, chunk_size, cu_seqlens, backend)


def log_linear_gated_delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    state: FenwickState,
    *,
    scale: float | None = None,
) -> tuple[Tensor, FenwickState]:
    """One token of `log_linear_gated_delta_rule`: q, k [B, G, K], v [B, H, V], beta and log_decay (or None)
    [B, H], level_scale [B, H, L]; the state's slots [B, H, L, K, V] and positions [B].

    Returns o [B, H, V] in v's dtype and the new state, its slots in their old dtype; keep them in float32 or wider.
    """
    axes = Axes("log_linear_gated_delta_rule_step")
    axes.check("q", q, "BGK")
    axes.check("k", k, "BGK")
    axes.check("v", v, "BHV")
    axes.check("beta", beta, "BH")
    axes.check("level_scale", level_scale, "BHL")
    if log_decay is not None:
        axes.check("log_decay", log_decay, "BH")
    carry.check_state(axes, state, "B")
    axes.check_groups("q", "v")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    slots, position = state
    made = fused("log_linear_gated_delta_rule_step", q, k, v, beta, level_scale, log_decay, slots, position, scale)
    if made is not None:
        return made[0], FenwickState(made[1], position + 1)
    dtype, heads = accumulator(q, k, v, beta, level_scale, log_decay, slots), v.shape[1] // q.shape[1]
    with no_autocast(q):
        q, k = (x.to(dtype).repeat_interleave(heads, dim=1) for x in (q, k))  # [B, H, K]
        S = merge(slots.to(dtype), position)
        if log_decay is not None:
            S = S * log_decay.to(dtype).exp()[..., None, None, None]
        key, strength = k[:, :, None, :, None], beta.to(dtype)[..., None]
        S = S - key * (strength[..., None, None] * (key.mT @ S))  # [B, H, 1, K, 1] times [B, H, L, 1, V]
        o, S = write_and_read(S, k, strength * v.to(dtype), q, level_scale.to(dtype))
    return (o * scale).to(v.dtype), FenwickState(S.to(slots.dtype), position + 1)
