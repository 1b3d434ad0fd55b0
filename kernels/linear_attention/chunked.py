"""Chunkwise form in torch: dense inside a chunk, states between chunks. The equations are in README.md.

Axes: b batch, g groups of heads that share q and k, r heads of a group, n chunks, c tokens of a chunk.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from mixassay.kernels.common.chunks import Decay, chunk_length, join, per_group, split, split_heads

BLOCK = 32  # chunks whose states one [n, n] matrix passes on; longer sequences go block after block


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
    T = q.shape[1]
    C = chunk_length(q, chunk_size)
    span, state, o = BLOCK * C, initial_state, []
    for t in range(0, T, span):
        g = None if log_decay is None else log_decay[:, t : t + span]
        wanted = output_final_state or t + span < T
        y, state = _block(q[:, t : t + span] * scale, k[:, t : t + span], v[:, t : t + span], g, state, C, wanted)
        o.append(y)
    return o[0] if len(o) == 1 else torch.cat(o, dim=1), state


def _block(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor | None, C: int, output_final_state: bool
) -> tuple[Tensor, Tensor | None]:
    """All chunks of a stretch of tokens in parallel; q carries the scale."""
    T, G = q.shape[1:3]
    q, k = split(q, C), split(k, C)  # [b, g, n, c, k]
    v = split_heads(v, G, C)  # [b, g, r, n, c, v]
    decay = None if log_decay is None else Decay(split_heads(log_decay.unsqueeze(-1), G, C).squeeze(-1))
    A = (q @ k.mT).unsqueeze(2)  # [b, g, 1, n, c, c]
    o = (A.tril() if decay is None else A * decay.pairs()) @ v
    if v.shape[3] == 1 and state is None and not output_final_state:
        return join(o, T), None

    added = per_group(k.mT, v if decay is None else v * decay.to_end)  # [b, g, r, n, k, v], each chunk's own writes
    before = torch.zeros_like(added[:, :, :, 0]) if state is None else state.reshape(added[:, :, :, 0].shape)
    states = torch.cat([before.unsqueeze(3), added], dim=3)  # [b, g, r, n + 1, k, v]
    if decay is None:
        states = states.cumsum(3)
    else:
        over_chunks = Decay(pad(decay.whole, (1, 0))).pairs()  # [b, g, r, n + 1, n + 1]
        states = (over_chunks @ states.flatten(-2)).reshape(states.shape)
    read = per_group(q, states[:, :, :, :-1])
    o = o + (read if decay is None else read * decay.from_start)
    return join(o, T), states[:, :, :, -1].flatten(1, 2) if output_final_state else None
