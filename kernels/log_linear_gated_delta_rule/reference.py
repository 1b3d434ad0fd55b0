"""The definition, token by token: merge, step every slot, insert, and read every slot with its level's weight.

S_l <- a_t (I - b_t k_t k_t^T) S_l for every level l;  S_0 <- S_0 + b_t k_t v_t^T;
o_t = scale sum_l lambda_t[l] q_t^T S_l
"""

import torch
from torch import Tensor

from mixassay.kernels.common.fenwick import FenwickState, merge


def log_linear_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
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
        key = k[:, t, :, None, :, None]  # [B, H, 1, K, 1]
        old = (key * S).sum(-2, keepdim=True)  # [B, H, L, 1, V]: what each slot holds under this key
        S = S - beta[:, t, :, None, None, None] * key * old
        new = k[:, t, :, :, None] * (beta[:, t, :, None] * v[:, t])[:, :, None, :]
        S = torch.cat([S[:, :, :1] + new.unsqueeze(2), S[:, :, 1:]], dim=2)
        read = (q[:, t, :, None, :, None] * S).sum(-2)  # [B, H, L, V]
        o.append(scale * (level_scale[:, t, :, :, None] * read).sum(2))
        position = position + 1
    return torch.stack(o, dim=1), FenwickState(S, position)
