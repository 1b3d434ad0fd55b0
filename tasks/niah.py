"""Needles in a haystack, at token level (after RULER, Hsieh et al. 2024, arXiv 2404.06654).

A haystack of filler hides needles `key value`. At its end keys are asked for, and the model must predict their values:

    .  .  .  k1 v1 .  .  .  .  .  k2 v2 .  .  .  ASK k1
                                                     v1    <- label, at the key

With several values to a key they are asked for in the order in which they stand; all but the last are written out:

    .  k1 v1 .  .  .  .  k1 v2 .  .  .  k1 v3 .  ASK k1 v1 v2
                                                     v1 v2 v3

A needle's depth is the share of the filler that stands before it, its length that of the row. The ids of filler, keys
and values are apart, so that a row of any length asks the same of a model: train on short rows, test on long ones.
"""

from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from mixassay import draws
from mixassay.errors import UserError
from mixassay.tasks import Rows, Split, draw_rows, task
from mixassay.tasks.mqar import skip

ASK = 0
Filler = Literal["repeated", "random", "text", "needles"]

SUCCESSORS = 16
"""Of each id in the filler "text": it is one of them, each as likely."""


@task("niah")
@dataclass(frozen=True, kw_only=True)
class NIAH:
    """`keys` keys with `values` values each hidden in a row, `queries` of them asked for; the others are distractors.

    Ids: ASK 0, then num_filler ids of filler, num_keys of keys, num_values of values. A row's keys and values are
    drawn without replacement, each needle's place in the filler uniformly and on its own.

    filler: "repeated", the filler's ids in their order over and over; "random", uniform; "text", a chain in which each
    id has 16 successors, fixed once for all and drawn by Zipf's law, so that some ids are frequent and many bigrams
    never occur; "needles", nothing but further pairs, of keys that are not asked for.
    depth: where the needle stands that is asked for, in per cent of the filler; None: anywhere. It takes a single
    needle that is asked for.

    RULER's tasks, with tokens for its words: S-NIAH-1 is filler "repeated", S-NIAH-2 "text"; MK-1 keys=4; MK-2 filler
    "needles"; MV values=4; MQ keys=4, queries=4. Chance is 1/num_values, for who has found the needles 1 in their
    number.

    Rows: positions, labels and slices are [N, queries x values], question by question. Slices: "depth" (per cent,
    rounded down), "distance" (tokens from the needle's key to where its value is asked for).

    >>> small = NIAH(seq_len=16, keys=2, num_filler=4, num_keys=4, num_values=8)
    >>> rows = small.rows(torch.tensor([8]), seed=0, split="train")
    >>> rows.tokens.tolist()[0]
    [3, 2, 3, 1, 1, 1, 3, 8, 11, 4, 4, 7, 14, 1, 0, 7]
    >>> rows.positions.tolist()[0], rows.labels.tolist()[0], rows.slices["depth"].tolist()[0]
    ([15], [14], [90])
    """

    version: ClassVar[int] = 1

    seq_len: int = 256
    keys: int = 1
    values: int = 1
    queries: int = 1
    filler: Filler = "random"
    depth: float | None = None
    num_filler: int = 32
    num_keys: int = 64
    num_values: int = 64

    def __post_init__(self) -> None:
        def need(right: bool, message: str) -> None:
            if not right:
                raise UserError(f"niah: {message}")

        for name in ("keys", "values", "queries", "num_filler"):
            need(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        need(self.queries <= self.keys, f"queries={self.queries} is more than keys={self.keys}")
        need(self.filler in get_args(Filler), f'filler must be one of {get_args(Filler)}, got "{self.filler}"')
        least = self.keys + (self.filler == "needles")
        need(self.num_keys >= least, f"keys={self.keys} needs num_keys >= {least}, got {self.num_keys}")
        need(
            self.num_values >= self.needles,
            f"{self.needles} needles need num_values >= {self.needles}, got {self.num_values}",
        )
        need(self.vocab_size <= 2**31, f"vocab_size must be at most 2**31, got {self.vocab_size}")
        besides = 2 * self.needles + self.queries * (1 + self.values)
        need(
            besides <= self.seq_len <= 2**24,
            f"{self.needles} needles and {self.queries} questions need seq_len from {besides} to 2**24,"
            f" got {self.seq_len}",
        )
        odd = self.filler == "needles" and self._hay % 2
        need(not odd, f'filler "needles" comes in pairs, but seq_len={self.seq_len} leaves {self._hay} tokens for it')
        if self.depth is not None:
            need(0 <= self.depth <= 100, f"depth is per cent of the filler, 0 to 100, got {self.depth}")
            asked = self.queries * self.values
            need(asked == 1, f"depth places the one needle that is asked for, but queries x values is {asked}")

    @property
    def vocab_size(self) -> int:
        return 1 + self.num_filler + self.num_keys + self.num_values

    @property
    def needles(self) -> int:
        return self.keys * self.values

    def rows(self, index: Tensor, *, seed: int | Tensor, split: Split) -> Rows:
        """Rows `index` int64 [N] of the split (see `Task`)."""
        depth = None if self.depth is None else float(self.depth)
        counts = (self.seq_len, self.keys, self.values, self.queries, self.num_filler, self.num_keys, self.num_values)
        stream = draws.stream("niah", self.version, self.filler, repr(depth), *counts)
        return draw_rows(self._draw, sum(self._words), index, seed=seed, split=split, stream=stream)

    @property
    def _hay(self) -> int:
        """Tokens of filler in a row."""
        return self.seq_len - 2 * self.needles - self.queries * (1 + self.values)

    @property
    def _words(self) -> list[int]:
        """Words a row for its keys, values, places and filler."""
        keys = draws.words_for_distinct(self.keys, self.num_keys)
        values = draws.words_for_distinct(self.needles, self.num_values)
        return [keys, values, self.needles, 0 if self.filler == "repeated" else self._hay]

    def _draw(self, words: Tensor) -> Rows:
        N, K, V, Q = len(words), self.keys, self.values, self.queries
        for_keys, for_values, for_places, for_filler = torch.split(words, self._words, dim=1)
        keys = 1 + self.num_filler + draws.distinct(for_keys, K, self.num_keys)  # [N, K]
        first_value = 1 + self.num_filler + self.num_keys
        values = first_value + draws.distinct(for_values, K * V, self.num_values)  # [N, K V], a key's side by side
        places, before = self._places(for_places)

        hidden = torch.zeros(N, 2 * K * V + self._hay, dtype=torch.bool, device=words.device)
        hidden.scatter_(1, places, True).scatter_(1, places + 1, True)
        filler = torch.cat((self._filler(for_filler, keys), words.new_zeros(N, 1)), dim=1)  # one more, never seen
        hay = filler.gather(1, ((~hidden).cumsum(1) - 1).clamp(min=0))
        hay.scatter_(1, places, keys.repeat_interleave(V, dim=1)).scatter_(1, places + 1, values)

        answers = values[:, : Q * V].view(N, Q, V)
        asks = torch.cat((keys.new_full((N, Q, 1), ASK), keys[:, :Q, None], answers[..., :-1]), dim=2)
        tokens = torch.cat((hay, asks.flatten(1)), dim=1)
        question = torch.arange(Q * V, device=words.device)
        positions = (hay.shape[1] + 1 + question + question // V).expand(N, -1)
        slices = {
            "depth": before[:, : Q * V] * 100 // max(1, self._hay),
            "distance": positions - places[:, : Q * V],
        }
        return Rows(tokens, positions, values[:, : Q * V], slices)

    def _places(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Where each needle's key stands and how many tokens of filler are before it: [N, needles] twice."""
        unit = 2 if self.filler == "needles" else 1  # further pairs are not torn apart
        gaps = self._hay // unit + 1
        at = words * gaps  # the gap, and behind the point what orders needles that share it
        if self.depth is not None:
            at[:, 0] = (round(self.depth / 100 * (gaps - 1)) << 32) + words[:, 0]
        at = draws.sort(at.reshape(-1, self.values)).view_as(words)  # a key's needles from left to right
        earlier = (at[:, None] < at[:, :, None]).sum(2)
        before = (at >> 32) * unit
        return before + 2 * earlier, before

    def _filler(self, words: Tensor, keys: Tensor) -> Tensor:
        """int64 [N, hay]."""
        N, R, F = len(words), self._hay, self.num_filler
        if self.filler == "repeated":
            return (1 + torch.arange(R, device=words.device) % F).expand(N, R)
        if self.filler == "random":
            return 1 + draws.below(words, F)
        if self.filler == "text":
            return 1 + text(words, F)
        others = skip(draws.below(words[:, ::2], self.num_keys - self.keys), keys - 1 - F)
        pairs = torch.stack((others, self.num_keys + draws.below(words[:, 1::2], self.num_values)), dim=2)
        return 1 + F + pairs.flatten(1)


def text(words: Tensor, F: int) -> Tensor:
    """Ids below F, each one of the SUCCESSORS of the one before: words [N, T] -> int64 [N, T]."""
    if not words.shape[1]:
        return words
    follows, edges = chain(F, words.device)
    found = [torch.searchsorted(edges, words[:, 0].contiguous(), right=True)]
    for choice in draws.below(words[:, 1:], SUCCESSORS).T.contiguous():
        found.append(follows[found[-1] * SUCCESSORS + choice])
    return torch.stack(found, dim=1)


@cache
def chain(F: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The successors of each id, int64 [F x SUCCESSORS], and where Zipf's law over F ids parts words, int64 [F - 1].

    The same for every row and every run: they are the language, not its text.
    """
    weights = [2**64 // (rank + 1) for rank in range(F)]
    edges = torch.tensor([(below << 32) // sum(weights) for below in accumulate(weights)][:-1], dtype=torch.int64)
    drawn = draws.bits(0, torch.arange(F), draws.stream("niah", "text", F), SUCCESSORS)
    return torch.searchsorted(edges, drawn, right=True).flatten().to(device), edges.to(device)
