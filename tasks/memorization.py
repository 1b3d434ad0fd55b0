"""Memorization (MAD: Poli et al. 2024, arXiv 2403.17844): values that no row ever shows.

    k7 ?  k2 ?  k7 ?  k5 ?
       v7    v2    v7    v5    <- labels, at the question mark behind a key

The map from keys to values is part of the task, the same in every row, split and run: what is learnt here is knowledge
in weights, which embeddings and MLPs hold, with nothing to do for a memory of the past but to hand on the last token.
"""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from mixassay import draws
from mixassay.errors import UserError
from mixassay.tasks import Rows, Split, draw_rows, task


@task("memorization")
@dataclass(frozen=True, kw_only=True)
class Memorization:
    """seq_len / 2 keys, uniform with replacement, each followed by the question mark, at which its value is the label.

    Ids: keys below K = (V - 1) // 2, values K .. V-2, question mark V-1. The map is a random one of different values,
    fixed by V alone; MAD draws 256 training rows and V=256.

    Chance is 1 / (V - 1 - K), for who knows which ids are values.

    Rows: positions and labels are [N, seq_len / 2].

    >>> rows = Memorization(vocab_size=8, seq_len=8).rows(torch.tensor([8]), seed=0, split="train")
    >>> rows.tokens.tolist()[0], rows.labels.tolist()[0]
    ([1, 7, 2, 7, 1, 7, 1, 7], [3, 5, 3, 3])
    """

    version: ClassVar[int] = 1

    vocab_size: int = 256
    seq_len: int = 32

    def __post_init__(self) -> None:
        if not 5 <= self.vocab_size <= 2**24:
            raise UserError(f"memorization: vocab_size must be from 5 to 2**24, got {self.vocab_size}")
        if self.seq_len % 2 or self.seq_len < 2:
            raise UserError(f"memorization: seq_len must be even and at least 2, got {self.seq_len}")

    def rows(self, index: Tensor, *, seed: int | Tensor, split: Split) -> Rows:
        """Rows `index` int64 [N] of the split (see `Task`)."""
        stream = draws.stream("memorization", self.version, self.vocab_size, self.seq_len)
        return draw_rows(self._draw, self.seq_len // 2, index, seed=seed, split=split, stream=stream)

    def _draw(self, words: Tensor) -> Rows:
        values = facts(self.vocab_size, words.device)
        keys = draws.below(words, len(values))
        tokens = torch.stack((keys, torch.full_like(keys, self.vocab_size - 1)), dim=2).flatten(1)
        positions = torch.arange(1, self.seq_len, 2, device=words.device).expand_as(keys)
        return Rows(tokens, positions, values[keys])


@cache
def facts(V: int, device: torch.device) -> Tensor:
    """The value of every key, int64 [(V - 1) // 2]."""
    K = (V - 1) // 2
    words = draws.bits(0, torch.zeros(1, dtype=torch.int64), draws.stream("memorization", "facts", V), V - 1 - K)
    return (K + draws.ranked(words)[1][0, :K]).to(device)
