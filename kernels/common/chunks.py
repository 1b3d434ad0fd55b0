"""Cutting the token axis into chunks, and the decay between the tokens of one chunk."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def chunk_length(T: int, asked: int | None, default: int) -> int:
    """Tokens per chunk. Unasked: chunks of equal length, at most `default`, so that little is padded."""
    if asked is not None:
        return min(asked, T)
    return -(-T // -(-T // default))


def split(x: Tensor, C: int) -> Tensor:
    """[B, T, ..., X] -> [B, ..., N, C, X], the last chunk filled up with zeros."""
    x = pad(x, (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % C)) if x.shape[1] % C else x
    return x.unflatten(1, (-1, C)).movedim((1, 2), (-3, -2))


def join(x: Tensor, T: int) -> Tensor:
    """The inverse of `split`: [B, ..., N, C, X] -> [B, T, ..., X]."""
    return x.movedim((-3, -2), (1, 2)).flatten(1, 2)[:, :T]


def pairwise_decay(G: Tensor) -> Tensor:
    """[..., C] cumulative log decays -> [..., C, C]: exp(G_i - G_j) for j <= i, else 0.

    The exponent is masked before `exp`: above the diagonal it may overflow, and inf * 0 is NaN in the backward.
    """
    C = G.shape[-1]
    future = torch.ones(C, C, dtype=torch.bool, device=G.device).triu(1)
    return (G[..., :, None] - G[..., None, :]).masked_fill(future, -torch.inf).exp()


def bounded(log_decay: Tensor) -> Tensor:
    """Log decays no stronger than the dtype's smallest normal number. Sums of far stronger ones (-1e4, -inf) would
    swallow the digits of the weak decays after them; the difference in the result underflows."""
    return log_decay.clamp(min=_FLOOR[log_decay.dtype])


_FLOOR = {torch.float32: -87.0, torch.float64: -708.0}
