"""Chunkwise form in torch: dense inside a chunk, states between chunks. The equations are in README.md.

Axes here: b batch, g groups of q and k, r heads of a group, n chunks, c (i, j) tokens of a chunk, k, v.
"""

import torch
from torch import Tensor, einsum

from mixassay.kernels.common.chunks import bounded, chunk_length, join, pairwise_decay, split

CHUNK = 64
BLOCK = 32  # chunks whose states are passed on by one [n, n] matrix; longer sequences go block after block


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    chunk_size: int | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    T, G = q.shape[1:3]
    C = chunk_length(T, chunk_size, CHUNK)
    if T > BLOCK * C:
        o, state = [], initial_state
        for t in range(0, T, BLOCK * C):
            part = slice(t, t + BLOCK * C)
            g = None if log_decay is None else log_decay[:, part]
            last = t + BLOCK * C >= T
            y, state = linear_attention(
                q[:, part], k[:, part], v[:, part], g, scale, state, C, output_final_state or not last
            )
            o.append(y)
        return torch.cat(o, dim=1), state

    q, k = split(q * scale, C), split(k, C)  # [b, g, n, c, k]
    v = split(v.unflatten(2, (G, -1)), C)  # [b, g, r, n, c, v]
    A = einsum("bgnik,bgnjk->bgnij", q, k).unsqueeze(2)
    if log_decay is None:
        A = A.tril()
    else:
        g = split(bounded(log_decay).unflatten(2, (G, -1)).unsqueeze(-1), C).squeeze(-1)
        since = g.cumsum(-1)  # [b, g, r, n, c]: log decay since the chunk began
        A = A * pairwise_decay(since)
    o = A @ v
    if v.shape[3] == 1 and initial_state is None and not output_final_state:
        return join(o, T).flatten(2, 3), None

    if log_decay is not None:
        v = v * (since[..., -1:] - since).exp().unsqueeze(-1)
    states = einsum("bgnck,bgrncv->bgrnkv", k, v)  # what each chunk adds
    first = torch.zeros_like(states[:, :, :, 0]) if initial_state is None else initial_state.unflatten(1, (G, -1))
    states = torch.cat([first.unsqueeze(3), states], dim=3)  # [b, g, r, n + 1, k, v]
    if log_decay is None:
        states = states.cumsum(3)
    else:
        ends = torch.nn.functional.pad(since[..., -1].cumsum(-1), (1, 0))
        states = (pairwise_decay(ends) @ states.flatten(-2)).unflatten(-1, states.shape[-2:])
    inter = einsum("bgnck,bgrnkv->bgrncv", q, states[:, :, :, :-1])
    o = o + (inter if log_decay is None else inter * since.exp().unsqueeze(-1))
    return join(o, T).flatten(2, 3), states[:, :, :, -1].flatten(1, 2)
