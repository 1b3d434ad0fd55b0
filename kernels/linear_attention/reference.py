"""The definition: the recurrence, token by token. S_t = e^{g_t} S_{t-1} + k_t v_t^T ;  o_t = scale q_t^T S_t."""

import torch
from torch import Tensor


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, scale: float, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    B, T, G, K = q.shape
    H, V = v.shape[2:]
    q, k = (x.repeat_interleave(H // G, dim=2) for x in (q, k))  # [B, T, H, K]
    S = v.new_zeros(B, H, K, V) if initial_state is None else initial_state
    o = []
    for t in range(T):
        if log_decay is not None:
            S = log_decay[:, t, :, None, None].exp() * S
        S = S + k[:, t, :, :, None] * v[:, t, :, None, :]
        o.append(scale * (q[:, t, :, :, None] * S).sum(-2))
    return torch.stack(o, dim=1), S
