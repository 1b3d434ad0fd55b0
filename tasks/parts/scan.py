"""Prefix products of anything associative, in log2(T) steps of whole tensors."""

from collections.abc import Callable

import torch
from torch import Tensor

Parts = tuple[Tensor, ...]


def prefixes(parts: Parts, combine: Callable[[Parts, Parts], Parts]) -> Parts:
    """x_1 . x_2 . ... . x_t for each t (Hillis and Steele 1986): a tuple of tensors [N, T] and what combines two."""
    step = 1
    while step < parts[0].shape[1]:
        later = combine(tuple(x[:, :-step] for x in parts), tuple(x[:, step:] for x in parts))
        parts = tuple(torch.cat((x[:, :step], y), dim=1) for x, y in zip(parts, later, strict=True))
        step *= 2
    return parts
