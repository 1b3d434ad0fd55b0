"""Chunkwise WY form in torch (Yang et al. 2024, 2025). The equations are in README.md.

Axes: b batch, g groups of heads that share q and k, r heads of a group, n chunks, c tokens of a chunk.
"""

import torch
from torch import Tensor

from mixassay.kernels.common.chunks import Decay, chunk_length, join, per_group, split, split_heads


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
    V = v.shape[-1]
    C = chunk_length(q, chunk_size)
    q, k = split(q * scale, C), split(k, C)  # [b, g, n, c, k]
    v = split_heads(v, G, C)  # [b, g, r, n, c, v]
    beta = split_heads(beta.unsqueeze(-1), G, C)  # [b, g, r, n, c, 1]
    qk, kk = (q @ k.mT).unsqueeze(2), (k @ k.mT).unsqueeze(2)  # [b, g, 1, n, c, c]
    bk = beta * k.unsqueeze(2)
    decay = None if log_decay is None else Decay(split_heads(log_decay.unsqueeze(-1), G, C).squeeze(-1))
    if decay is None:
        qk = qk.tril()
    else:
        pairs = decay.pairs()
        qk, kk, bk = qk * pairs, kk * pairs, bk * decay.from_start
    u, w = torch.split(_solve(beta * kk, torch.cat([beta * v, bk], dim=-1)), [V, k.shape[-1]], dim=-1)
    if v.shape[3] == 1 and initial_state is None and not output_final_state:
        return join(qk @ u, T), None

    state = None if initial_state is None else initial_state.reshape(*v.shape[:3], -1, V)
    u, states, state = _pass_on(k, u, w, decay, state)
    read = per_group(q, states)
    o = qk @ u + (read if decay is None else read * decay.from_start)
    return join(o, T), state.flatten(1, 2) if output_final_state else None


def _solve(A: Tensor, x: Tensor) -> Tensor:
    """(I + A)^-1 x for the part of A below the diagonal; the rest of A is not read.

    Transposed on both sides, so that the solver, which wants columns, takes row-major matrices without copies.
    """
    solved: Tensor = torch.linalg.solve_triangular(A.mT, x.mT, upper=True, left=False, unitriangular=True)
    return solved.mT


def _pass_on(
    k: Tensor, u: Tensor, w: Tensor, decay: Decay | None, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Chunk after chunk, for a chunk's transition is a matrix: what each token writes, given the state before its
    chunk [b, g, r, n, c, v]; the states before each chunk [b, g, r, n, k, v]; the state at the end."""
    S = u.new_zeros(*u.shape[:3], k.shape[-1], u.shape[-1]) if state is None else state
    chunks = [k.mT.unbind(2), u.unbind(3), w.unbind(3)]
    if decay is not None:
        chunks += [decay.from_start[..., -1:, :].unbind(3), decay.to_end.unbind(3)]
    written, states = [], []
    for k_n, u_n, w_n, *decays in zip(*chunks, strict=True):
        states.append(S)
        u_n = u_n - w_n @ S
        written.append(u_n)
        if decays:
            whole, to_end = decays
            S, u_n = S * whole, u_n * to_end
        S = S + per_group(k_n, u_n)
    return torch.stack(written, dim=3), torch.stack(states, dim=3), S
