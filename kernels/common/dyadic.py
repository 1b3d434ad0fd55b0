"""Chunks of a Fenwick tree in torch: the weight of each pair inside a chunk, and a tree over the chunks' states.

Axes: n chunks, c tokens of a chunk, l levels. C and n are powers of two, unless one chunk holds the whole sequence.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from mixassay.kernels.common import chunks
from mixassay.kernels.common.fenwick import level


def chunk_length(q: Tensor, asked: int | None) -> int:
    """Tokens per chunk of q [b, T, ...]: all T, or a power of two, to which what was asked for is rounded up."""
    T = q.shape[1]
    longest = asked if asked is not None else 32 if q.device.type == "cpu" else 64
    return T if longest >= T else 1 << (longest - 1).bit_length()


def split(x: Tensor, C: int) -> Tensor:
    """[b, T, g, x] -> [b, g, n, c, x], filled with zeros to a power of two of chunks."""
    T = x.shape[1]
    n = 1 << (-(-T // C) - 1).bit_length()
    return chunks.split(pad(x, (0, 0) * (x.dim() - 2) + (0, n * C - T)), C)


def split_heads(x: Tensor, G: int, C: int) -> Tensor:
    """[b, T, g r, x] -> [b, g, r, n, c, x]."""
    return split(x.reshape(*x.shape[:2], G, -1, x.shape[-1]), C)


def pair_scale(level_scale: Tensor) -> Tensor:
    """[..., c, l] -> [..., c, c]: what token i gives to the level of token j. Above the diagonal: anything finite."""
    C, L = level_scale.shape[-2:]
    t = torch.arange(max(C, L), device=level_scale.device)
    pick = (level(t[:C, None], t[:C], L).unsqueeze(-1) == t[:L]).to(level_scale.dtype)  # [c, c, l]
    # A product, not an index: on a GPU the gradient of indexing is summed in no fixed order.
    return torch.einsum("...il,ijl->...ij", level_scale, pick)


def read_past(o: Tensor, q: Tensor, S: Tensor, M: Tensor, level_scale: Tensor) -> Tensor:
    """Adds to o [..., n, c, v] what the tokens read of the chunks before their own.

    S  [..., n, k, v]                      what each chunk writes into an empty state
    M  [..., n, k, k], or [..., n, 1, 1]   what it does to the state before it, as a matrix or a factor
    q  [..., n, c, k]                      reads the state before the chunk: all that its tokens do to it is in q

    Two neighbours at a time: the tokens of the right one read the left one, all at one level, and then both are one
    chunk of twice the length. So there are log2(n) rounds, each of one matrix product, and fewer than 2 n states.
    """
    n, C, L = level_scale.shape[-3:]
    here = C.bit_length()  # the level at which a chunk sees its left neighbour
    while n > 1:
        n //= 2
        (o, o2), (q, q2), (w, w2) = (torch.unflatten(x, -3, (n, 2)).unbind(-3) for x in (o, q, level_scale))
        (S, S2), (M, M2) = (torch.unflatten(x, -3, (n, 2)).unbind(-3) for x in (S, M))
        scale = w2[..., min(here, L - 1), None]
        o = torch.cat([o, o2 + scale * (q2 @ S)], dim=-2)
        if n > 1:
            by_factor = M.shape[-1] == 1
            q = torch.cat([q, q2 * M if by_factor else q2 @ M], dim=-2)
            S, M = (M2 * S if by_factor else M2 @ S) + S2, M2 * M if by_factor else M2 @ M
            level_scale = torch.cat([w, w2], dim=-2)
            here += 1
    return o
