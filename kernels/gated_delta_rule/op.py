"""The gated delta rule: the public functions."""

import math

from torch import Tensor

from mixassay.kernels import resolve
from mixassay.kernels.common.precision import accumulator, no_autocast
from mixassay.kernels.common.registered import against_triton
from mixassay.kernels.common.sequences import check_sequences, each_sequence, wide_heads
from mixassay.kernels.common.shapes import Axes
from mixassay.kernels.gated_delta_rule import chunked, reference
from mixassay.kernels.recurrent_step import fused


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule (Schlag et al. 2021; Yang et al. 2024), with log_decay Gated DeltaNet's (Yang et al. 2025).

    S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T;  o_t = scale q_t^T S_t;  a = exp(log_decay), b = beta.
    Keys are taken as they come: the caller normalises them. The rule is stable for b |k|^2 in [0, 2].

    q, k            [B, T, G, K]; G divides H, and q/k head i serves the heads i H/G ... (i + 1) H/G - 1
    v               [B, T, H, V]
    beta            [B, T, H], write strength
    log_decay       [B, T, H], natural logarithm, <= 0 (-inf forgets everything); None: no decay
    scale           None: K**-0.5, as in every operator of this package
    initial_state   [B, H, K, V]; None: zeros
    chunk_size      tokens in a chunk of the torch form: changes the speed, not the result; None: chosen from T
    cu_seqlens      int64 [N + 1], for N sequences packed into one row (B = 1): sequence n is the tokens cu_seqlens[n]
                    ... cu_seqlens[n + 1] - 1, possibly none. There are N states instead of B
    returns         o [B, T, H, V] in v's dtype, and the final state [B, H, K, V] or None

    Sums and states are float32, or float64 if an input is. Raises UserError for shapes that do not fit together and
    for a backend that cannot serve. On a GPU the Triton kernels multiply in the dtype of q, k and v, or autocast's.
    """
    others: dict[str, tuple[Tensor | None, str]] = {"beta": (beta, "BTH"), "log_decay": (log_decay, "BTH")}
    check_sequences(Axes("gated_delta_rule"), q, k, v, others, initial_state, chunk_size, cu_seqlens)
    against = against_triton(q, k, v, beta, log_decay, initial_state) or wide_heads(q, v)
    chosen = resolve("gated_delta_rule", backend, against_triton=against)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if chosen == "triton":
        from mixassay.kernels.gated_delta_rule import registered  # the package triton may not be there

        return registered.gated_delta_rule(
            q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, output_final_state
        )

    def form(
        q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if chosen == "reference":
            return reference.gated_delta_rule(q, k, v, beta, log_decay, scale, state)
        return chunked.gated_delta_rule(q, k, v, beta, log_decay, scale, state, chunk_size, output_final_state)

    dtype = accumulator(q, k, v, beta, log_decay, initial_state)
    with no_autocast(q):
        tokens = tuple(None if x is None else x.to(dtype) for x in (q, k, v, beta, log_decay))
        start = None if initial_state is None else initial_state.to(dtype)
        o, state = each_sequence(form, cu_seqlens, tokens, start)
    return o.to(v.dtype), state if output_final_state else None


def gated_delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """One token of `gated_delta_rule`: q, k [B, G, K], v [B, H, V], beta and log_decay (or None) [B, H],
    state [B, H, K, V].

    Returns o [B, H, V] in v's dtype and the new state in the old state's dtype; keep states in float32 or wider.
    """
    axes = Axes("gated_delta_rule_step")
    axes.check("q", q, "BGK")
    axes.check("k", k, "BGK")
    axes.check("v", v, "BHV")
    axes.check("beta", beta, "BH")
    if log_decay is not None:
        axes.check("log_decay", log_decay, "BH")
    axes.check("state", state, "BHKV")
    axes.check_groups("q", "v")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    made = fused("gated_delta_rule_step", q, k, v, beta, None, log_decay, state.unsqueeze(2), None, scale)
    if made is not None:
        return made[0], made[1].squeeze(2)
    dtype = accumulator(q, k, v, beta, log_decay, state)
    with no_autocast(q):
        S = state.to(dtype).reshape(q.shape[0], q.shape[1], -1, *state.shape[2:])  # [B, G, H/G, K, V]
        heads = S.shape[:3]
        if log_decay is not None:
            S = S * log_decay.to(dtype).exp().reshape(*heads, 1, 1)
        k = k.to(dtype)[:, :, None, None, :]  # [B, G, 1, 1, K]
        write = beta.to(dtype).reshape(*heads, 1, 1) * (v.to(dtype).reshape(*heads, 1, -1) - k @ S)
        S = S + k.mT * write
        o = q.to(dtype)[:, :, None, None, :] @ S * scale  # [B, G, H/G, 1, V]
    return o.reshape(v.shape).to(v.dtype), S.flatten(1, 2).to(state.dtype)
