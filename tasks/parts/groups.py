"""Small finite groups by name: S5, A5, Z60 and their products such as A4xZ5.

Elements are numbered from 0, which is the identity. S_n and A_n are permutations of n points in lexicographic order,
multiplied from left to right: (a b)(i) = b(a(i)), first a, then b. Z_n are the residues. In a product the last factor
runs fastest.
"""

import re
from functools import cache
from itertools import permutations, product
from typing import NamedTuple

import torch
from torch import Tensor

from mixassay.errors import UserError

LARGEST = 5040
"""Elements of the largest group, S7: its table of products has 25 million entries."""

Permutation = tuple[int, ...]


class Group(NamedTuple):
    times: Tensor  # int64 [order, order], the number of a b
    moved: tuple[int, ...] | None  # how many points each element moves; None for what is no group of permutations

    @property
    def order(self) -> int:
        return len(self.times)


@cache
def group(name: str) -> Group:
    """Raises `UserError` for what is no group or too large a one."""
    factors = [_factor(part, name) for part in name.split("x")]
    if len(factors) == 1:
        return factors[0]
    order = 1
    times = torch.zeros(1, 1, dtype=torch.int64)
    for factor in factors:
        order *= factor.order
        if order > LARGEST:
            raise UserError(f"group {name} is too large: at most {LARGEST} elements")
        both = times[:, None, :, None] * factor.order + factor.times[None, :, None, :]
        times = both.reshape(order, order)
    return Group(times, None)


def _factor(part: str, name: str) -> Group:
    found = re.fullmatch(r"([SAZ])([1-9]\d{0,3})", part)
    if found is None:
        raise UserError(f'group should be like S3, A5, Z60 or A4xZ5, got "{name}"')
    kind, n = found[1], int(found[2])
    if n > (LARGEST if kind == "Z" else 7):
        raise UserError(f"group {name} is too large: S7, A7 and Z{LARGEST} are the largest")
    if kind == "Z":
        residue = torch.arange(n)
        return Group((residue[:, None] + residue) % n, None)
    elements = [p for p in permutations(range(n)) if kind == "S" or even(p)]
    number = torch.zeros(n**n, dtype=torch.int64)
    points = torch.tensor(elements, dtype=torch.int64).view(len(elements), n)
    digits = n ** torch.arange(n)
    number[points @ digits] = torch.arange(len(elements))
    times = torch.stack([number[points[:, a] @ digits] for a in points])  # b(a(i)) for all b at once
    return Group(times, tuple(sum(i != j for i, j in enumerate(p)) for p in elements))


def even(p: Permutation) -> bool:
    return sum(a > b for (i, a), (j, b) in product(enumerate(p), repeat=2) if i < j) % 2 == 0
