"""The definition, token by token: merge, decay, insert, and read every slot with its level's weight.

S_l <- e^{g_t} S_l for every level l;  S_0 <- S_0 + k_t v_t^T;  o_t = scale sum_l lambda_t[l] q_t^T S_l
"""

import torch
from torch import Tensor

from mixassay.kernels.common.fenwick import FenwickState, merge


def log_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: FenwickState | None,
) -> tuple[Tensor, FenwickState]:
    B, T, G, K = q.shape
    H, V, L = *v.shape[2:], level_scale.shape[-1]
    q, k = (x.repeat_interleave(H // G, dim=2) for x in (q, k))  # [B, T, H, K]
    if initial_state is None:
        initial_state = FenwickState(v.new_zeros(B, H, L, K, V), torch.zeros(B, dtype=torch.int64, device=v.device))
    S, position = initial_state
    o = []
    for t in range(T):
        S = merge(S, position)
        if log_decay is not None:
            S = log_decay[:, t, :, None, None, None].exp() * S
        new = k[:, t, :, :, None] * v[:, t, :, None, :]
        S = torch.cat([S[:, :, :1] + new.unsqueeze(2), S[:, :, 1:]], dim=2)
        read = (q[:, t, :, None, :, None] * S).sum(-2)  # [B, H, L, V]
        o.append(scale * (level_scale[:, t, :, :, None] * read).sum(2))
        position = position + 1
    return torch.stack(o, dim=1), FenwickState(S, position)
