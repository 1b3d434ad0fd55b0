"""Chunkwise form in torch: dense inside a chunk, a tree of states between chunks. The equations are in README.md.

Axes: b batch, g groups of heads that share q and k, r heads of a group, n chunks, c tokens of a chunk, l levels.
"""

from torch import Tensor

from mixassay.kernels.common.chunks import Decay, join, per_group
from mixassay.kernels.common.dyadic import chunk_length, pair_scale, read_past, split, split_heads


def log_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_scale: Tensor,
    log_decay: Tensor | None,
    scale: float,
    chunk_size: int | None,
) -> Tensor:
    T, G = q.shape[1:3]
    C = chunk_length(q, chunk_size)
    q, k = split(q * scale, C), split(k, C)  # [b, g, n, c, k]
    v, level_scale = split_heads(v, G, C), split_heads(level_scale, G, C)  # [b, g, r, n, c, v or l]
    decay = None if log_decay is None else Decay(split_heads(log_decay.unsqueeze(-1), G, C).squeeze(-1))
    A = (q @ k.mT).unsqueeze(2)  # [b, g, 1, n, c, c]
    o = (A.tril() if decay is None else A * decay.pairs()) * pair_scale(level_scale) @ v
    if v.shape[3] == 1:
        return join(o, T)

    q = q.unsqueeze(2)
    if decay is None:
        added, factor = per_group(k.mT, v), v.new_ones(v.shape[3], 1, 1)
    else:
        q, added = q * decay.from_start, per_group(k.mT, v * decay.to_end)
        factor = decay.from_start[..., -1:, :]
    return join(read_past(o, q, added, factor, level_scale), T)
