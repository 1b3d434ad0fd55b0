"""Chunkwise form in torch: dense inside a chunk, a tree of states between chunks. The equations are in README.md.

Axes: b batch, g groups of heads that share q and k, r heads of a group, n chunks, c tokens of a chunk, l levels.
"""

import torch
from torch import Tensor

from mixassay.kernels.common.chunks import Decay, join
from mixassay.kernels.common.dyadic import chunk_length, pair_scale, read_past, split, split_heads


def log_linear_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    scale: float,
    chunk_size: int | None,
) -> Tensor:
    T, G, K = q.shape[1:]
    C = chunk_length(q, chunk_size)
    q, k = split(q * scale, C).unsqueeze(2), split(k, C).unsqueeze(2)  # [b, g, 1, n, c, k]
    v, level_scale = split_heads(v, G, C), split_heads(level_scale, G, C)  # [b, g, r, n, c, v or l]
    beta = split_heads(beta.unsqueeze(-1), G, C)  # [b, g, r, n, c, 1]
    qk, kk, bv = q @ k.mT, beta * (k @ k.mT), beta * v
    decay = None if log_decay is None else Decay(split_heads(log_decay.unsqueeze(-1), G, C).squeeze(-1))
    if decay is None:
        qk = qk.tril()
    else:
        pairs = decay.pairs()
        qk, kk = qk * pairs, kk * pairs
    if v.shape[3] == 1:
        return join(_solve(kk, qk) * pair_scale(level_scale) @ bv, T)

    bk, whole = beta * k, v.new_ones(1, 1)
    if decay is not None:
        q, bk, k, whole = q * decay.from_start, bk * decay.from_start, k * decay.to_end, decay.from_start[..., -1:, :]
    rows = torch.cat([qk.expand(kk.shape), k.mT.expand(*kk.shape[:-2], K, C)], dim=-2)
    P, R = torch.split(_solve(kk, rows), [C, K], dim=-2)
    o = P * pair_scale(level_scale) @ bv
    M = whole * torch.eye(K, dtype=v.dtype, device=v.device) - R @ bk
    return join(read_past(o, q - P @ bk, R @ bv, M, level_scale), T)


def _solve(A: Tensor, x: Tensor) -> Tensor:
    """x (I + A)^-1 for the part of A below the diagonal; the rest of A is not read.

    Transposed on both sides, so that the solver, which wants columns, takes row-major matrices without copies.
    """
    solved: Tensor = torch.linalg.solve_triangular(A.mT, x.mT, upper=True, unitriangular=True)
    return solved.mT
