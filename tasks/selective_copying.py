"""Selective copying (Gu and Dao 2023, arXiv 2312.00752; in MAD, Poli et al. 2024): repeat what is not blank, in order.

    .  a  .  .  b  .  c  .  .  .  COPY .  .  .
                                       a  b  c    <- labels, at the blanks behind COPY

A convolution with fixed taps copies from a fixed distance; here the distances differ from row to row, so that a mixer
must select by content. Nothing that it says is written down: it has to count what it has already given.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mixassay import draws
from mixassay.errors import UserError
from mixassay.tasks import Rows, Split, draw_rows, task


@task("selective_copying")
@dataclass(frozen=True, kw_only=True)
class SelectiveCopying:
    """num_copy tokens among blanks, COPY, and num_copy blanks at which they must be repeated.

    Ids: content 0 .. V-3, uniform with replacement, the blank V-2, COPY V-1. Places are a uniform subset of those
    before COPY. (In MAD's own generator the last token always stands right before COPY.) Gu and Dao: seq_len 4096,
    MAD: 256, both V=16 and num_copy=16.

    Chance is 1 / (V - 2).

    Rows: positions, labels and slices are [N, num_copy]. Slices: "order" (the number of the token, from 0), "distance"
    (how far back it stands).

    >>> rows = SelectiveCopying(vocab_size=6, seq_len=14, num_copy=3).rows(torch.tensor([8]), seed=0, split="train")
    >>> rows.tokens.tolist()[0]
    [4, 4, 4, 4, 2, 4, 4, 4, 1, 1, 5, 4, 4, 4]
    >>> rows.positions.tolist()[0], rows.labels.tolist()[0]
    ([11, 12, 13], [2, 1, 1])
    """

    version: ClassVar[int] = 1

    vocab_size: int = 16
    seq_len: int = 256
    num_copy: int = 16

    def __post_init__(self) -> None:
        if not 4 <= self.vocab_size <= 2**31:
            raise UserError(f"selective_copying: vocab_size must be from 4 to 2**31, got {self.vocab_size}")
        if self.num_copy < 1:
            raise UserError(f"selective_copying: num_copy must be at least 1, got {self.num_copy}")
        if self.seq_len < 2 * self.num_copy + 1:
            least = 2 * self.num_copy + 1
            raise UserError(f"selective_copying: num_copy={self.num_copy} needs seq_len >= {least}, got {self.seq_len}")

    def rows(self, index: Tensor, *, seed: int | Tensor, split: Split) -> Rows:
        """Rows `index` int64 [N] of the split (see `Task`)."""
        stream = draws.stream("selective_copying", self.version, self.vocab_size, self.seq_len, self.num_copy)
        return draw_rows(self._draw, sum(self._words), index, seed=seed, split=split, stream=stream)

    @property
    def _before(self) -> int:
        """Tokens before COPY."""
        return self.seq_len - self.num_copy - 1

    @property
    def _words(self) -> list[int]:
        """Words a row for its tokens and their places."""
        return [self.num_copy, draws.words_for_distinct(self.num_copy, self._before)]

    def _draw(self, words: Tensor) -> Rows:
        for_tokens, for_places = torch.split(words, self._words, dim=1)
        copied = draws.below(for_tokens, self.vocab_size - 2)
        places = draws.sort(draws.distinct(for_places, self.num_copy, self._before))
        tokens = words.new_full((len(words), self.seq_len), self.vocab_size - 2)
        tokens.scatter_(1, places, copied)
        tokens[:, self._before] = self.vocab_size - 1
        order = torch.arange(self.num_copy, device=words.device).expand_as(places)
        positions = self._before + 1 + order
        return Rows(tokens, positions, copied, {"order": order, "distance": positions - places})
