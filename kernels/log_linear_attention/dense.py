"""The second definition: one masked [T, T] matrix per head. O = scale (QK^T . Gam . Lam) V, quadratic in T."""

import torch
from torch import Tensor

from mixassay.kernels.common.fenwick import level


def log_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, level_scale: Tensor, log_decay: Tensor | None, scale: float
) -> Tensor:
    T, G, H = q.shape[1], q.shape[2], v.shape[2]
    q, k = (x.repeat_interleave(H // G, dim=2) for x in (q, k))  # [B, T, H, K]
    g = v.new_zeros(v.shape[:3]) if log_decay is None else log_decay
    t = torch.arange(T, device=v.device)
    i, j = t[:, None], t[None, :]
    # The exponent of pair (i, j) is g_{j+1} + ... + g_i, summed as it stands: no large sums are subtracted.
    between = (j[..., None] < t) & (t <= i[..., None])  # [i, j, t]
    exponent = torch.einsum("ijt,bth->bhij", between.to(g.dtype), g)
    Gam = exponent.masked_fill(j > i, -torch.inf).exp()  # [B, H, T, T]
    Lam = level_scale[:, i, :, level(i, j, level_scale.shape[-1])]  # [T, T, B, H]
    return scale * torch.einsum("bihk,bjhk,bhij,ijbh,bjhv->bihv", q, k, Gam, Lam, v)
