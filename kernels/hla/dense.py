"""The second definitions: n x n matrices, one pair for each head, from empty states. They cost n^3.

    X = scale Q K^T        Gam_ij, Lam_ij = the inner and outer decay from token j to token i >= j, else 0

Q, K and V have the same number of heads here.
"""

import torch
from torch import Tensor


def hla2(
    q: Tensor, k: Tensor, v: Tensor, inner: Tensor | None, outer: Tensor | None, scale: float, ridge: float
) -> Tensor:
    """(Lam . (X (Gam . X)^T)) V: undecayed ((W W^T) . L) V with W = L . X, whose left mask is implied."""
    X, Gam, Lam = _products(q, k, scale), decays(inner, q), decays(outer, q)
    return _apply(Lam * (X @ (Gam * X).mT + ridge * _products(q, q, scale**2)), v)


def hla2_prefix(
    q: Tensor, k: Tensor, v: Tensor, inner: Tensor | None, outer: Tensor | None, scale: float, ridge: float
) -> Tensor:
    """(Lam . ((Gam . X) X^T)) V: the left factor is masked, the right one is not."""
    X, Gam, Lam = _products(q, k, scale), decays(inner, q), decays(outer, q)
    return _apply(Lam * ((Gam * X) @ X.mT + ridge * _products(q, q, scale**2)), v)


def ahla(q: Tensor, k: Tensor, v: Tensor, inner: Tensor | None, outer: Tensor | None, scale: float) -> Tensor:
    """(Lam . X) (Gam . X) V: undecayed W W V."""
    X = _products(q, k, scale)
    return _apply((decays(outer, q) * X) @ (decays(inner, q) * X), v)


def hla3(
    q: Tensor, k: Tensor, v: Tensor, inner: Tensor | None, outer: Tensor | None, scale: float, ridge: float
) -> Tensor:
    """(Lam . (X A^T)) A V with A = Gam . X: undecayed ((W W^T) . L) W V."""
    X = _products(q, k, scale)
    A = decays(inner, q) * X
    return _apply((decays(outer, q) * (X @ A.mT + ridge * _products(q, q, scale**2))) @ A, v)


def hla3_paper(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The sum over tokens i, u, j <= t of X_ti X_ui X_uj v_j, of which the latest occurs at least twice."""
    X = _products(q, k, scale)
    W, c = X.tril(), X.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    i_is_u = (W * c) @ X.tril(-1)  # j < i = u
    i_is_j = W * X.triu(1).square().sum(-2, keepdim=True)  # u < i = j
    u_is_j = (X @ X.tril(-1).mT).tril() * c  # i < u = j
    return _apply(i_is_u + i_is_j + u_is_j + W * c * c, v)


def decays(log_decay: Tensor | None, q: Tensor) -> Tensor:
    """[B, T, H] -> [B, H, T, T], the decay from token j to token i; without decay the lower triangle of ones."""
    B, T, H, _ = q.shape
    g = q.new_zeros(B, T, H) if log_decay is None else log_decay
    t = torch.arange(T, device=q.device)
    i, j = t[:, None], t[None, :]
    # The exponent of pair (i, j) is g_{j+1} + ... + g_i, summed as it stands: no large sums are subtracted.
    between = (j[..., None] < t) & (t <= i[..., None])  # [i, j, t]
    exponent = torch.einsum("ijt,bth->bhij", between.to(g.dtype), g)
    return exponent.masked_fill(j > i, -torch.inf).exp()


def _products(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return scale * torch.einsum("bihk,bjhk->bhij", q, k)


def _apply(M: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhij,bjhv->bihv", M, v)
