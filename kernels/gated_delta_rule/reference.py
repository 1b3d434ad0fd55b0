"""The definition: S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T ;  o_t = scale q_t^T S_t, token by token."""

import torch
from torch import Tensor


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    B, T, G, K = q.shape
    H, V = v.shape[2:]
    q, k = (x.repeat_interleave(H // G, dim=2) for x in (q, k))  # [B, T, H, K]
    S = v.new_zeros(B, H, K, V) if initial_state is None else initial_state
    o = []
    for t in range(T):
        if log_decay is not None:
            S = log_decay[:, t, :, None, None].exp() * S
        old = (k[:, t, :, :, None] * S).sum(-2)  # [B, H, V]: what the state holds under this key
        S = S + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - old))[:, :, None, :]
        o.append(scale * (q[:, t, :, :, None] * S).sum(-2))
    return torch.stack(o, dim=1), S
