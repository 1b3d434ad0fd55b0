"""Noisy in-context recall (MAD: Poli et al. 2024, arXiv 2403.17844): recall among pairs that mean nothing.

    k1 v1 x4 x1 k2 v2 x2 x2 k1 v1 x3 x4 k2 v2
                            v1          v2       <- labels, at a key that has been shown before

Noise x has ids of its own, so that it can be told from keys at sight; a mixer must not let it crowd its memory.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mixassay import draws
from mixassay.errors import UserError
from mixassay.tasks import Rows, Split, draw_rows, task
from mixassay.tasks.in_context_recall import TrainOn, bound, check_recall, recalled


@task("noisy_recall")
@dataclass(frozen=True, kw_only=True)
class NoisyRecall:
    """`in_context_recall` of which each pair is, with probability `noise`, two uniform noise ids instead.

    The last num_noise ids are noise; keys are the first half of the others, values the second. One pair, drawn
    uniformly from all but the last, and the last itself are never noise.

    Chance is 2 / (V - num_noise). Rows as in `in_context_recall`.

    >>> small = NoisyRecall(vocab_size=8, num_noise=2, noise=0.4, seq_len=12)
    >>> rows = small.rows(torch.tensor([8]), seed=0, split="test")
    >>> rows.tokens.tolist()[0]
    [7, 7, 7, 6, 0, 5, 2, 5, 7, 6, 0, 5]
    >>> rows.positions.tolist()[0], rows.labels.tolist()[0]
    ([0, 0, 0, 0, 10], [-100, -100, -100, -100, 5])
    """

    version: ClassVar[int] = 1

    vocab_size: int = 32
    num_noise: int = 16
    noise: float = 0.2
    seq_len: int = 128
    train_on: TrainOn = "all"

    def __post_init__(self) -> None:
        if self.num_noise < 1:
            raise UserError(f"noisy_recall: num_noise must be at least 1, got {self.num_noise}")
        if not 0 <= self.noise <= 1:
            raise UserError(f"noisy_recall: noise is a probability, 0 to 1, got {self.noise}")
        check_recall("noisy_recall, without noise", self.vocab_size - self.num_noise, self.seq_len, self.train_on)

    def rows(self, index: Tensor, *, seed: int | Tensor, split: Split) -> Rows:
        """Rows `index` int64 [N] of the split (see `Task`)."""
        names = (self.vocab_size, self.num_noise, repr(float(self.noise)), self.seq_len, self.train_on)
        stream = draws.stream("noisy_recall", self.version, *names)
        P, V = self.seq_len // 2, self.vocab_size - self.num_noise
        sizes = [P, V // 2, P, 2 * P]
        every = split == "train" and self.train_on == "all"

        def draw(words: Tensor) -> Rows:
            for_keys, for_values, for_noise, for_ids = torch.split(words, sizes, dim=1)
            noisy = for_noise < round(self.noise * 2**32)
            noisy[:, -1] = False
            noisy.scatter_(1, draws.below(for_noise[:, -1:], P - 1), False)
            pairs, number = bound(for_keys, for_values, V, noisy)
            ids = V + draws.below(for_ids, self.num_noise).view_as(pairs)
            return recalled(torch.where(noisy[..., None], ids, pairs), number, every)

        return draw_rows(draw, sum(sizes), index, seed=seed, split=split, stream=stream)
