"""The second definition: the [T, T] matrix P with O = P V, from explicit products of the transition matrices.

P_tj = scale q_t^T M_t ... M_{j+1} b_j k_j with M_t = a_t (I - b_t k_t k_t^T). Cubic in T: for tests.
"""

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
    G, K = q.shape[2:]
    q, k = (x.repeat_interleave(v.shape[2] // G, dim=2).transpose(1, 2) for x in (q, k))  # [B, H, T, K]
    a = torch.ones_like(beta) if log_decay is None else log_decay.exp()
    a, beta = (x.transpose(1, 2)[..., None, None] for x in (a, beta))  # [B, H, T, 1, 1]
    M = a * (torch.eye(K, dtype=v.dtype, device=v.device) - beta * k[..., :, None] * k[..., None, :])
    write = beta[..., 0] * k  # [B, H, T, K]
    # paths[t] [B, H, t + 1, K]: rows j = M_t ... M_{j+1} b_j k_j
    paths = [write[:, :, :1]]
    for M_t, write_t in zip(M.unbind(2)[1:], write.split(1, dim=2)[1:], strict=True):
        paths.append(torch.cat([paths[-1] @ M_t.mT, write_t], dim=2))
    V = v.transpose(1, 2)
    o = [torch.einsum("bhk,bhjk,bhjv->bhv", q[:, :, t], p, V[:, :, : t + 1]) for t, p in enumerate(paths)]
    S = paths[-1].mT @ V
    if initial_state is not None:
        moved = initial_state  # M_t ... M_1 S_0
        for t, M_t in enumerate(M.unbind(2)):
            moved = M_t @ moved
            o[t] = o[t] + (q[:, :, t, None] @ moved).squeeze(2)
        S = S + moved
    return scale * torch.stack(o, dim=1), S
