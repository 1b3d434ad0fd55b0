"""Compression (MAD: Poli et al. 2024, arXiv 2403.17844): a whole row must fit into one vector.

    a  d  b  b  c  SUM
                   a d b b c    <- labels, all at SUM

The model reads random tokens, and from its hidden vector at SUM a small decoder (`readout.py`), which is told only
which token is wanted, must give them all back. Attention may look at everything there; it still has to put it into
d_model numbers.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mixassay import draws
from mixassay.errors import UserError
from mixassay.tasks import Rows, Split, draw_rows, task


@task("compression")
@dataclass(frozen=True, kw_only=True)
class Compression:
    """seq_len - 1 uniform tokens below V-1, then SUM, which is V-1; every one of them is a label there.

    Chance is 1 / (V - 1).

    Rows: positions and labels are [N, seq_len - 1], the q-th label being the q-th token, and all positions seq_len - 1.

    >>> rows = Compression(vocab_size=6, seq_len=6).rows(torch.tensor([8]), seed=0, split="train")
    >>> rows.tokens.tolist()[0]
    [3, 3, 4, 4, 3, 5]
    >>> rows.positions.tolist()[0], rows.labels.tolist()[0]
    ([5, 5, 5, 5, 5], [3, 3, 4, 4, 3])
    """

    version: ClassVar[int] = 1
    decodes: ClassVar[bool] = True

    vocab_size: int = 16
    seq_len: int = 32

    def __post_init__(self) -> None:
        if not 3 <= self.vocab_size <= 2**31:
            raise UserError(f"compression: vocab_size must be from 3 to 2**31, got {self.vocab_size}")
        if self.seq_len < 2:
            raise UserError(f"compression: seq_len must be at least 2, got {self.seq_len}")

    def rows(self, index: Tensor, *, seed: int | Tensor, split: Split) -> Rows:
        """Rows `index` int64 [N] of the split (see `Task`)."""
        stream = draws.stream("compression", self.version, self.vocab_size, self.seq_len)
        return draw_rows(self._draw, self.seq_len - 1, index, seed=seed, split=split, stream=stream)

    def _draw(self, words: Tensor) -> Rows:
        read = draws.below(words, self.vocab_size - 1)
        tokens = torch.cat((read, read.new_full((len(read), 1), self.vocab_size - 1)), dim=1)
        return Rows(tokens, torch.full_like(read, self.seq_len - 1), read)
