"""The word problem of a finite group (Merrill, Petty and Sabharwal 2024, "The illusion of state", arXiv 2404.08819).

A row is a word of group elements, and at every position the model must say what the word so far multiplies to:

    x1     x2     x3        x4
    x1     x1 x2  x1 x2 x3  x1 x2 x3 x4    <- labels, again elements of the group

Whoever keeps the product keeps a state of one among so many; there is nothing to recall. The groups of order 60 tell
what is hard: Z60 commutes, so that counting is enough; A4xZ5 is solvable; A5 is not, and its word problem is complete
for NC1, beyond what a fixed number of parallel layers is known to do.
"""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from mixassay import draws
from mixassay.errors import UserError
from mixassay.tasks import Rows, Split, draw_rows, task
from mixassay.tasks.parts.groups import group
from mixassay.tasks.parts.scan import prefixes


@task("word_problem")
@dataclass(frozen=True, kw_only=True)
class WordProblem:
    """Words of seq_len elements of `group`, uniform and independent, with the product so far at every position.

    group: S, A or Z and a number, or a product of such: S3, A5, Z60, A4xZ5 (`parts/groups.py`). Ids are the numbers of
    the elements, 0 the identity; letters and labels share them.
    moved: letters are only those elements that move so many points at most. 2: the identity and swaps; 3: three-cycles
    as well (Grazzi et al. 2024, arXiv 2411.12537). For S and A alone.

    The product of a uniform letter with anything is uniform: chance is 1 over the order of the group at every
    position, the first excepted, whose label is the letter itself.

    Rows: positions, labels and the slice "length" (letters so far) are [N, seq_len].

    >>> rows = WordProblem(group="S3", seq_len=6).rows(torch.tensor([8]), seed=0, split="train")
    >>> rows.tokens.tolist()[0], rows.labels.tolist()[0]
    ([3, 1, 2, 5, 2, 4], [3, 5, 4, 1, 3, 0])
    """

    version: ClassVar[int] = 1

    group: str = "S3"
    seq_len: int = 32
    moved: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.seq_len <= 2**20:
            raise UserError(f"word_problem: seq_len must be from 1 to 2**20, got {self.seq_len}")
        try:
            here = group(self.group)
        except UserError as problem:
            raise UserError(f"word_problem: {problem}") from problem
        if here.order < 2:
            raise UserError(f"word_problem: group {self.group} has but one element")
        if self.moved is not None and here.moved is None:
            raise UserError(f"word_problem: moved={self.moved} is for groups of permutations, S or A, not {self.group}")
        if self.moved is not None and len(letters(self.group, self.moved)) < 2:
            raise UserError(f"word_problem: moved={self.moved} leaves no letter of {self.group} but the identity")

    @property
    def vocab_size(self) -> int:
        return group(self.group).order

    def rows(self, index: Tensor, *, seed: int | Tensor, split: Split) -> Rows:
        """Rows `index` int64 [N] of the split (see `Task`)."""
        stream = draws.stream("word_problem", self.version, self.group, self.seq_len, repr(self.moved))
        return draw_rows(self._draw, self.seq_len, index, seed=seed, split=split, stream=stream)

    def _draw(self, words: Tensor) -> Rows:
        G, times, choice = self.vocab_size, *tables(self.group, self.moved, words.device)
        tokens = choice[draws.below(words, len(choice))]
        (labels,) = prefixes((tokens,), lambda a, b: (times[a[0] * G + b[0]],))
        positions = torch.arange(self.seq_len, device=words.device).expand(len(words), -1)
        return Rows(tokens, positions, labels, {"length": positions + 1})


@cache
def letters(name: str, moved: int | None) -> list[int]:
    """The elements that words are made of."""
    points = group(name).moved
    return [g for g in range(group(name).order) if moved is None or points is None or points[g] <= moved]


@cache
def tables(name: str, moved: int | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 [order^2], the number of a b at a x order + b, and the letters."""
    return group(name).times.flatten().to(device), torch.tensor(letters(name, moved), device=device)
