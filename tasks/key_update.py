"""Key update (Zoology's "forgetting MQAR"): some keys are bound twice, and the last value counts.

    k1 v1 k2 v2 k3 v3 k2 v4 | .  .  k3 .  .  .  k2 .  k1 .
                                    v3          v4    v1    <- labels, at the query's own position

A memory that only adds keeps v2 and v4 under k2, and cannot tell which came last; the delta rule overwrites. What has
been updated and what has not is asked for apart (`ask`), since the mean of the two says little about either.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from mixassay import draws
from mixassay.errors import UserError
from mixassay.tasks import Rows, Split, draw_rows, task
from mixassay.tasks.mqar import Filler, check_slots, fill, first_slots

Ask = Literal["all", "updated", "untouched"]


@task("key_update")
@dataclass(frozen=True, kw_only=True)
class KeyUpdate:
    """num_kv pairs, then num_updates of their keys again with new values, then every key once, as in `mqar`.

    Ids, filler and the weights of the queries' slots are those of `mqar`. All num_kv + num_updates values of a row are
    different, so that a stale answer can be told from any other error. The updated keys are a uniform subset, in random
    order.

    ask: which keys' answers are labels: "all", "updated" or "untouched". Rows are the same but for that; as evaluation
    cells of one run the two are reported apart: `eval_cells: [{ask: updated}, {ask: untouched}]`.

    Chance is 2/V blind; who knows the key but not the order is right in every second updated one.

    Rows: positions, labels and slices are [N, asked], in the order of the pairs ("updated": in that of the updates).
    Slices: "updated" (0 or 1), "distance" (from the pair that counts to the query, in tokens).

    >>> small = KeyUpdate(vocab_size=16, seq_len=16, num_kv=2, num_updates=1, filler="zero")
    >>> rows = small.rows(torch.tensor([8]), seed=0, split="train")
    >>> rows.tokens.tolist()[0]
    [4, 12, 1, 11, 1, 13, 4, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    >>> rows.positions.tolist()[0], rows.labels.tolist()[0], rows.slices["updated"].tolist()[0]
    ([6, 10], [12, 13], [0, 1])
    """

    version: ClassVar[int] = 1

    vocab_size: int = 8192
    seq_len: int = 256
    num_kv: int = 16
    num_updates: int = 4
    power_a: float = 0.01
    filler: Filler = "random"
    ask: Ask = "all"

    def __post_init__(self) -> None:
        n, u, V = self.num_kv, self.num_updates, self.vocab_size

        def need(right: bool, message: str) -> None:
            if not right:
                raise UserError(f"key_update: {message}")

        need(1 <= u <= n, f"num_updates must be from 1 to num_kv={n}, got {u}")
        need(self.seq_len % 2 == 0, f"seq_len must be even (pairs and slots are two tokens), got {self.seq_len}")
        least = 4 * n + 2 * u
        need(self.seq_len >= least, f"num_kv={n} and num_updates={u} need seq_len >= {least}, got {self.seq_len}")
        need(2 * (n + u) <= V <= 2**31, f"num_kv={n} and num_updates={u} need vocab_size >= {2 * (n + u)}, got {V}")
        need(self.ask in get_args(Ask), f'ask must be "all", "updated" or "untouched", got "{self.ask}"')
        need(self.ask != "untouched" or u < n, f"num_updates={u} leaves none of num_kv={n} keys untouched")
        check_slots("key_update", self.slots, self.power_a, self.filler)

    @property
    def slots(self) -> int:
        """Two-token slots behind the context."""
        return self.seq_len // 2 - self.num_kv - self.num_updates

    def rows(self, index: Tensor, *, seed: int | Tensor, split: Split) -> Rows:
        """Rows `index` int64 [N] of the split (see `Task`)."""
        counts = (self.vocab_size, self.seq_len, self.num_kv, self.num_updates)
        stream = draws.stream("key_update", self.version, *counts, float(self.power_a), self.filler)
        return draw_rows(self._draw, sum(self._words), index, seed=seed, split=split, stream=stream)

    @property
    def _words(self) -> list[int]:
        """Words a row for its keys, values, updated keys, slots and filler."""
        n, u, V = self.num_kv, self.num_updates, self.vocab_size
        keys, values = draws.words_for_distinct(n, V // 2 - 1), draws.words_for_distinct(n + u, V - V // 2)
        filler = 0 if self.filler == "zero" else 2 * self.slots
        return [keys, values, draws.words_for_distinct(u, n), self.slots, filler]

    def _draw(self, words: Tensor) -> Rows:
        n, u, V = self.num_kv, self.num_updates, self.vocab_size
        for_keys, for_values, for_updates, for_slots, for_filler = torch.split(words, self._words, dim=1)
        keys = 1 + draws.distinct(for_keys, n, V // 2 - 1)
        values = V // 2 + draws.distinct(for_values, n + u, V - V // 2)
        updated = draws.distinct(for_updates, u, n)  # [N, u], numbers of keys
        context = torch.stack((torch.cat((keys, keys.gather(1, updated)), dim=1), values), dim=2).flatten(1)
        positions = context.shape[1] + 2 * first_slots(for_slots, n, self.power_a)
        tokens = torch.cat((context, fill(self.filler, for_filler, 2 * self.slots, V, keys)), dim=1)
        tokens.scatter_(1, positions, keys)

        pair = torch.arange(n, device=words.device).expand(len(words), -1)
        counts = pair.scatter(1, updated, n + torch.arange(u, device=words.device).expand_as(updated))
        which = pair
        if self.ask == "updated":
            which = updated
        if self.ask == "untouched":
            which = draws.ranked((counts >= n).long())[1][:, : n - u]
        counts, positions = counts.gather(1, which), positions.gather(1, which)
        slices = {"updated": (counts >= n).long(), "distance": positions - 2 * counts}
        return Rows(tokens, positions, values.gather(1, counts), slices)
