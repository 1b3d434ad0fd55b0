"""Segmented associative recall: the same keys are bound anew in every segment, and questions say which one is meant.

    TAG0 k1 v1 k2 v2 k1 v1 | TAG1 k2 v5 k3 v4 | TAG2 k1 v7 k2 v8 | CUR k3  PREV k2  TAG0 k1  .
                                                                       v4       v5       v1    <- labels, at the key

CUR asks for the binding of the last segment that bound the key, PREV for the one before it, TAG_j for that of segment
j. The value is never written behind a question. A memory that overwrites answers CUR and nothing else; one that keeps
every binding in one sum cannot tell them apart: it takes a memory cut where the segments are.
"""

from dataclasses import astuple, dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from mixassay import draws
from mixassay.errors import UserError
from mixassay.tasks import IGNORE, SPLITS, Rows, Split, draw_rows, task
from mixassay.tasks.streams.lengths import LEAST, Law, segment_lengths

PAD, CUR, PREV, NOISE, SPECIAL = range(5)
KINDS = ("CUR", "PREV", "TAG")
"""What the slice "kind" counts from 0."""


@task("segmented_recall")
@dataclass(frozen=True, kw_only=True)
class SegmentedRecall:
    """`segments` segments of key-value pairs, as many as fit, then the questions; what is left is padding.

    Ids: PAD 0, CUR 1, PREV 2, NOISE 3, then num_tags tags, num_keys keys, num_values values. A row has `pool` keys.
    Every segment draws a new value for each of them, never the last segment's, and runs through random permutations of
    the pool, so that a long segment repeats its bindings. Lengths of segments follow a law (`streams/lengths.py`), none
    has less than 4 pairs.

    cur, prev, tag: questions of each kind, in random order behind the segments. A key that can be asked is as likely
    as any other; the segments asked by tag are spread evenly. No question is asked twice; a row that cannot fill its
    places (few keys are bound twice, say) leaves padding there, without a label.
    inline: CUR questions behind every segment but the last, as of then. They are written into the memory, too.
    tags: "ordered" (TAG_j is the j-th tag, and can be counted) or "random". marker: whether segments open with theirs;
    without it there are no questions by tag, and a change shows in the re-binding alone.
    noise: NOISE tokens, each before a random pair.
    ramp: keys change to a new segment's values one by one within its first `ramp` pairs. recurring: 0, or the number
    of maps that recur, in random order, none twice in a row.

    Levels: chance is 1/num_values. Who finds the key but not the segment is right once in as many times as segments
    bind the key; who overwrites is right in CUR alone.

    Rows: positions, labels and slices are [N, questions], inline ones first. Slices: "kind" (see KINDS), "lag" (whole
    segments between the answer's and the last one written then), "order" (place among the questions of the row).

    >>> ids = {"num_tags": 3, "num_keys": 8, "num_values": 8}
    >>> small = SegmentedRecall(seq_len=40, segments=3, pool=4, cur=1, prev=1, tag=2, **ids)
    >>> rows = small.rows(torch.tensor([8]), seed=0, split="train")
    >>> rows.tokens[0, :20].tolist(), rows.tokens[0, 20:].tolist()  # doctest: +ELLIPSIS
    ([6, 11, 20, 13, 20, 9, 20, 8, 17, 9, 20, 4, 8, 19, 11, 18, 13, 15, 9, 19], [5, 9, 17, 8, 17, ... 8, 6, 11, 0])
    >>> rows.positions.tolist()[0], rows.labels.tolist()[0], rows.slices["kind"].tolist()[0]
    ([32, 34, 36, 38], [18, 19, 17, 20], [1, 2, 0, 2])
    """

    version: ClassVar[int] = 1

    seq_len: int = 256
    segments: int = 8
    pool: int = 16
    lengths: Law = "geometric"
    cur: int = 4
    prev: int = 4
    tag: int = 8
    inline: int = 0
    tags: Literal["ordered", "random"] = "random"
    marker: bool = True
    noise: int = 0
    ramp: int = 0
    recurring: int = 0
    num_tags: int = 32
    num_keys: int = 32
    num_values: int = 64

    def __post_init__(self) -> None:
        def need(right: bool, message: str) -> None:
            if not right:
                raise UserError(f"segmented_recall: {message}")

        for name in ("segments", "pool"):
            need(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("cur", "prev", "tag", "inline", "noise", "ramp"):
            need(getattr(self, name) >= 0, f"{name} must be at least 0, got {getattr(self, name)}")
        need(self.questions > 0, "cur, prev, tag and inline are all 0: nothing is asked")
        need(
            self.segments > 1 or self.cur + self.tag > 0,
            f"prev={self.prev} asks for a binding before the last one, and segments=1 has none",
        )
        need(self.num_keys >= self.pool, f"pool={self.pool} needs num_keys >= {self.pool}, got {self.num_keys}")
        need(
            max(self.cur, self.prev, self.inline) <= self.pool,
            f"cur, prev and inline ask for one key each of pool={self.pool}",
        )
        need(
            self.tag <= self.segments * self.pool,
            f"tag={self.tag} is more than segments x pool = {self.segments * self.pool}",
        )
        need(self.marker or not self.tag, f"tag={self.tag} questions need marker: true")
        if self.marker:
            need(
                self.num_tags >= self.segments,
                f"segments={self.segments} needs num_tags >= {self.segments}, got {self.num_tags}",
            )
        maps = max(2, self.recurring)
        need(self.num_values >= maps, f"num_values must be at least {maps}, got {self.num_values}")
        need(self.vocab_size <= 2**31, f"vocab_size must be at most 2**31, got {self.vocab_size}")
        need(self.recurring != 1, "recurring must be 0, or at least 2 maps, got 1")
        laws, tags = ("fixed", "geometric", "pareto"), ("ordered", "random")
        need(self.lengths in laws, f'lengths must be "fixed", "geometric" or "pareto", got "{self.lengths}"')
        need(self.tags in tags, f'tags must be "ordered" or "random", got "{self.tags}"')
        least = self._besides + 2 * LEAST * self.segments
        need(
            self.seq_len >= least,
            f"segments={self.segments} and these questions need seq_len >= {least}, got {self.seq_len}",
        )

    @property
    def vocab_size(self) -> int:
        return SPECIAL + self.num_tags + self.num_keys + self.num_values

    @property
    def questions(self) -> int:
        """Places for questions behind the segments and in between."""
        return self.cur + self.prev + self.tag + self.inline * (self.segments - 1)

    @property
    def pairs(self) -> int:
        """Key-value pairs of a row."""
        return (self.seq_len - self._besides) // 2

    @property
    def _besides(self) -> int:
        """Tokens that are no pairs: markers, noise, questions."""
        return self.marker * self.segments + self.noise + 2 * self.questions

    def rows(self, index: Tensor, *, seed: int | Tensor, split: Split) -> Rows:
        """Rows `index` int64 [N] of the split (see `Task`)."""
        return draw_rows(self._rows, sum(self._words), index, seed=seed, split=split, stream=self._stream)

    def changes(self, index: Tensor, *, seed: int | Tensor, split: Split) -> Tensor:
        """bool [N, seq_len]: the first token of every segment of these rows, and of the questions behind them.

        What an oracle cuts at, and what found boundaries are held against.
        """
        drawn = draws.bits(seed, index + (SPLITS.index(split) << 61), self._stream, sum(self._words))
        layout = self._layout(*self._parts(drawn)[:2])
        found = torch.zeros(len(index), self.seq_len, dtype=torch.bool, device=index.device)
        found.scatter_(1, layout.openings, True)
        found[:, self._end : self._end + 1] = self.cur + self.prev + self.tag > 0
        return found

    @property
    def openings(self) -> "Openings | None":
        """What finds `changes` in the tokens; None where they do not show it: no markers, or inline questions."""
        return Openings(SPECIAL, SPECIAL + self.num_tags) if self.marker and not self.inline else None

    def stale(self, rows: Rows, answers: Tensor) -> Tensor:
        """Wrong answers that are the key's value elsewhere in the row: answers int64 [N, Q] -> bool [N, Q].

        Their share of all scored questions is the stale rate: the key was found, its segment was not.
        """
        key = rows.tokens.gather(1, rows.positions)
        follows = (rows.tokens[:, None, :-1] == key[..., None]) & (rows.tokens[:, None, 1:] == answers[..., None])
        wrong = (answers != rows.labels) & (rows.labels != IGNORE)
        return wrong & follows.any(2) & (answers >= self._first_value)

    @property
    def _first_value(self) -> int:
        return SPECIAL + self.num_tags + self.num_keys

    @property
    def _stream(self) -> int:
        return draws.stream("segmented_recall", self.version, *astuple(self))

    @property
    def _end(self) -> int:
        """Where the questions behind the segments begin."""
        return self._besides + 2 * self.pairs - 2 * (self.cur + self.prev + self.tag)

    @property
    def _words(self) -> list[int]:
        """Words a row for lengths, noise, pool, tags, order of maps, values, permutations, ramp, and for which keys are
        asked inline, by CUR, PREV and TAG, which segments by tag, and in which order."""
        J, P = self.segments, self.pool
        values = J * P if not self.recurring else P * draws.words_for_distinct(self.recurring, self.num_values)
        return [
            2 * J,
            self.noise,
            draws.words_for_distinct(P, self.num_keys),
            draws.words_for_distinct(J, self.num_tags) if self.marker and self.tags == "random" else 0,
            J if self.recurring else 0,
            values,
            self._rounds * P,
            J * P if self.ramp else 0,
            (J - 1) * P if self.inline else 0,
            P if self.cur else 0,
            P if self.prev else 0,
            J * P if self.tag else 0,
            -(-self.tag // J) * J,
            self.cur + self.prev + self.tag,
        ]

    @property
    def _rounds(self) -> int:
        """Permutations of the pool that are enough for all segments, each of which begins a new one."""
        return self.pairs // self.pool + self.segments

    def _parts(self, words: Tensor) -> tuple[Tensor, ...]:
        return torch.split(words, self._words, dim=1)

    def _layout(self, for_lengths: Tensor, for_noise: Tensor) -> "Layout":
        J, G, mark, inline = self.segments, self.pairs, int(self.marker), 2 * self.inline
        lengths = segment_lengths(for_lengths, J, G, self.lengths)
        pair, number = torch.arange(G, device=lengths.device), torch.arange(J, device=lengths.device)
        first = lengths.cumsum(1) - lengths
        segment = (pair[:, None] >= lengths.cumsum(1)[:, None]).sum(2)
        noises = torch.zeros_like(segment)  # right before each pair
        noises.scatter_add_(1, draws.below(for_noise, G), torch.ones_like(for_noise))
        upto = noises.cumsum(1)
        openings = (mark + inline) * number + 2 * first + (upto - noises).gather(1, first)
        pairs = mark + (mark + inline) * segment + 2 * pair + upto
        return Layout(lengths, segment, pair - first.gather(1, segment), openings, pairs)

    def _rows(self, words: Tensor) -> Rows:
        parts = self._parts(words)
        layout = self._layout(*parts[:2])
        for_pool, for_tags, for_order, for_values, for_rounds, for_ramp = parts[2:8]
        N, J, P, device = len(words), self.segments, self.pool, words.device
        pool = SPECIAL + self.num_tags + draws.distinct(for_pool, P, self.num_keys)  # [N, P]
        if for_tags.shape[1]:
            tags = SPECIAL + draws.distinct(for_tags, J, self.num_tags)
        else:
            tags = SPECIAL + torch.arange(J, device=device).expand(N, J)
        values = self._first_value + self._maps(for_values, for_order)  # [N, J, P]

        rounds = -(-layout.lengths // P)
        at = (rounds.cumsum(1) - rounds).gather(1, layout.segment) * P + layout.offset
        key = draws.ranked(for_rounds.reshape(-1, P))[1].view(N, -1).gather(1, at)  # [N, pairs], places in the pool
        here = layout.segment * P + key
        late = torch.zeros_like(here)  # 1: still bound as in the segment before
        if self.ramp:
            late = (layout.offset < draws.below(for_ramp, self.ramp + 1).gather(1, here)).long()
            late = late * (layout.segment > 0)
        tokens = words.new_full((N, self.seq_len), PAD)
        tokens[:, : self._end] = NOISE
        if self.marker:
            tokens.scatter_(1, layout.openings, tags)
        tokens.scatter_(1, layout.pairs, pool.gather(1, key))
        tokens.scatter_(1, layout.pairs + 1, values.flatten(1).gather(1, here - late * P))

        spare = J * P  # own: the segment bound the key itself; late: it wrote the binding of the one before
        own, old = (
            torch.zeros(N, spare + 1, dtype=torch.bool, device=device)
            .scatter_(1, here.masked_fill(late != kind, spare), True)[:, :spare]
            .view(N, J, P)
            for kind in (0, 1)
        )
        asked = self._asked(own, old, parts[8:])
        positions = self._places(layout, asked)
        which = torch.tensor([CUR, PREV, 0], device=device)[asked.kind]
        asks = torch.where(asked.kind == 2, tags.gather(1, asked.segment), which)
        tokens.scatter_(1, positions - 1, torch.where(asked.can, asks, PAD))
        tokens.scatter_(1, positions, torch.where(asked.can, pool.gather(1, asked.key), PAD))
        labels = values.flatten(1).gather(1, asked.segment * P + asked.key)
        slices = {"kind": asked.kind, "lag": asked.now - asked.segment}
        slices["order"] = torch.arange(self.questions, device=device).expand(N, -1)
        return Rows(
            tokens,
            positions.masked_fill(~asked.can, 0),
            labels.masked_fill(~asked.can, IGNORE),
            {name: x.masked_fill(~asked.can, 0) for name, x in slices.items()},
        )

    def _maps(self, for_values: Tensor, for_order: Tensor) -> Tensor:
        """The value of each key of the pool in each segment, int64 [N, J, P] from 0."""
        N, J, P, R, V = len(for_values), self.segments, self.pool, self.recurring, self.num_values
        if not R:
            words = for_values.view(N, J, P)
            step = 1 + draws.below(words, V - 1)  # to any value but the last one
            step[:, 0] = draws.below(words[:, 0], V)
            return step.cumsum(1) % V
        several = draws.distinct(for_values.reshape(N * P, -1), R, V).view(N, P, R)
        step = 1 + draws.below(for_order, R - 1)
        step[:, 0] = 0
        which = step.cumsum(1) % R  # [N, J]
        return several.gather(2, which[:, None].expand(N, P, J)).transpose(1, 2)

    def _asked(self, own: Tensor, old: Tensor, parts: tuple[Tensor, ...]) -> "Asked":
        """The questions, from who bound what: own and old, bool [N, J, P]."""
        for_inline, for_cur, for_prev, for_tag, for_segments, for_order = parts
        N, J, P = own.shape
        number = torch.arange(J, device=own.device)[:, None]
        latest = torch.where(own, number, torch.where(old, number - 1, -1)).cummax(1).values  # as of each segment's end
        bound = own | torch.cat((old[:, 1:], torch.zeros_like(old[:, :1])), dim=1)
        before = torch.where(bound & (number < latest[:, -1:]), number, -1).amax(1)
        found: list[Asked] = []
        if self.inline and J > 1:
            then = latest[:, :-1].flatten(0, 1)  # [N (J - 1), P]
            key, can = some(for_inline.reshape(-1, P), then >= 0, self.inline)
            shape = (N, (J - 1) * self.inline)
            now = number[:-1, 0].repeat_interleave(self.inline).expand(shape)
            found.append(Asked.of(0, key.reshape(shape), then.gather(1, key).reshape(shape), can.reshape(shape), now))
        last = torch.full((1, 1), J - 1, device=own.device)
        behind: list[Asked] = []
        for kind, n, words, answer in ((0, self.cur, for_cur, latest[:, -1]), (1, self.prev, for_prev, before)):
            if n:
                key, can = some(words, answer >= 0, n)
                behind.append(Asked.of(kind, key, answer.gather(1, key), can, last.expand(N, n)))
        if self.tag:
            segment = draws.ranked(for_segments.reshape(-1, J))[1].view(N, -1)[:, : self.tag]
            keys, can = some(for_tag.reshape(-1, P), own.reshape(-1, P), P)  # of each segment, in random order
            at = segment * P + torch.arange(self.tag, device=own.device) // J
            keys, can = keys.view(N, -1).gather(1, at), can.view(N, -1).gather(1, at)
            behind.append(Asked.of(2, keys, segment, can, last.expand(N, self.tag)))
        if behind:
            order = draws.ranked(for_order)[1]
            found.append(Asked(*(torch.cat(x, dim=1).gather(1, order) for x in zip(*behind, strict=True))))
        return Asked(*(torch.cat(x, dim=1) for x in zip(*found, strict=True)))

    def _places(self, layout: "Layout", asked: "Asked") -> Tensor:
        """Where the keys are asked, int64 [N, questions]."""
        N, n, inline = len(asked.key), self.questions, self.inline
        device = asked.key.device
        within = 2 * torch.arange(inline, device=device) - 2 * inline + 1
        between = (layout.openings[:, 1:, None] + within).flatten(1)
        behind = self._end + 1 + 2 * torch.arange(n - between.shape[1], device=device)
        return torch.cat((between, behind.expand(N, -1)), dim=1)


@dataclass(frozen=True)
class Openings:
    """The changes of rows from their tokens alone, int64 [N, T] -> bool [N, T]: a tag that the row has not had before,
    and the first question. Tags are the ids from `first` up to `end`."""

    first: int
    end: int

    def __call__(self, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        seen = ((tokens[:, :, None] == tokens[:, None]) & (at < at[:, None])).any(2)
        tag = (tokens >= self.first) & (tokens < self.end)
        asks = (tokens == CUR) | (tokens == PREV) | (tag & seen)
        return (tag & ~seen) | (asks & (asks.cumsum(1) == 1))


class Layout(NamedTuple):
    lengths: Tensor  # [N, J], pairs of each segment
    segment: Tensor  # [N, pairs], of each pair
    offset: Tensor  # [N, pairs], its number within the segment
    openings: Tensor  # [N, J], where each segment begins
    pairs: Tensor  # [N, pairs], where each key stands


class Asked(NamedTuple):
    """Questions, all int64 [N, n] but `can`."""

    kind: Tensor
    key: Tensor  # place in the pool
    segment: Tensor  # whose binding is the answer
    can: Tensor  # bool, False for a place that stays empty
    now: Tensor  # the last segment written

    @classmethod
    def of(cls, kind: int, key: Tensor, segment: Tensor, can: Tensor, now: Tensor) -> "Asked":
        return cls(torch.full_like(key, kind), key, segment.clamp(min=0), can, now)


def some(words: Tensor, may: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """n different places [N, n] in random order, those first that `may` [N, P] allows, and whether it does."""
    place = draws.ranked(words >> 1 | (~may).long() << 31)[1][:, :n]
    return place, may.gather(1, place)
