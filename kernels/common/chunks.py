"""Cutting the token axis into chunks, and the decay between the tokens of one chunk.

Axes: b batch, g groups of heads that share q and k, r heads of a group, n chunks, c tokens of a chunk.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def chunk_length(q: Tensor, asked: int | None) -> int:
    """Tokens per chunk of q [b, T, ...]. If none was asked for: chunks of equal length, so that little is padded.

    A CPU is fastest with one small dense product, then with chunks that stay in its cache; a GPU wants full tiles.
    """
    T = q.shape[1]
    if asked is not None:
        return min(asked, T)
    longest = 32 if T > 64 and q.device.type == "cpu" else 64
    return -(-T // -(-T // longest))


def split(x: Tensor, C: int) -> Tensor:
    """[b, T, g, x] -> [b, g, n, c, x] and [b, T, g, r, x] -> [b, g, r, n, c, x], the last chunk filled with zeros.

    Contiguous: every later product would otherwise make this copy again.
    """
    if x.shape[1] % C:
        x = pad(x, (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % C))
    b, T, *rest, width = x.shape
    return x.reshape(b, T // C, C, *rest, width).movedim((1, 2), (-3, -2)).contiguous()


def split_heads(x: Tensor, G: int, C: int) -> Tensor:
    """[b, T, g r, x] -> [b, g, r, n, c, x]."""
    return split(x.reshape(*x.shape[:2], G, -1, x.shape[-1]), C)


def join(x: Tensor, T: int) -> Tensor:
    """[b, g, r, n, c, x] -> [b, T, g r, x]: `split_heads` undone."""
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


class Decay:
    """The decays of a chunk's tokens, from log decays [..., C].

    Running sums are taken in float64: they reach thousands, and the weak decays between two neighbours, which are
    small differences of them, would lose their digits in float32.
    """

    def __init__(self, log_decay: Tensor) -> None:
        self.dtype = log_decay.dtype
        # As good as -inf, which itself would make NaN: it underflows, exp(-708) in float64 and exp(-87) in float32.
        floor = -708.0 if self.dtype == torch.float64 else -87.0
        self.since = since = log_decay.clamp(min=floor).double().cumsum(-1)
        self.from_start = since.exp().to(self.dtype).unsqueeze(-1)
        """[..., C, 1], the chunk's first token included."""
        self.to_end = (since[..., -1:] - since).exp().to(self.dtype).unsqueeze(-1)
        """[..., C, 1], from after the token to the chunk's end."""

    def pairs(self) -> Tensor:
        """[..., C, C]: from token j to token i >= j, exp(since_i - since_j); else 0.

        The exponent is masked before `exp`: above the diagonal it may overflow, and inf * 0 is NaN in the backward.
        """
        high = self.since.to(self.dtype)
        exponent = high.unsqueeze(-1) - high.unsqueeze(-2)
        if self.dtype != torch.float64:
            # What rounding cut off, as constants: the gradient flows through `high`.
            low = (self.since.detach() - high.detach()).to(self.dtype)
            exponent.add_(low.unsqueeze(-1)).sub_(low.unsqueeze(-2))
        C = high.shape[-1]
        return exponent.add_(torch.full((C, C), -torch.inf, dtype=self.dtype, device=high.device).triu_(1)).exp_()

    @property
    def whole(self) -> Tensor:
        """[...], log decay over the chunk."""
        return self.since[..., -1].to(self.dtype)
