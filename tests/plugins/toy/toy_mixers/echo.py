"""toy_echo: at the end of the row, say its first token."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mixassay import draws
from mixassay.errors import UserError
from mixassay.tasks import Rows, Split, draw_rows, task


@task("toy_echo")
@dataclass(frozen=True, kw_only=True)
class Echo:
    version: ClassVar[int] = 3

    vocab_size: int = 8
    seq_len: int = 6

    def __post_init__(self) -> None:
        if self.seq_len < 2:
            raise UserError(f"seq_len must be at least 2, got {self.seq_len}")

    def rows(self, index: Tensor, *, seed: int | Tensor, split: Split) -> Rows:
        def draw(words: Tensor) -> Rows:
            tokens = draws.below(words, self.vocab_size)
            end = torch.full_like(tokens[:, :1], self.seq_len - 1)
            return Rows(tokens, end, tokens[:, :1])

        return draw_rows(draw, self.seq_len, index, seed=seed, split=split, stream=draws.stream("toy_echo"))
