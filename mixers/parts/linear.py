"""A linear layer whose weight's gradient keeps a GPU busy.

y = x W^T + b;   dW = dy^T x, a sum over all tokens, here made in parts:   dW = sum_s dy_s^T x_s
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TILE, TILES, TOKENS = 64, 32, 4096
"""Edge of a tile of dW, tiles to be computed side by side, and the fewest tokens of a part."""


class Linear(nn.Linear):
    """torch's layer, computed by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, parts: int | None = None) -> Tensor:
    """x [..., D], weight [N, D], bias [N] -> [..., N], as `F.linear`.

    The gradient of a small model's weight is a tile or two, each a sum over every token of the batch: one product
    would leave most of a GPU idle while a few multiprocessors walk over all of them. So x [B, T, D] is cut along B into
    `parts` (None: what `split` finds) that are multiplied by the weight apart: autograd then makes dW of each part side
    by side, and their sum.
    """
    parts = split(x, weight) if parts is None else parts
    if parts == 1:
        return F.linear(x, weight, bias)
    cut = x.reshape(parts, -1, x.shape[-1])
    y = torch.bmm(cut, weight.mT.expand(parts, -1, -1)).reshape(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias.to(y.dtype)


def split(x: Tensor, weight: Tensor) -> int:
    """How many parts, a power of two that divides B: 1 on a CPU, for wide weights and for few tokens."""
    if not x.is_cuda or x.ndim != 3:
        return 1
    (B, T, D), N, parts = x.shape, weight.shape[0], 1
    tiles = -(-N // TILE) * -(-D // TILE)
    while 2 * parts * tiles <= TILES and B % (2 * parts) == 0 and 2 * parts * TOKENS <= B * T:
        parts *= 2
    return parts
