"""The definition, token by token: slots move, the base's transition, insert, and read every slot with its weight.

    S <- P_{shift} S                                          ranks 0 .. shift move up, those that meet add up
    S_r <- a_t S_r,  or  a_t (I - beta_t k_t k_t^T) S_r       every slot; with scope "segment" rank 0 alone
    S_0 <- S_0 + k_t v_t^T,  or  S_0 + beta_t k_t v_t^T
    o_t = scale sum_r rank_scale_t[r] q_t^T S_r

A soft gate p replaces the first line by S <- (1 - p_t) S + p_t P_{opening} S, the same where p is 0 or 1; `opening` is
the shift that a boundary would make, also where there is none (`register.openings`).
"""

import torch
from torch import Tensor

from mixassay.kernels.dla.boundaries import lanes
from mixassay.kernels.dla.slots import Schedule, move


def dla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank_scale: Tensor,
    schedule: Schedule,
    log_decay: Tensor | None,
    beta: Tensor | None,
    scale: float,
    scope: str,
    gate: Tensor | None = None,
    opening: Tensor | None = None,
) -> Tensor:
    (B, T, H, V), heads, R = v.shape, v.shape[2] // q.shape[2], rank_scale.shape[-1]
    q, k = (lanes(x.repeat_interleave(heads, dim=2)) for x in (q, k))  # [N, T, K]
    v, rank_scale, shift = lanes(v), lanes(rank_scale), lanes(schedule.shift)
    g, b, p, a = (None if x is None else lanes(x) for x in (log_decay, beta, gate, opening))
    changes = (torch.arange(R, device=v.device) < (1 if scope == "segment" else R))[:, None, None]
    S = v.new_zeros(B * H, R, q.shape[-1], V)
    o = []
    for t in range(T):
        if p is not None and a is not None:
            S = S + p[:, t, None, None, None] * (move(S, a[:, t]) - S)
        else:
            S = move(S, shift[:, t])
        k_t, changed = k[:, t, None, :, None], S  # [N, 1, K, 1]
        if g is not None:
            changed = g[:, t, None, None, None].exp() * changed
        new = k[:, t, :, None] * v[:, t, None, :]
        if b is not None:
            changed = changed - b[:, t, None, None, None] * k_t * (k_t * changed).sum(-2, keepdim=True)
            new = b[:, t, None, None] * new
        S = torch.where(changes, changed, S)
        S = torch.cat((S[:, :1] + new[:, None], S[:, 1:]), dim=1)
        read = (q[:, t, None, :, None] * S).sum(-2)  # [N, R, V]
        o.append(scale * (rank_scale[:, t, :, None] * read).sum(1))
    return torch.stack(o, dim=1).view(B, H, T, V).transpose(1, 2)
