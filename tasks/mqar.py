"""Multi-query associative recall (Arora et al. 2023, "Zoology", arXiv 2312.04927).

A row opens with its context, n pairs `key value key value ...`, no key or value twice. Behind it stand two-token
slots. Each key comes back once, as the first token of some slot, and the model must predict its value there:

    k1 v1 k2 v2 | .  .  k2 .  k1 .  .  .
                        v2    v1            <- labels, at the query's own position

The value is never written behind its query, so that no query helps a later one.
"""

from dataclasses import dataclass
from functools import cache
from math import log2
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from mixassay import draws
from mixassay.errors import UserError
from mixassay.tasks import Rows, Split, draw_rows, task

Filler = Literal["zero", "random", "random_no_keys"]


@task("mqar")
@dataclass(frozen=True, kw_only=True)
class MQAR:
    """Multi-query associative recall, with the distribution of Zoology's generator.

    Keys are uniform in 1 .. V/2-1, values in V/2 .. V-1, without replacement. Queried slots are drawn without
    replacement with weight (s + 1)^(power_a - 1), s = 0, 1, ... from the end of the context; the i-th slot drawn goes
    to the i-th key. When 4 num_kv = seq_len every slot is taken and power_a shapes only the order of the queries.

    filler: what stands in all other places behind the context. "zero" is id 0, which is never a key (Zoology's ICLR
    figure). "random", the default of Zoology's class, is uniform over the whole vocabulary and so now and then a key
    of the row (0.5 times a row at seq_len 256, num_kv 64). "random_no_keys" is uniform over all ids but those.

    Rows: positions, labels and the slice "distance" (from key to query, in tokens) are [N, num_kv] in the order of
    the keys in the context.

    >>> rows = MQAR(vocab_size=16, seq_len=12, num_kv=2, filler="zero").rows(torch.tensor([8]), seed=0, split="train")
    >>> rows.tokens.tolist()[0]
    [2, 13, 5, 14, 0, 0, 5, 0, 0, 0, 2, 0]
    >>> rows.positions.tolist()[0], rows.labels.tolist()[0], rows.slices["distance"].tolist()[0]
    ([10, 6], [13, 14], [10, 4])
    """

    version: ClassVar[int] = 1

    vocab_size: int = 8192
    seq_len: int = 256
    num_kv: int = 16
    power_a: float = 0.01
    filler: Filler = "random"

    def __post_init__(self) -> None:
        n, L, V = self.num_kv, self.seq_len, self.vocab_size
        if n < 1:
            raise UserError(f"mqar: num_kv must be at least 1, got {n}")
        if L % 2:
            raise UserError(f"mqar: seq_len must be even (pairs and slots are two tokens), got {L}")
        if 4 * n > L:
            raise UserError(f"mqar: num_kv={n} needs seq_len >= {4 * n}, got {L}")
        if not 2 * n + 2 <= V <= 2**31:
            raise UserError(f"mqar: num_kv={n} needs vocab_size >= {2 * n + 2} and <= 2**31, got {V}")
        check_slots("mqar", self.slots, self.power_a, self.filler)

    @property
    def slots(self) -> int:
        """Two-token slots behind the context."""
        return (self.seq_len - 2 * self.num_kv) // 2

    def rows(self, index: Tensor, *, seed: int | Tensor, split: Split) -> Rows:
        """Rows `index` int64 [N] of the split (see `Task`)."""
        names = (self.vocab_size, self.seq_len, self.num_kv, float(self.power_a), self.filler)
        stream = draws.stream("mqar", self.version, *names)
        return draw_rows(self._draw, sum(self._words), index, seed=seed, split=split, stream=stream)

    @property
    def _words(self) -> list[int]:
        """Words a row for its keys, values, slots and filler."""
        n, half = self.num_kv, self.vocab_size // 2
        filler = 0 if self.filler == "zero" else 2 * self.slots
        keys, values = draws.words_for_distinct(n, half - 1), draws.words_for_distinct(n, self.vocab_size - half)
        return [keys, values, self.slots, filler]

    def _draw(self, words: Tensor) -> Rows:
        n, V, context = self.num_kv, self.vocab_size, 2 * self.num_kv
        for_keys, for_values, for_slots, for_filler = torch.split(words, self._words, dim=1)
        keys = 1 + draws.distinct(for_keys, n, V // 2 - 1)  # [N, n]
        values = V // 2 + draws.distinct(for_values, n, V - V // 2)
        positions = context + 2 * first_slots(for_slots, n, self.power_a)

        pairs = torch.stack((keys, values), dim=2).flatten(1)
        tokens = torch.cat((pairs, fill(self.filler, for_filler, self.seq_len - context, V, keys)), dim=1)
        tokens.scatter_(1, positions, keys)
        distance = positions - torch.arange(0, context, 2, device=words.device)
        return Rows(tokens, positions, values, {"distance": distance})


def check_slots(name: str, slots: int, power_a: float, filler: str) -> None:
    """Raises `UserError` for what cannot stand behind a context."""
    if not abs(1 - power_a) * log2(slots) <= 16:  # else the weights outgrow their fixed point
        raise UserError(f"{name}: power_a={power_a} is too far from 1 for the {slots} slots of this row")
    if filler not in get_args(Filler):
        raise UserError(f'{name}: filler must be "zero", "random" or "random_no_keys", got "{filler}"')


def fill(kind: Filler, words: Tensor, width: int, V: int, keys: Tensor) -> Tensor:
    """Filler [N, width] for a row with these keys [N, n], from as many words (none for "zero")."""
    if kind == "zero":
        return keys.new_zeros(len(keys), width)
    if kind == "random":
        return draws.below(words, V)
    return skip(draws.below(words, V - keys.shape[1]), keys)


def first_slots(words: Tensor, n: int, power_a: float) -> Tensor:
    """n of the S slots in the order of a weighted draw without replacement, words [N, S] -> [N, n].

    Each slot waits an exponential time divided by its weight; the first n to arrive are the draw (Efraimidis and
    Spirakis 2006; the same as Gumbel top-k).
    """
    return draws.race(words, handicaps(words.shape[1], power_a, words.device), n)


@cache
def handicaps(S: int, power_a: float, device: torch.device) -> Tensor:
    """1 / weight of every slot, (s + 1)^(1 - power_a), in integers up to 2^27: int64 [S]."""
    inverse = [(s + 1) ** (1 - power_a) for s in range(S)]
    return torch.tensor([round(x / max(inverse) * 2**27) for x in inverse], device=device)


def skip(draw: Tensor, taken: Tensor) -> Tensor:
    """Uniform ids but those taken: [N, F] drawn from the first (limit - n) ids, taken [N, n] -> [N, F].

    The j-th id that is not taken is j + (the number of taken ids t with t - (their rank) <= j).
    """
    gaps = draws.sort(taken) - torch.arange(taken.shape[1], device=taken.device)
    return draw + torch.searchsorted(gaps, draw, right=True)
