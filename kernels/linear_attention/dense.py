"""The second definition: one masked [T, T] matrix per head. O = scale (QK^T . Gam) V, quadratic in T."""

import torch
from torch import Tensor


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, scale: float, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    T, G, H = q.shape[1], q.shape[2], v.shape[2]
    q, k = (x.repeat_interleave(H // G, dim=2) for x in (q, k))  # [B, T, H, K]
    g = v.new_zeros(v.shape[:3]) if log_decay is None else log_decay
    t = torch.arange(T, device=v.device)
    i, j = t[:, None], t[None, :]
    # The exponent of pair (i, j) is g_{j+1} + ... + g_i, summed as it stands: no large sums are subtracted.
    between = (j[..., None] < t) & (t <= i[..., None])  # [i, j, t]
    exponent = torch.einsum("ijt,bth->bhij", between.to(g.dtype), g)
    Gam = exponent.masked_fill(j > i, -torch.inf).exp()  # [B, H, T, T]
    o = torch.einsum("bihk,bjhk,bhij,bjhv->bihv", q, k, Gam, v)
    S = torch.einsum("bhj,bjhk,bjhv->bhkv", Gam[:, :, -1], k, v)
    if initial_state is not None:
        since = g.cumsum(1).exp()  # [B, T, H]
        o = o + torch.einsum("bihk,bih,bhkv->bihv", q, since, initial_state)
        S = S + since[:, -1, :, None, None] * initial_state
    return scale * o, S
