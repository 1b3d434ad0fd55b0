"""How long segments are: a law for their shares of the whole, and whole numbers that add up."""

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from mixassay import draws

Law = Literal["fixed", "geometric", "pareto"]
"""All alike; exponential shares; heavy-tailed shares, x - 0.95 with x Pareto of index 1.2."""

LEAST = 4


def segment_lengths(words: Tensor, J: int, total: int, law: Law) -> Tensor:
    """J lengths of at least 4 that add up to `total` >= 4 J, int64 [N, J]. words: [N, 2 J].

    Shares are rounded down, raised to 4, and then mended one by one: too much is taken off the longest, too little
    added anywhere.
    """
    if law == "fixed":
        share = torch.ones_like(words[:, :J])
    else:
        share = draws.exponential(words[:, :J]) if law == "geometric" else _pareto(words.device)[words[:, :J] >> 16]
    lengths = (share * total // share.sum(1, keepdim=True)).clamp(min=LEAST)
    place = torch.arange(J, device=words.device)
    while bool((excess := lengths.sum(1, keepdim=True) > total).any()):
        longest = (lengths * J - place).argmax(1, keepdim=True)  # of equals the first
        lengths = lengths.scatter_add(1, longest, -excess.long())
    lacking = place < total - lengths.sum(1, keepdim=True)  # fewer than J
    return lengths.scatter_add(1, draws.below(words[:, J:], J), lacking.long())


@cache
def _pareto(device: torch.device) -> Tensor:
    """Quantiles of x - 0.95 in the middle of 2^16 equal parts, in units of 2^-16: int64."""
    x = [((i + 0.5) / 65536) ** (-1 / 1.2) - 0.95 for i in range(65536)]
    return torch.tensor([round(y * 65536) for y in x], device=device)
