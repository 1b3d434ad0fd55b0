"""Fuzzy in-context recall (MAD: Poli et al. 2024, arXiv 2403.17844): keys and values are motifs of several tokens.

    .  .  a c  x    b  y z    a  x z y    a c  x    b  y z
    .  .  key  v    k  value  k  value         x       y z    <- labels, before each token of a value shown before

`a` and `a c` are two keys. A model has to put tokens together before it can store or look up anything.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from mixassay import draws
from mixassay.errors import UserError
from mixassay.tasks import IGNORE, Rows, Split, draw_rows, task
from mixassay.tasks.in_context_recall import TrainOn
from mixassay.tasks.parts.repeats import first, previous


@task("fuzzy_recall")
@dataclass(frozen=True, kw_only=True)
class FuzzyRecall:
    """Pairs `key value`, as many as fit in seq_len, padded in front.

    A motif is a sequence of different ids, its length uniform, then every sequence of that length equally likely. Keys
    are up to key_len ids from the first half of all but the padding V-1, values up to value_len from the second half.
    In validation and test rows all keys have key_len ids. A row binds every key that it shows to one value.

    The last pair is one that stood in the row before, at a place uniform among its pairs; the others are independent.

    train_on: "all", every next token of training rows but padding is a label, as in MAD, while validation and test rows
    score answers alone; "answers": training rows as well.

    Chance is 1 over half of V, for who knows which ids are values; a value's second token cannot be its first.

    Rows: positions, labels and slices are [N, seq_len - 1]. Slice: "distance" (from the key's last showing to this one,
    in tokens; 0 where no answer is).

    >>> small = FuzzyRecall(vocab_size=8, seq_len=16, key_len=2, value_len=2)
    >>> rows = small.rows(torch.tensor([8]), seed=0, split="test")
    >>> rows.tokens.tolist()[0]
    [7, 2, 1, 4, 2, 1, 4, 1, 0, 4, 2, 1, 4, 2, 1, 4]
    >>> rows.labels.tolist()[0]
    [-100, -100, -100, -100, -100, 4, -100, -100, -100, -100, -100, 4, -100, -100, 4]
    """

    version: ClassVar[int] = 1

    vocab_size: int = 16
    seq_len: int = 128
    key_len: int = 3
    value_len: int = 3
    train_on: TrainOn = "all"

    def __post_init__(self) -> None:
        def need(right: bool, message: str) -> None:
            if not right:
                raise UserError(f"fuzzy_recall: {message}")

        longest = self.key_len + self.value_len
        need(self.key_len >= 1, f"key_len must be at least 1, got {self.key_len}")
        need(self.value_len >= 1, f"value_len must be at least 1, got {self.value_len}")
        least = 2 * max(self.key_len, self.value_len) + 1
        need(self.vocab_size >= least, f"motifs of this length need vocab_size >= {least}, got {self.vocab_size}")
        codes = (self.num_keys + 1) ** self.key_len
        need(codes <= 2**32, f"{self.num_keys} ids make too many keys of {self.key_len}: at most 2**32")
        need(self.seq_len >= 2 * longest, f"two pairs need seq_len >= {2 * longest}, got {self.seq_len}")
        need(self.train_on in ("all", "answers"), f'train_on must be "all" or "answers", got "{self.train_on}"')

    @property
    def num_keys(self) -> int:
        """Ids that keys are made of."""
        return (self.vocab_size - 1) // 2

    def rows(self, index: Tensor, *, seed: int | Tensor, split: Split) -> Rows:
        """Rows `index` int64 [N] of the split (see `Task`)."""
        names = (self.vocab_size, self.seq_len, self.key_len, self.value_len, self.train_on)
        stream = draws.stream("fuzzy_recall", self.version, *names)
        draw = partial(self._draw, split=split)
        return draw_rows(draw, sum(self._words(split)), index, seed=seed, split=split, stream=stream)

    def _shortest(self, split: Split) -> int:
        """Ids of the shortest key."""
        return 1 if split == "train" else self.key_len

    def _words(self, split: Split) -> list[int]:
        """Words a row for the lengths of keys and values, for their ids, and for where the last pair stood before."""
        P = self.seq_len // (self._shortest(split) + 1)  # pairs that are enough
        key = draws.words_for_distinct(self.key_len, self.num_keys)
        value = draws.words_for_distinct(self.value_len, self.vocab_size - 1 - self.num_keys)
        return [P, P, P * key, P * value, 1]

    def _draw(self, words: Tensor, split: Split) -> Rows:
        N, T, K, V = len(words), self.seq_len, self.num_keys, self.vocab_size - 1 - self.num_keys
        for_key_len, for_value_len, for_keys, for_values, for_last = torch.split(words, self._words(split), dim=1)
        P, shortest = for_key_len.shape[1], self._shortest(split)
        key_len = shortest + draws.below(for_key_len, self.key_len - shortest + 1)
        keys, values = (
            torch.unflatten(draws.distinct(torch.unflatten(some, 1, (P, -1)).flatten(0, 1), n, ids), 0, (N, P))
            for some, n, ids in ((for_keys, self.key_len, K), (for_values, self.value_len, V))
        )
        values = values + K
        within = torch.arange(self.key_len, device=words.device)
        code = ((keys + 1) * (K + 1) ** within).masked_fill(within >= key_len[..., None], 0).sum(2)
        same = first(code)  # the pair whose value this key has
        value_len = 1 + draws.below(for_value_len, self.value_len).gather(1, same)
        values = values.gather(1, same[..., None].expand_as(values))

        # Pair 0 is the one that comes back. It goes to a random place among those that fit, and to the end.
        size = key_len + value_len
        n = (size.cumsum(1) + size[:, :1] <= T).sum(1, keepdim=True)
        at, place = torch.arange(P + 1, device=words.device), for_last * n >> 32
        order = torch.where((at == place) | (at == n), 0, at + (at < place)).clamp(max=P - 1)
        shown = at <= n
        key_len, value_len, code, size = (x.gather(1, order) for x in (key_len, value_len, code, size))
        start = T + (size * shown).cumsum(1) - size - (size * shown).sum(1, keepdim=True)

        before = previous(code)
        known = shown & (before >= 0)
        distance = start - start.gather(1, before.clamp(min=0))
        tokens = words.new_full((N, T + 1), self.vocab_size - 1)  # the last one takes what has no place
        labels, since = torch.full_like(tokens, IGNORE), torch.zeros_like(tokens)
        for j in range(self.key_len):
            here = shown & (j < key_len)
            tokens.scatter_(1, (start + j).masked_fill(~here, T), keys[..., j].gather(1, order))
        for j in range(self.value_len):
            ids, here = values[..., j].gather(1, order), shown & (j < value_len)
            tokens.scatter_(1, (start + key_len + j).masked_fill(~here, T), ids)
            asked = (start + key_len + j - 1).masked_fill(~(here & known), T)
            labels.scatter_(1, asked, ids)
            since.scatter_(1, asked, distance)
        tokens, labels, since = tokens[:, :T], labels[:, : T - 1], since[:, : T - 1]
        if split == "train" and self.train_on == "all":
            labels = tokens[:, 1:].masked_fill(tokens[:, 1:] == self.vocab_size - 1, IGNORE)
        positions = torch.arange(T - 1, device=words.device).expand_as(labels)
        return Rows(tokens, positions.masked_fill(labels == IGNORE, 0), labels, {"distance": since})
