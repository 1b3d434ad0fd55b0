"""Where segments begin: the score of every token against the open segment, and where it reaches the threshold.

With C the state of the open segment before the token, additive and decayed (it never sees beta), the readings are

    memory      sqrt(2 - 2 cos(C, s_t)):  both sides at unit norm, hence one cosine, of K x V matrices
    token       the same with s_{t-1} for C: no recurrence, blind to slow drift
    memory_raw  |s_t - C| / |C|: broken for additive states, since a copy of n tokens scores (n - 1) / n; for tests

A token without norm, or an open segment without, scores 0. The first token scores the threshold and is a boundary.

Everything is a sum of Gram entries, <s_s, s_t> = (k_s k_t)(v_s v_t). So a chunk computes the scores for *every* token
at which the open segment may have begun, and then walks from boundary to boundary: the steps in sequence are
boundaries, not tokens.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from mixassay.errors import UserError
from mixassay.kernels.common.shapes import Axes

Reading = Literal["memory", "token", "memory_raw"]


def boundaries(
    k: Tensor,
    v: Tensor,
    threshold: float | Tensor,
    log_decay: Tensor | None = None,
    *,
    reading: Reading = "memory",
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """(score [B, T, H] in float32 or, for float64 inputs, float64; boundary, bool [B, T, H]).

    k [B, T, G, K] with G dividing H, v [B, T, H, V], log_decay [B, T, H] or None for no decay. threshold: one number,
    one a head [H], or one a row and head [B, H]; a token whose score reaches it is a boundary. No gradient. Raises
    UserError for shapes that do not fit. Scores that agree with the threshold to rounding may fall on either side,
    depending on `chunk_size`.
    """
    axes = Axes("dla.boundaries")
    axes.check("k", k, "BTGK")
    axes.check("v", v, "BTHV")
    if log_decay is not None:
        axes.check("log_decay", log_decay, "BTH")
    axes.check_groups("k", "v")
    axes.check_positive("T", k.shape[1])
    axes.check_positive("chunk_size", chunk_size)
    if reading not in get_args(Reading):
        raise UserError(f'dla.boundaries: unknown reading "{reading}", expected one of {", ".join(get_args(Reading))}')
    (B, T, H, _), dtype = v.shape, torch.promote_types(torch.promote_types(k.dtype, v.dtype), torch.float32)
    tau = torch.as_tensor(threshold, dtype=dtype, device=v.device)
    if tau.dim():
        axes.check("threshold", tau, "BH" if tau.dim() == 2 else "H")
    with torch.no_grad():
        k, v = lanes(k.repeat_interleave(H // k.shape[2], 2)).to(dtype), lanes(v).to(dtype)
        floor = -708.0 if dtype == torch.float64 else -87.0  # as good as -inf, which would make NaN
        g = lanes(log_decay).to(dtype).clamp(min=floor) if log_decay is not None else v.new_zeros(v.shape[:2])
        tau = tau.expand(B, H).reshape(B * H, 1, 1)
        score, boundary = _neighbours(k, v, tau) if reading == "token" else _segments(k, v, g, tau, reading, chunk_size)
    return score.view(B, H, T).transpose(1, 2), boundary.view(B, H, T).transpose(1, 2)


def lanes(x: Tensor) -> Tensor:
    """[B, T, H, ...] -> [B H, T, ...]"""
    return x.transpose(1, 2).flatten(0, 1)


def distance(inner: Tensor, token: Tensor, memory: Tensor, raw: bool = False) -> Tensor:
    """The score from <C, s_t>, |s_t|^2 and |C|^2; `raw` is the reading memory_raw."""
    if raw:
        apart = (token + memory - 2 * inner).clamp(min=0)
        return torch.where((token > 0) & (memory > 0), (apart / memory).sqrt(), 0.0)
    cosine = inner / (token.sqrt() * memory.sqrt())
    return torch.where((token > 0) & (memory > 0), (2 - 2 * cosine).clamp(min=0).sqrt(), 0.0)


def _neighbours(k: Tensor, v: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    norm = k.square().sum(-1) * v.square().sum(-1)  # [N, T]
    inner = (k[:, 1:] * k[:, :-1]).sum(-1) * (v[:, 1:] * v[:, :-1]).sum(-1)
    tau = tau[:, :, 0]
    score = torch.cat((tau, distance(inner, norm[:, 1:], norm[:, :-1])), dim=1)
    return score, score >= tau


def _segments(k: Tensor, v: Tensor, g: Tensor, tau: Tensor, reading: Reading, chunk_size: int) -> tuple[Tensor, Tensor]:
    """k [N, T, K], v [N, T, V], g [N, T], tau [N, 1, 1] -> score and boundary [N, T]."""
    S = k.new_zeros(len(k), k.shape[2], v.shape[2])  # the open segment before the chunk
    scores, found = [], []
    for start in range(0, k.shape[1], chunk_size):
        part = slice(start, start + chunk_size)
        kc, vc, gc = k[:, part], v[:, part], g[:, part]
        table, last = _table(kc, vc, gc, S, raw=reading == "memory_raw")
        if start == 0:
            table[:, 0, :1] = tau[:, 0]
        boundary = _walk(table >= tau)
        number = torch.arange(1, boundary.shape[1] + 1, device=k.device)
        opened = torch.where(boundary, number, 0).cummax(1).values  # row of the table: after this token
        row = torch.cat((torch.zeros_like(opened[:, :1]), opened[:, :-1]), dim=1)
        scores.append(table.gather(1, row[:, None])[:, 0])
        found.append(boundary)
        w = last.masked_fill(number < opened[:, -1:], 0.0)  # what the segment that stays open holds of the chunk
        old = torch.where(opened[:, -1] == 0, gc.sum(1).exp(), 0.0)
        S = old[:, None, None] * S + (kc * w[..., None]).mT @ vc
    return torch.cat(scores, dim=1), torch.cat(found, dim=1)


def _table(k: Tensor, v: Tensor, g: Tensor, S: Tensor, raw: bool) -> tuple[Tensor, Tensor]:
    """Scores [N, C + 1, C] of every token if the open segment was carried in (row 0) or began at token j (row j + 1),
    -inf for tokens that are not after j; and the decay [N, C] from each token to the chunk's end."""
    C = k.shape[1]
    after = g.cumsum(1)
    before = after - g
    at = torch.arange(C, device=k.device)
    earlier = at[:, None] > at  # [t, s]
    decay = torch.where(earlier, before[:, :, None] - after[:, None], -torch.inf).exp()
    gram = (k @ k.mT) * (v @ v.mT)
    norm = gram.diagonal(dim1=1, dim2=2)  # [N, C]
    since = (at >= at[:, None]).to(k.dtype)  # [j, s]: s belongs to a segment that began at j
    inner = since @ (gram * decay).mT  # [N, j, t] = <C, s_t>
    carried = inner[:, :1] + (before.exp() * ((k @ S) * v).sum(-1))[:, None]
    inner = torch.cat((carried, inner), dim=1)
    # |C|^2 grows by 2 a_t <C, s_t> + |s_t|^2 and decays by a_t^2: the same sum, with the square of the decay
    grown = 2 * g.exp()[:, None] * inner + norm[:, None]
    grown[:, 1:] *= since
    memory = grown @ decay.square().mT
    memory[:, 0] += (2 * before).exp() * S.square().sum((1, 2))[:, None]
    table = distance(inner, norm[:, None], memory, raw)
    table[:, 1:].masked_fill_(at <= at[:, None], -torch.inf)
    return table, (after[:, -1:] - after).exp()


def _walk(hits: Tensor) -> Tensor:
    """hits [N, C + 1, C] -> boundary [N, C]: from row 0 to its first hit t, from row t + 1 to its first hit, ..."""
    N, _, C = hits.shape
    following = torch.where(hits.any(2), hits.to(torch.uint8).argmax(2), C)  # [N, C + 1]
    found = torch.zeros(N, C + 1, dtype=torch.bool, device=hits.device)  # one spare column
    at = following[:, :1]
    while bool((at < C).any()):
        found.scatter_(1, at, True)
        at = torch.where(at < C, following.gather(1, (at + 1).clamp(max=C)), C)
    return found[:, :C]
