"""Cutting the token axis into chunks, and the decay between the tokens of one chunk.

Axes: b batch, g groups of heads that share q and k, r heads of a group, n chunks, c tokens of a chunk.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def chunk_length(T: int, asked: int | None, preferred: int) -> int:
    """Tokens per chunk. If none was asked for: chunks of equal length, so that little is padded."""
    if asked is not None:
        return min(asked, T)
    return -(-T // -(-T // preferred))


def split(x: Tensor, C: int) -> Tensor:
    """[b, T, g, x] -> [b, g, n, c, x] and [b, T, g, r, x] -> [b, g, r, n, c, x], the last chunk filled with zeros.

    Contiguous: every later product would otherwise make this copy again.
    """
    if x.shape[1] % C:
        x = pad(x, (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % C))
    b, T, *rest, width = x.shape
    return x.reshape(b, T // C, C, *rest, width).movedim((1, 2), (-3, -2)).contiguous()


def join(x: Tensor, T: int) -> Tensor:
    """[b, g, r, n, c, x] -> [b, T, g r, x]: `split` undone."""
    x = x.movedim((-3, -2), (1, 2))  # [b, n, c, g, r, x]
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], -1, x.shape[-1])[:, :T]


def per_group(a: Tensor, x: Tensor) -> Tensor:
    """[b, g, ..., i, j] times [b, g, r, ..., j, x] -> [b, g, r, ..., i, x].

    The heads of a group lie side by side in one product; broadcasting would repeat `a` for each of them in memory.
    """
    r = x.shape[2]
    if r == 1:
        return a.unsqueeze(2) @ x
    side_by_side = x.movedim(2, -2).flatten(-2)  # [b, g, ..., j, r x]
    y = a @ side_by_side
    return y.reshape(*y.shape[:-1], r, -1).movedim(-2, 2)


def pairwise_decay(since: Tensor) -> Tensor:
    """[..., C] log decay since a common start -> [..., C, C]: exp(since_i - since_j) for j <= i, else 0.

    The exponent is masked before `exp`: above the diagonal it may overflow, and inf * 0 is NaN in the backward.
    Adding the mask in place is exact and spares the backward a pass.
    """
    C = since.shape[-1]
    future = torch.full((C, C), -torch.inf, dtype=since.dtype, device=since.device).triu_(1)
    return (since.unsqueeze(-1) - since.unsqueeze(-2)).add_(future).exp_()


def bounded(log_decay: Tensor) -> Tensor:
    """Log decays no lower than the logarithm of the dtype's smallest normal number, which forgets everything as well.

    In a running sum, -1e4 would swallow the digits of all weak decays that follow, and -inf would make NaN.
    """
    return log_decay.clamp(min=-708.0 if log_decay.dtype == torch.float64 else -87.0)
