"""Several projections of one input whose weights lie in one matrix."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixassay.mixers.parts.linear import linear

NARROW, ALIGNED = 64, 8


def projections(layer: nn.Linear, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """`layer` (without bias) of x, cut into parts of these widths.

    On a GPU by products apart: each result lies by itself, while the gradients of parts of a common one would have to
    be copied together. Narrow neighbours share a product, padded to rows of 16 bytes, which tensor cores ask for.
    """
    if x.is_cuda:
        return apart(layer.weight, x, widths)
    return list(torch.split(layer(x), list(widths), dim=-1))


def apart(weight: Tensor, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
    found: list[Tensor] = []
    row = 0
    for group in neighbours(widths):
        width = sum(group)
        y = linear(x, F.pad(weight[row : row + width], (0, 0, 0, -width % ALIGNED)))
        found += torch.split(y[..., :width], group, dim=-1)
        row += width
    return found


def neighbours(widths: Sequence[int]) -> list[list[int]]:
    """[256, 2, 2, 128] -> [[256], [2, 2], [128]]"""
    groups: list[list[int]] = []
    for width in widths:
        if groups and width < NARROW and groups[-1][-1] < NARROW:
            groups[-1].append(width)
        else:
            groups.append([width])
    return groups
