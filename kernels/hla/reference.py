"""The definitions: what one token does to the state, and what it reads. README.md has the same lines as formulas.

Each function takes a token (q [B, H, K], k [B, G, K], v [B, G, W], log decays [B, G] and [B, H] or None), the scale
and the state before it, and returns o [B, H, W] and the state after it.
"""

from collections.abc import Callable

from torch import Tensor

from mixassay.kernels.hla.state import AHLAState, HLA2PrefixState, HLA2State, HLA3PaperState, HLA3State, State
from mixassay.kernels.hla.tokens import Tokens, per_head

Token = Callable[[Tokens, float, State], tuple[Tensor, State]]


def hla2(x: Tokens, scale: float, state: HLA2State, *, ridge: float) -> tuple[Tensor, HLA2State]:
    S, F = state
    S = _faded(S, x.inner) + _outer(x.k, x.k)
    kappa = scale * (_read(x.q, S) + ridge * x.q)
    F = _faded(F, x.outer) + _outer(kappa, per_head(x.v, x.q, 1))
    return scale * _read(x.q, F), HLA2State(S, F)


def hla2_prefix(x: Tokens, scale: float, state: HLA2PrefixState, *, ridge: float) -> tuple[Tensor, HLA2PrefixState]:
    S, C = state
    S = _faded(S, x.inner) + _outer(x.k, x.k)
    C = _faded(C, x.outer) + _outer(x.q, per_head(x.v, x.q, 1))
    kappa = scale * (_read(x.q, S) + ridge * x.q)
    return scale * _read(kappa, C), HLA2PrefixState(S, C)


def ahla(x: Tokens, scale: float, state: AHLAState) -> tuple[Tensor, AHLAState]:
    P, E = state
    P = _faded(P, x.inner) + _outer(x.k, x.v)
    nu = scale * _read(x.q, P)
    E = _faded(E, x.outer) + _outer(per_head(x.k, x.q, 1), nu)
    return scale * _read(x.q, E), AHLAState(P, E)


def hla3(x: Tokens, scale: float, state: HLA3State, *, ridge: float) -> tuple[Tensor, HLA3State]:
    S, P, F = state
    S = _faded(S, x.inner) + _outer(x.k, x.k)
    P = _faded(P, x.inner) + _outer(x.k, x.v)
    kappa = scale * (_read(x.q, S) + ridge * x.q)
    nu = scale * _read(x.q, P)
    F = _faded(F, x.outer) + _outer(kappa, nu)
    return scale * _read(x.q, F), HLA3State(S, P, F)


def hla3_paper(x: Tokens, scale: float, state: HLA3PaperState) -> tuple[Tensor, HLA3PaperState]:
    S, R, P, F = state  # of the tokens before this one
    k, v = per_head(x.k, x.q, 1), per_head(x.v, x.q, 1)
    c = scale * (x.q * k).sum(-1, keepdim=True)
    y = scale**2 * (k * _read(k, R)).sum(-1, keepdim=True)
    a = c * scale * _read(x.q, S) + (y + c * c) * k
    b = c * scale * _read(x.q, P)
    F = F + _outer(a, v) + _outer(k, b)
    state = HLA3PaperState(S + _outer(x.k, x.k), R + _outer(x.q, x.q), P + _outer(x.k, x.v), F)
    return scale * _read(x.q, F), state


def recurrence(token: Token[State], x: Tokens, scale: float, state: State) -> tuple[list[Tensor], State]:
    """Token after token: the outputs, and the last state."""
    o = []
    for t in range(x.q.shape[1]):
        y, state = token(x.at(t), scale, state)
        o.append(y)
    return o, state


def _faded(M: Tensor, log_decay: Tensor | None) -> Tensor:
    return M if log_decay is None else log_decay[..., None, None].exp() * M


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a[..., :, None] * b[..., None, :]


def _read(q: Tensor, M: Tensor) -> Tensor:
    """q^T M: q [B, H, K], and M [B, G or H, K, X], each head of which serves the same number of heads of q."""
    return (q[..., None] * per_head(M, q, 1)).sum(-2)
