"""Induction heads (Olsson et al. 2022; as Gu and Dao 2023, arXiv 2312.00752, ask it): what came after the trigger?

    x  x  x  T  a  x  x  x  x  x  T
                                  a    <- label, at the second trigger

One pair to keep, over any distance: trained at 256 tokens, a model that has learnt it answers at any length.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mixassay import draws
from mixassay.errors import UserError
from mixassay.tasks import Rows, Split, draw_rows, task


@task("induction_heads")
@dataclass(frozen=True, kw_only=True)
class InductionHeads:
    """Uniform tokens below V-1; the trigger V-1 stands once among them, not right before the end, and again at it.

    Gu and Dao train at seq_len 256 and test at 2^6 to 2^20. Chance is 1 / (V - 1).

    Rows: positions, labels and the slice "distance" (from the first trigger to the second) are [N, 1].

    >>> rows = InductionHeads(vocab_size=6, seq_len=10).rows(torch.tensor([8]), seed=0, split="train")
    >>> rows.tokens.tolist()[0], rows.labels.tolist()[0], rows.slices["distance"].tolist()[0]
    ([3, 1, 5, 1, 0, 3, 3, 2, 0, 5], [1], [7])
    """

    version: ClassVar[int] = 1

    vocab_size: int = 16
    seq_len: int = 256

    def __post_init__(self) -> None:
        if not 3 <= self.vocab_size <= 2**31:
            raise UserError(f"induction_heads: vocab_size must be from 3 to 2**31, got {self.vocab_size}")
        if self.seq_len < 3:
            raise UserError(f"induction_heads: seq_len must be at least 3, got {self.seq_len}")

    def rows(self, index: Tensor, *, seed: int | Tensor, split: Split) -> Rows:
        """Rows `index` int64 [N] of the split (see `Task`)."""
        stream = draws.stream("induction_heads", self.version, self.vocab_size, self.seq_len)
        return draw_rows(self._draw, self.seq_len, index, seed=seed, split=split, stream=stream)

    def _draw(self, words: Tensor) -> Rows:
        last = self.seq_len - 1
        tokens = draws.below(words, self.vocab_size - 1)
        tokens[:, last] = self.vocab_size - 1
        first = draws.below(words[:, last:], last - 1)
        tokens.scatter_(1, first, self.vocab_size - 1)
        return Rows(tokens, torch.full_like(first, last), tokens.gather(1, first + 1), {"distance": last - first})
