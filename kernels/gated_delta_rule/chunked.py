"""Chunkwise WY/UT form in torch (Yang et al. 2024, 2025). The equations are in README.md.

Axes here: b batch, g groups of q and k, r heads of a group, n chunks, c (i, j) tokens of a chunk, k, v.
"""

import torch
from torch import Tensor, einsum

from mixassay.kernels.common.chunks import bounded, chunk_length, join, pairwise_decay, split

CHUNK = 64


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    chunk_size: int | None,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    T, G = q.shape[1:3]
    C = chunk_length(T, chunk_size, CHUNK)
    q, k = split(q * scale, C), split(k, C)  # [b, g, n, c, k]
    v = split(v.unflatten(2, (G, -1)), C)  # [b, g, r, n, c, v]
    beta = split(beta.unflatten(2, (G, -1)).unsqueeze(-1), C)  # [b, g, r, n, c, 1]
    # One product for both score matrices: rows of q above rows of k.
    qk, kk = einsum("bgnik,bgnjk->bgnij", torch.cat([q, k], dim=-2), k).unsqueeze(2).split(C, dim=-2)
    rhs = [beta * v, beta * k.unsqueeze(2)]
    if log_decay is None:
        qk = qk.tril()
    else:
        g = split(bounded(log_decay).unflatten(2, (G, -1)).unsqueeze(-1), C)
        since = g.cumsum(-2)  # [b, g, r, n, c, 1]: log decay since the chunk began
        Gam = pairwise_decay(since.squeeze(-1))
        qk, kk = qk * Gam, kk * Gam
        from_start = since.exp()
        to_end = (since[..., -1:, :] - since).exp()
        rhs[1] = rhs[1] * from_start
    # solve_triangular reads below the diagonal only and takes the diagonal as ones: (I + A)^-1 [b v, b e^G k].
    u, w = torch.linalg.solve_triangular(beta * kk, torch.cat(rhs, dim=-1), upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], dim=-1
    )
    state = None if initial_state is None else initial_state.unflatten(1, (G, -1))  # [b, g, r, k, v]
    N = v.shape[3]
    us, states = [], []
    for n in range(N):
        # The state is passed on chunk by chunk: its transition is a matrix. `state is None` stands for zeros.
        u_n = u[:, :, :, n]
        if state is not None:
            u_n = u_n - w[:, :, :, n] @ state
        us.append(u_n)
        states.append(state)
        if n == N - 1 and not output_final_state:
            break
        ku = u_n if log_decay is None else u_n * to_end[:, :, :, n]
        new = einsum("bgck,bgrcv->bgrkv", k[:, :, n], ku)
        if state is not None:
            new = new + (state if log_decay is None else state * from_start[:, :, :, n, -1:])
        state = new
    u = torch.stack(us, dim=3)
    o = qk @ u
    if N > 1 or initial_state is not None:
        inter = einsum(
            "bgnck,bgrnkv->bgrncv",
            q,
            torch.stack([torch.zeros_like(states[-1]) if s is None else s for s in states], dim=3),
        )
        o = o + (inter if log_decay is None else inter * from_start)
    return join(o, T).flatten(2, 3), state.flatten(1, 2) if output_final_state else None
