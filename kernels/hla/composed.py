"""The fast path: every operator is two to five calls of linear attention, o_t = scale sum_{j <= t} decay (q_t.k_j) v_j.

    kappa = LA(q, k, k)      hla2          LA(q, kappa, v)          ahla         LA(q, k, nu)
    nu    = LA(q, k, v)      hla2_prefix   LA(kappa, q, v)          hla3         LA(q, kappa, nu)

`la` is `linear_attention` with its options; it serves whole and packed sequences, and gives states if they are wanted.
"""

from collections.abc import Callable

from torch import Tensor

from mixassay.kernels.hla.state import AHLAState, HLA2PrefixState, HLA2State, HLA3PaperState, HLA3State, State
from mixassay.kernels.hla.tokens import Tokens, per_head

LinearAttention = Callable[..., tuple[Tensor, Tensor | None]]
Composed = Callable[[LinearAttention, Tokens, float, State | None], tuple[Tensor, State | None]]


def hla2(
    la: LinearAttention, x: Tokens, scale: float, state: HLA2State | None, *, ridge: float
) -> tuple[Tensor, HLA2State | None]:
    S, F = state or (None, None)
    kappa, S = _kappa(la, x, scale, S, ridge)
    o, F = la(x.q, kappa, per_head(x.v, x.q, 2), x.outer, scale=scale, initial_state=F)
    return o, _together(HLA2State, S, F)


def hla2_prefix(
    la: LinearAttention, x: Tokens, scale: float, state: HLA2PrefixState | None, *, ridge: float
) -> tuple[Tensor, HLA2PrefixState | None]:
    S, C = state or (None, None)
    kappa, S = _kappa(la, x, scale, S, ridge)
    o, C = la(kappa, x.q, per_head(x.v, x.q, 2), x.outer, scale=scale, initial_state=C)
    return o, _together(HLA2PrefixState, S, C)


def ahla(la: LinearAttention, x: Tokens, scale: float, state: AHLAState | None) -> tuple[Tensor, AHLAState | None]:
    P, E = state or (None, None)
    nu, P = _shared(la, x.q, x.k, x.v, x.inner, scale, P)
    o, E = la(x.q, per_head(x.k, x.q, 2), nu, x.outer, scale=scale, initial_state=E)
    return o, _together(AHLAState, P, E)


def hla3(
    la: LinearAttention, x: Tokens, scale: float, state: HLA3State | None, *, ridge: float
) -> tuple[Tensor, HLA3State | None]:
    S, P, F = state or (None, None, None)
    kappa, S = _kappa(la, x, scale, S, ridge)
    nu, P = _shared(la, x.q, x.k, x.v, x.inner, scale, P)
    o, F = la(x.q, kappa, nu, x.outer, scale=scale, initial_state=F)
    return o, _together(HLA3State, S, P, F)


def hla3_paper(
    la: LinearAttention, x: Tokens, scale: float, state: HLA3PaperState | None
) -> tuple[Tensor, HLA3PaperState | None]:
    S, R, P, F = state or (None, None, None, None)
    k, v = per_head(x.k, x.q, 2), per_head(x.v, x.q, 2)
    kappa, S = _shared(la, x.q, x.k, x.k, None, scale, S)
    nu, P = _shared(la, x.q, x.k, x.v, None, scale, P)
    kq, R = la(k, x.q, x.q, None, scale=scale**2, initial_state=R)
    # All three include the token itself; the printed form reads the tokens before it.
    c = scale * (x.q * k).sum(-1, keepdim=True)
    y = (k * kq).sum(-1, keepdim=True)  # c^2 more than of the tokens before: what the last term of `a` needs
    a = c * (kappa - c * k) + y * k
    b = c * (nu - c * v)
    o, F = la(x.q, a, v, None, scale=scale, initial_state=F)
    o2, F2 = la(x.q, k, b, None, scale=scale)
    return o + o2, _together(HLA3PaperState, S, R, P, None if F is None or F2 is None else F + F2)


def _kappa(
    la: LinearAttention, x: Tokens, scale: float, S: Tensor | None, ridge: float
) -> tuple[Tensor, Tensor | None]:
    kappa, S = _shared(la, x.q, x.k, x.k, x.inner, scale, S)
    return (kappa + scale * ridge * x.q if ridge else kappa), S


def _shared(
    la: LinearAttention, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, scale: float, state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Linear attention in which a head of k and v, and its state, serves several heads of q."""
    times = q.shape[2] // k.shape[2]
    o, state = la(
        q,
        per_head(k, q, 2),
        per_head(v, q, 2),
        None if log_decay is None else per_head(log_decay, q, 2),
        scale=scale,
        initial_state=state if state is None or times == 1 else state.repeat_interleave(times, 1),
    )
    return o, state if state is None else state[:, ::times]


def _together(kind: type[State], *parts: Tensor | None) -> State | None:
    given = [part for part in parts if part is not None]
    return kind(*given) if len(given) == len(parts) else None
