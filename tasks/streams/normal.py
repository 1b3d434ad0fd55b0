"""Normal draws and directions in fixed point: whole numbers in units of 2^-24, the same bits on every device.

Sums of products are exact in int64, whatever their order. The only floating-point operations are a square root and a
division in float64, which IEEE 754 rounds the same everywhere.
"""

from functools import cache
from math import isqrt

import torch
from torch import Tensor

BITS = 24
"""Behind the point."""
ONE = 1 << BITS

PI = 3141592653589793238462643383279502884197169399375105820974944  # times 10^-60
STEP = 7
"""The distribution function is exact at multiples of 2^-7 and linear between them."""


@cache
def _half_normal(device: torch.device) -> Tensor:
    """P(|X| < j 2^-7) in units of 2^-31 for j = 0, 1, ... up to certainty: int64.

    sqrt(2 / pi) sum_n (-1)^n x^(2n + 1) / (2^n n! (2n + 1)), summed in integers so that no machine's libm has a say.
    """
    bits = 128
    scale = isqrt((2 << 2 * bits) * 10**60 // PI)
    knots = [0]
    while knots[-1] < 1 << 31:
        j = len(knots)
        power, total, n = (j << bits) >> STEP, 0, 0  # power: x^(2n + 1) / (2^n n!)
        while power:
            total += power // (2 * n + 1) * (-1) ** n
            n += 1
            power = (power * j * j >> 2 * STEP) // (2 * n)
        knots.append((total * scale + (1 << 2 * bits - 32)) >> 2 * bits - 31)
    return torch.tensor(knots, device=device)


def normal(words: Tensor) -> Tensor:
    """Standard normal draws from 32-bit words: int64 in units of 2^-24, of magnitude below 6.5 (2^-31 of the draws)."""
    table, u = _half_normal(words.device), words & 0x7FFFFFFF
    at = torch.searchsorted(table, u, right=True) - 1
    low = table[at]
    x = (at << BITS - STEP) + ((u - low << BITS - STEP) // (table[at + 1] - low))
    return torch.where(words >> 31 == 1, -x, x)


def length(x: Tensor) -> Tensor:
    """Euclidean, of fixed-point vectors [..., d]: float64 [..., 1] in the same units."""
    return (x * x).sum(-1, keepdim=True).double().sqrt()


def direction(x: Tensor) -> Tensor:
    """The unit vector, again in fixed point."""
    return (x.double() * ONE / length(x)).round().long()


def product(x: Tensor, y: Tensor) -> Tensor:
    """Of fixed-point numbers."""
    return torch.bitwise_right_shift(x * y, BITS)
