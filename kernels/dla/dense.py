"""One masked [T, T] matrix a head: o = (M . A) v, quadratic in T. The torch form for short sequences.

A is the base's matrix, what token t reads of token s, D its decays e^{G_t - G_s}:

    scalar decay   A = scale QK^T . D
    delta rule     A = (scale QK^T . D) X,   X = (I + strictly lower part of diag(beta) (KK^T . D))^-1 diag(beta)

and M[t, s] = rank_scale[t, rank of s at t]. With scope "segment" a closed slot is frozen: its decays stop at its end,
and by the delta rule its tokens only meet those of their own segment, then are read through the keys that they have
at its end.
"""

import torch
from torch import Tensor

from mixassay.kernels.common.chunks import Decay
from mixassay.kernels.dla import register
from mixassay.kernels.dla.boundaries import lanes
from mixassay.kernels.dla.slots import Schedule, rank_of
from mixassay.kernels.dla.straight_through import slopes
from mixassay.kernels.dla.weights import at_ranks


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
    gate: Tensor | None,
    opening: Tensor | None,
) -> Tensor:
    G, r = q.shape[2], v.shape[2] // q.shape[2]
    weights = rank_scale
    q, k = q.transpose(1, 2).unsqueeze(2) * scale, k.transpose(1, 2).unsqueeze(2)  # [b, g, 1, T, K]
    v, rank_scale, starts = (heads(x, G) for x in (v, rank_scale, schedule.starts))  # [b, g, r, T, ...]
    boundary = heads(schedule.boundary.unsqueeze(-1), G).squeeze(-1)
    g, b, p = (None if x is None else heads(x.unsqueeze(-1), G) for x in (log_decay, beta, gate))  # [b, g, r, T, 1]
    if scope == "segment":
        A = frozen(q, k, b, torch.zeros_like(v[..., :1]) if g is None else g, boundary)
    else:
        A = matrix(q, k, b, None if g is None else Decay(g.squeeze(-1)))
    if gate is None or opening is None:
        rank = rank_of(starts, torch.arange(v.shape[3], device=v.device))
        M = mask(rank_scale, rank, boundary, None if p is None else p.squeeze(-1))
    else:
        M = register.mask(*(lanes(x) for x in (weights, gate, opening))).view(A.shape[0], G, r, *A.shape[-2:])
    o = (M * A) @ v  # [b, g, r, T, V]
    return o.permute(0, 3, 1, 2, 4).reshape(v.shape[0], v.shape[3], G * r, -1)


def heads(x: Tensor, G: int) -> Tensor:
    """[b, T, g r, ...] -> [b, g, r, T, ...]"""
    return torch.unflatten(x, 2, (G, -1)).permute(0, 2, 3, 1, 4)


def matrix(q: Tensor, k: Tensor, beta: Tensor | None, decay: Decay | None) -> Tensor:
    """A [..., c, c] of q (scaled) and k [..., c, K], beta [..., c, 1]."""
    pairs = None if decay is None else decay.pairs()
    A = (q @ k.mT).tril() if pairs is None else q @ k.mT * pairs
    if beta is None:
        return A
    kk = k @ k.mT if pairs is None else k @ k.mT * pairs
    return solved(beta * kk, A) * beta.mT


def solved(L: Tensor, x: Tensor) -> Tensor:
    """x (I + L)^-1 for the part of L below the diagonal; the rest of L is not read."""
    y: Tensor = torch.linalg.solve_triangular(L, x, upper=False, left=False, unitriangular=True)
    return y


def mask(rank_scale: Tensor, rank: Tensor, boundary: Tensor, gate: Tensor | None) -> Tensor:
    """M [..., t, s] of weights [..., t, R] and ranks [..., t, s], with the gradient of the gate [..., t]."""
    M = at_ranks(rank_scale, rank)
    if gate is None:
        return M
    for slope, moved in slopes(rank_scale, boundary, gate):
        M = M + slope.gather(-1, rank) * (moved.unsqueeze(-1) - moved.unsqueeze(-2))
    return M


def frozen(q: Tensor, k: Tensor, beta: Tensor | None, g: Tensor, boundary: Tensor) -> Tensor:
    """A for scope "segment"; g [..., T, 1]."""
    T, number = boundary.shape[-1], boundary.long().cumsum(-1)
    same = number.unsqueeze(-1) == number.unsqueeze(-2)
    at = torch.arange(T, device=q.device)
    later = at[:, None] > at
    # The exponent of t, s: log decays after s up to t, or to the end of the segment of s.
    floor = -708.0 if g.dtype == torch.float64 else -87.0  # as good as -inf, which would make NaN
    exponent = torch.where(same & later, g.clamp(min=floor).double(), 0.0).cumsum(-2).to(g.dtype)
    D = exponent.masked_fill(later.mT, -torch.inf).exp()
    if beta is None:
        return q @ k.mT * D
    own = D * same
    L = beta * (k @ k.mT * own)
    A = solved(L, q @ k.mT * own) * beta.mT
    # kappa_s = sum_j X[j, s] e^{G_end - G_j} k_j: the key of s at the end of its segment.
    at_end = k * exponent[..., -1:, :].mT.exp()
    kappa: Tensor = beta * torch.linalg.solve_triangular(L.mT, at_end, upper=True, unitriangular=True)
    closed: Tensor = (q @ kappa.mT).masked_fill(same | later.mT, 0.0)
    return A + closed
