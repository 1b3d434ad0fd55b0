"""What the forms read of each token, after feature map, mask and defaults; and heads of k that several of q share."""

from typing import NamedTuple

from torch import Tensor


class Tokens(NamedTuple):
    """Of all tokens [B, T, ...], or of one [B, ...]."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, G, K]
    v: Tensor  # [B, T, G, W]
    inner: Tensor | None  # log decay of S and P, [B, T, G]
    outer: Tensor | None  # log decay of what is read at the end, [B, T, H]

    def at(self, t: int | slice) -> "Tokens":
        return Tokens(*(None if x is None else x[:, t] for x in self))  # type: ignore[arg-type]


def per_head(x: Tensor, q: Tensor, dim: int) -> Tensor:
    """`x` for each head of q: its heads, G at `dim`, repeated H / G times. Both have their heads at `dim`."""
    times = q.shape[dim] // x.shape[dim]
    return x if times == 1 else x.repeat_interleave(times, dim)
