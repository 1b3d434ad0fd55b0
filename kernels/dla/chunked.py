"""Chunkwise: the dense form inside a chunk, and every slot that was live before it as one state.

With rho_t(i) the rank at t of the slot that had rank i before the chunk, and what the base makes of a chunk

    q'   what a token reads of a state before the chunk       k'   what a token leaves in a state behind it
    F    what the chunk does to a state

    scalar decay   q' = e^G q                  k' = e^{G_C - G} k                        F = e^{G_C}
    delta rule     q' = e^G q - A (e^G k)      k' = X^T (e^{G_C - G} k)                  F = e^{G_C} I - k'^T (e^G k)

    o_t  = sum_i rank_scale[t, rho_t(i)] q'_t S_i  +  sum_{s <= t} M[t, s] A[t, s] v_s
    S_r <- sum_{i: rho_C(i) = r} F S_i  +  sum_{s: rank_C(s) = r} k'_s v_s^T

A slot's rank is that of its first token, so the table of starts says all of it. Axes as in common/chunks.py, R slots.
"""

import torch
from torch import Tensor

from mixassay.kernels.common.chunks import Decay, join, split, split_heads
from mixassay.kernels.dla.dense import matrix
from mixassay.kernels.dla.slots import rank_of
from mixassay.kernels.dla.weights import at_ranks


def dla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank_scale: Tensor,
    starts: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    scale: float,
    chunk_size: int,
) -> Tensor:
    T, G, R, C = q.shape[1], q.shape[2], rank_scale.shape[-1], min(chunk_size, q.shape[1])
    q, k = split(q * scale, C).unsqueeze(2), split(k, C).unsqueeze(2)  # [b, g, 1, n, c, k]
    v, rank_scale, starts = (split_heads(x, G, C) for x in (v, rank_scale, starts))  # [b, g, r, n, c, ...]
    beta = None if beta is None else split_heads(beta.unsqueeze(-1), G, C)
    decay = None if log_decay is None else Decay(split_heads(log_decay.unsqueeze(-1), G, C).squeeze(-1))
    chunks = v.shape[3]
    token = torch.arange(chunks * C, device=v.device).view(chunks, 1, C)
    A, rank = matrix(q, k, beta, decay), rank_of(starts, token)  # [b, g, r, n, c, c]
    o = (at_ranks(rank_scale, rank) * A) @ v
    if chunks == 1:
        return join(o, T)

    qe, ke = q, k
    if decay is not None:
        qe, ke = q * decay.from_start, k * decay.to_end
    whole = None if decay is None else decay.from_start[..., -1:, :]  # [b, g, r, n, 1, 1]
    kg = k if decay is None else k * decay.from_start
    if beta is not None:
        qe = qe - A @ kg
        L = beta * (k @ k.mT if decay is None else k @ k.mT * decay.pairs())
        ke = beta * torch.linalg.solve_triangular(L.mT, ke.expand(*v.shape[:5], -1), upper=True, unitriangular=True)

    slot = torch.arange(R, device=v.device)
    at_end = (rank[..., -1, :, None] == slot).to(v.dtype)  # [b, g, r, n, c, R]
    added = ke.mT @ (at_end.unsqueeze(-1) * v.unsqueeze(-2)).flatten(-2)  # [b, g, r, n, k, R v]
    first = starts[..., :-1, -1:, :]  # of the slots before each chunk but the first, [b, g, r, n - 1, 1, R]
    rho = rank_of(starts[..., 1:, :, :], first)  # [b, g, r, n - 1, c, R]
    to = (rho[..., -1, :, None] == slot).to(v.dtype)  # [b, g, r, n - 1, i, R]

    S = added[:, :, :, 0]
    states = [S]
    for n in range(1, chunks - 1):
        moved = S if whole is None else whole[:, :, :, n] * S
        if beta is not None:
            moved = moved - ke[:, :, :, n].mT @ (kg[:, :, :, n] @ S)
        slots = torch.unflatten(moved, -1, (R, -1))  # [b, g, r, k, R, v]
        S = (to[:, :, :, n - 1, None].mT @ slots).flatten(-2) + added[:, :, :, n]
        states.append(S)
    read = torch.unflatten(qe[:, :, :, 1:] @ torch.stack(states, dim=3), -1, (R, -1))  # [b, g, r, n - 1, c, R, v]
    w = at_ranks(rank_scale[:, :, :, 1:], rho.flip(-1)).flip(-1)  # the oldest first
    past = (w.unsqueeze(-1) * read).sum(-2)
    return join(o + torch.cat((torch.zeros_like(o[:, :, :, :1]), past), dim=3), T)
