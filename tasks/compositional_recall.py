"""Compositional recall ("compositional MQAR" of Zoology): the value belongs to two keys together, to neither alone.

    a x v1  b y v2  a y v3  b x v4 | .  .  .  a y .  .  .  .  b y .  a x .  b x .
                                                v3              v2     v1     v4    <- labels, at the second key

Every first key stands with every second key, so that half a key leaves as many values as there are other halves.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mixassay import draws
from mixassay.errors import UserError
from mixassay.tasks import Rows, Split, draw_rows, task
from mixassay.tasks.mqar import Filler, check_slots, fill, first_slots


@task("compositional_recall")
@dataclass(frozen=True, kw_only=True)
class CompositionalRecall:
    """grid x grid triples `first second value` in random order, then every pair of keys once, in slots of three tokens.

    The vocabulary is in thirds, W = V // 3: first keys 1 .. W-1, second keys W .. 2W-1, values 2W .. V-1, all drawn
    without replacement. Queried slots are drawn as in `mqar`, with weight (s + 1)^(power_a - 1), s = 0, 1, ... from the
    end of the context; filler likewise ("random_no_keys": none of the row's keys, first or second).

    Chance is 3/V blind, 1/grid for who uses one half of the key.

    Rows: positions, labels and the slice "distance" (from the second key of the triple to that of the query) are
    [N, grid^2], in the order of the triples.

    >>> small = CompositionalRecall(vocab_size=15, seq_len=24, filler="zero")
    >>> rows = small.rows(torch.tensor([8]), seed=0, split="train")
    >>> rows.tokens.tolist()[0]
    [1, 8, 14, 1, 6, 12, 4, 6, 13, 4, 8, 11, 4, 6, 0, 1, 8, 0, 4, 8, 0, 1, 6, 0]
    >>> rows.positions.tolist()[0], rows.labels.tolist()[0]
    ([16, 22, 13, 19], [14, 12, 13, 11])
    """

    version: ClassVar[int] = 1

    vocab_size: int = 8192
    seq_len: int = 256
    grid: int = 2
    power_a: float = 0.01
    filler: Filler = "random"

    def __post_init__(self) -> None:
        g, n, V = self.grid, self.grid**2, self.vocab_size

        def need(right: bool, message: str) -> None:
            if not right:
                raise UserError(f"compositional_recall: {message}")

        need(g >= 1, f"grid must be at least 1, got {g}")
        need(self.seq_len >= 6 * n, f"grid={g} needs seq_len >= {6 * n}, got {self.seq_len}")
        least = 3 * max(g + 1, n)
        need(least <= V <= 2**31, f"grid={g} needs vocab_size >= {least} and <= 2**31, got {V}")
        check_slots("compositional_recall", self.slots, self.power_a, self.filler)

    @property
    def slots(self) -> int:
        """Three-token slots behind the context; what is left of the row is filler."""
        return (self.seq_len - 3 * self.grid**2) // 3

    def rows(self, index: Tensor, *, seed: int | Tensor, split: Split) -> Rows:
        """Rows `index` int64 [N] of the split (see `Task`)."""
        names = (self.vocab_size, self.seq_len, self.grid, float(self.power_a), self.filler)
        stream = draws.stream("compositional_recall", self.version, *names)
        return draw_rows(self._draw, sum(self._words), index, seed=seed, split=split, stream=stream)

    @property
    def _words(self) -> list[int]:
        """Words a row for its first keys, second keys, values, the order of the triples, slots and filler."""
        g, n, W = self.grid, self.grid**2, self.vocab_size // 3
        halves = [draws.words_for_distinct(g, W - 1), draws.words_for_distinct(g, W)]
        values = draws.words_for_distinct(n, self.vocab_size - 2 * W)
        filler = 0 if self.filler == "zero" else self.seq_len - 3 * n
        return [*halves, values, n, self.slots, filler]

    def _draw(self, words: Tensor) -> Rows:
        g, n, V, W = self.grid, self.grid**2, self.vocab_size, self.vocab_size // 3
        for_first, for_second, for_values, for_order, for_slots, for_filler = torch.split(words, self._words, dim=1)
        first = 1 + draws.distinct(for_first, g, W - 1)
        second = W + draws.distinct(for_second, g, W)
        values = 2 * W + draws.distinct(for_values, n, V - 2 * W)
        order = draws.ranked(for_order)[1]
        a, b = first.gather(1, order // g), second.gather(1, order % g)
        context = torch.stack((a, b, values), dim=2).flatten(1)
        behind = fill(self.filler, for_filler, self.seq_len - 3 * n, V, torch.cat((first, second), dim=1))
        tokens = torch.cat((context, behind), dim=1)
        positions = 3 * n + 3 * first_slots(for_slots, n, self.power_a) + 1
        tokens.scatter_(1, positions - 1, a).scatter_(1, positions, b)
        distance = positions - torch.arange(1, 3 * n, 3, device=words.device)
        return Rows(tokens, positions, values, {"distance": distance})
