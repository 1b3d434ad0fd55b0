"""Parity: is the number of ones so far odd? The smallest state that must be tracked, one bit that every one turns.

1  0  1  1  0  .  .
1  1  0  1  1        <- labels (ask: every)
            1        <- label (ask: end)
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mixassay import draws
from mixassay.errors import UserError
from mixassay.tasks import IGNORE, Rows, Split, draw_rows, task

PAD = 2


@task("parity")
@dataclass(frozen=True, kw_only=True)
class Parity:
    """Random bits, of a length uniform in min_len .. seq_len, then padding; the label is their sum mod 2.

    ask: "end", at the last bit alone, as in the Chomsky-hierarchy suite (Delétang et al. 2022, arXiv 2207.02098) with
    lengths 3 to 40 in training and 40 to 256 in tests; "every", at each bit the parity so far.

    Ids: 0, 1, padding 2. Chance is 1/2. Published scores are scaled: (accuracy - chance) / (1 - chance).

    Rows: positions, labels and the slice "length" (bits so far) are [N, 1], or [N, seq_len] for "every".

    >>> rows = Parity(min_len=3, seq_len=8, ask="every").rows(torch.tensor([8]), seed=0, split="train")
    >>> rows.tokens.tolist()[0], rows.labels.tolist()[0]
    ([1, 0, 1, 0, 1, 0, 0, 2], [1, 1, 0, 0, 1, 1, 1, -100])
    """

    version: ClassVar[int] = 1

    seq_len: int = 40
    min_len: int = 3
    ask: Literal["end", "every"] = "end"

    def __post_init__(self) -> None:
        if not 1 <= self.min_len <= self.seq_len <= 2**20:
            raise UserError(
                f"parity: lengths must be 1 <= min_len <= seq_len <= 2**20, got {self.min_len} and {self.seq_len}"
            )
        if self.ask not in ("end", "every"):
            raise UserError(f'parity: ask must be "end" or "every", got "{self.ask}"')

    @property
    def vocab_size(self) -> int:
        return 3

    def rows(self, index: Tensor, *, seed: int | Tensor, split: Split) -> Rows:
        """Rows `index` int64 [N] of the split (see `Task`)."""
        stream = draws.stream("parity", self.version, self.seq_len, self.min_len, self.ask)
        return draw_rows(self._draw, 1 + self.seq_len, index, seed=seed, split=split, stream=stream)

    def _draw(self, words: Tensor) -> Rows:
        length = self.min_len + draws.below(words[:, :1], self.seq_len - self.min_len + 1)
        bits = words[:, 1:] >> 31
        sums = bits.cumsum(1) % 2
        at = torch.arange(self.seq_len, device=words.device).expand_as(bits)
        behind = at >= length
        tokens = bits.masked_fill(behind, PAD)
        if self.ask == "end":
            return Rows(tokens, length - 1, sums.gather(1, length - 1), {"length": length})
        slices = {"length": (at + 1).masked_fill(behind, 0)}
        return Rows(tokens, at.masked_fill(behind, 0), sums.masked_fill(behind, IGNORE), slices)
