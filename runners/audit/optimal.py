"""The cut with the least bound, by dynamic programming: exact, for a sequence that is known as a whole."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Optimal:
    """The best cuts of every prefix of k [T, K], v [T, V] into at most M blocks, or at given places only.

    O(T^2) memory, O(M T^2) time.
    """

    def __init__(self, k: Tensor, v: Tensor, M: int, at: Sequence[int] | None = None) -> None:
        cost = costs(k, v)
        T = len(k)
        if at is not None:
            allowed = torch.zeros(T + 1, dtype=torch.bool)
            allowed[list(at)] = True
            cost[~allowed] = torch.inf
        best = torch.full((T + 1,), torch.inf, dtype=cost.dtype)
        best[0] = 0
        self.back = []
        for _ in range(M):  # best[e]: of the first e tokens in exactly so many blocks
            best, back = (best[:, None] + cost).min(0)
            self.back.append(back)

    def starts(self, end: int, m: int) -> list[int]:
        """First tokens of the best m blocks of tokens 0 .. end - 1. There must be as many tokens (or places)."""
        found: list[int] = []
        for back in reversed(self.back[:m]):
            end = int(back[end])
            found.append(end)
        return found[::-1]


def costs(k: Tensor, v: Tensor) -> Tensor:
    """sqrt(n SSE) of the block of tokens i .. j - 1, [T + 1, T + 1], infinite where there is none.

    Of sums of the Gram matrix: precise to about 1e-8 of a token, enough to choose by, not to report.
    """
    T = len(k)
    gram = (k @ k.T) * (v @ v.T)
    sums = torch.zeros(T + 1, T + 1, dtype=k.dtype)
    sums[1:, 1:] = gram.cumsum(0).cumsum(1)
    corner, diagonal = sums.diagonal(), torch.cat((gram.new_zeros(1), gram.diagonal().cumsum(0)))
    square = corner - sums - sums.T + corner[:, None]  # |sum of the block|^2
    at = torch.arange(T + 1)
    n = at - at[:, None]
    sse = diagonal - diagonal[:, None] - square / n.clamp(min=1)
    return torch.where(n > 0, (n * sse.clamp(min=0)).clamp(min=0).sqrt(), torch.inf)
