"""Segments: what a stretch of tokens does, as a monoid, so that stretches can be combined in any bracketing.

`token` makes the segment of one token, `a.then(b)` that of a followed by b, `neutral` the one of no token, and `read`
is what a query sees at the end of a segment that starts the sequence. All may have leading axes (rows, heads). Decays
are factors [..., 1, 1], gam the inner and lam the outer one, each token's own. A ratio's denominator is one more column
of v, always 1.

These are the associative operators of the paper with decay put right (docs/hla-errata.md), and smaller ones. They show
that the operators can be scanned; `composed.py` is faster, as a combination costs matrix products and two plain sums
over chunks do not.
"""

from typing import NamedTuple, Self, TypeVar

import torch
from torch import Tensor

Segment = TypeVar("Segment", "HLA2Paper", "HLA2", "AHLA", "HLA3")


def neutral(like: Segment) -> Segment:
    """The segment of no token, in the shapes of `like`."""
    fields = like._asdict().items()
    return type(like)(**{n: torch.ones_like(x) if n in ("rho", "sig") else torch.zeros_like(x) for n, x in fields})


class HLA2Paper(NamedTuple):
    """`hla2`, the paper's tuple without its vectors: outer decay = inner decay squared.

    F, which is read, is S C - G: G takes away the pairs of a query before the key.
    """

    S: Tensor  # sum of k k^T
    C: Tensor  # sum of q v^T
    G: Tensor
    rho: Tensor  # the product of all inner decays

    @classmethod
    def token(cls, q: Tensor, k: Tensor, v: Tensor, gam: Tensor) -> Self:
        return cls(_outer(k, k), _outer(q, v), torch.zeros_like(_outer(k, v)), gam)

    def then(self, b: Self) -> Self:
        G = b.rho**2 * self.G + b.G + b.S @ (b.rho * self.C)
        return type(self)(b.rho * self.S + b.S, b.rho * self.C + b.C, G, self.rho * b.rho)

    def read(self, q: Tensor) -> Tensor:
        return _read(q, self.S @ self.C - self.G)


class HLA2(NamedTuple):
    """`hla2`, free decays. C weights each query by the inner decay before it and the outer one after it."""

    S: Tensor
    C: Tensor
    F: Tensor  # sum of kappa v^T
    rho: Tensor  # products of the inner and of the outer decays
    sig: Tensor

    @classmethod
    def token(cls, q: Tensor, k: Tensor, v: Tensor, gam: Tensor, lam: Tensor) -> Self:
        return cls(_outer(k, k), gam * _outer(q, v), _dot(q, k) * _outer(k, v), gam, lam)

    def then(self, b: Self) -> Self:
        C = b.sig * self.C + self.rho * b.C
        F = b.sig * self.F + b.F + self.S @ b.C
        return type(self)(b.rho * self.S + b.S, C, F, self.rho * b.rho, self.sig * b.sig)

    def read(self, q: Tensor) -> Tensor:
        return _read(q, self.F)


class AHLA(NamedTuple):
    """`ahla`, free decays. With lam = gam, R is rho times the plain sum of k q^T: that sum itself does not decay."""

    R: Tensor  # sum of k q^T, weighted as C above
    P: Tensor  # sum of k v^T
    E: Tensor  # sum of k nu^T
    rho: Tensor
    sig: Tensor

    @classmethod
    def token(cls, q: Tensor, k: Tensor, v: Tensor, gam: Tensor, lam: Tensor) -> Self:
        return cls(gam * _outer(k, q), _outer(k, v), _dot(q, k) * _outer(k, v), gam, lam)

    def then(self, b: Self) -> Self:
        R = b.sig * self.R + self.rho * b.R
        E = b.sig * self.E + b.E + b.R @ self.P
        return type(self)(R, b.rho * self.P + b.P, E, self.rho * b.rho, self.sig * b.sig)

    def read(self, q: Tensor) -> Tensor:
        return _read(q, self.E)


class HLA3(NamedTuple):
    """`hla3`, free decays, with matrices of at most K x K and K x V (the paper's maps have K x K x K x V numbers)."""

    S: Tensor  # sum of k k^T
    P: Tensor  # sum of k v^T
    F: Tensor  # sum of kappa nu^T
    N: Tensor  # sum of q q^T, X of kappa q^T, Y of q nu^T; weighted by earlier inner and later outer decays
    X: Tensor
    Y: Tensor
    rho: Tensor
    sig: Tensor

    @classmethod
    def token(cls, q: Tensor, k: Tensor, v: Tensor, gam: Tensor, lam: Tensor) -> Self:
        c = _dot(q, k)
        N, X, Y = gam**2 * _outer(q, q), gam * c * _outer(k, q), gam * c * _outer(q, v)
        return cls(_outer(k, k), _outer(k, v), c**2 * _outer(k, v), N, X, Y, gam, lam)

    def then(self, b: Self) -> Self:
        S, P, rho = self.S, self.P, self.rho
        F = b.sig * self.F + b.F + S @ b.N @ P + S @ b.Y + b.X @ P
        N = b.sig * self.N + rho**2 * b.N
        X = b.sig * self.X + rho * (b.X + S @ b.N)
        Y = b.sig * self.Y + rho * (b.Y + b.N @ P)
        return type(self)(b.rho * S + b.S, b.rho * P + b.P, F, N, X, Y, rho * b.rho, self.sig * b.sig)

    def read(self, q: Tensor) -> Tensor:
        return _read(q, self.F)


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a[..., :, None] * b[..., None, :]


def _dot(q: Tensor, k: Tensor) -> Tensor:
    return (q * k).sum(-1)[..., None, None]


def _read(q: Tensor, M: Tensor) -> Tensor:
    return (q[..., None, :] @ M).squeeze(-2)
