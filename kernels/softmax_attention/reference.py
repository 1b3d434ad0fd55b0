"""The definition: o_t = sum_j softmax_j(scale q_t . k_j) v_j over the tokens j <= t, t - j < window, token by token."""

import torch
from torch import Tensor


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    T, H, G = q.shape[1], q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(H // G, dim=2) for x in (k, v))  # [B, T, H, .]
    o = []
    for t in range(T):
        seen = slice(0 if window is None else max(0, t + 1 - window), t + 1)
        p = (scale * torch.einsum("bhk,bjhk->bhj", q[:, t], k[:, seen])).softmax(-1)
        o.append(torch.einsum("bhj,bjhv->bhv", p, v[:, seen]))
    return torch.stack(o, dim=1)
