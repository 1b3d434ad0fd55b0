"""The second definition: the [T, T] matrix P with O = P V, from explicit products of the transition matrices.

P_tj = scale q_t^T M_t ... M_{j+1} b_j k_j with M_t = a_t (I - b_t k_t k_t^T). Cubic in T: for tests.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    T, G, K = q.shape[1:]
    q, k = (x.repeat_interleave(v.shape[2] // G, dim=2).transpose(1, 2) for x in (q, k))  # [B, H, T, K]
    a = torch.ones_like(beta) if log_decay is None else log_decay.exp()
    a, beta = (x.transpose(1, 2)[..., None, None] for x in (a, beta))  # [B, H, T, 1, 1]
    M = a * (torch.eye(K, dtype=v.dtype, device=v.device) - beta * k[..., :, None] * k[..., None, :])
    write, read = torch.split(beta[..., 0] * k, 1, dim=2), torch.split(scale * q, 1, dim=2)  # T times [B, H, 1, K]
    path = write[0][:, :, :0]  # [B, H, t + 1, K], row j: M_t ... M_{j+1} b_j k_j
    rows, from_start = [], []
    moved = initial_state  # M_t ... M_1 S_0
    for t, M_t in enumerate(M.unbind(2)):
        path = torch.cat([path @ M_t.mT, write[t]], dim=2)
        rows.append(pad(read[t] @ path.mT, (0, T - 1 - t)))  # [B, H, 1, T]
        if moved is not None:
            moved = M_t @ moved
            from_start.append(read[t] @ moved)
    V = v.transpose(1, 2)
    o, S = torch.cat(rows, dim=2) @ V, path.mT @ V
    if moved is not None:
        o, S = o + torch.cat(from_start, dim=2), S + moved
    return o.transpose(1, 2), S
