"""A stream of writes to an associative memory: segmented recall as vectors, with a share of the segment in each.

A write binds a key to a value; every segment binds all keys anew. As vectors, with tags that are the segment's own,

    k_t = [sqrt(a) tag ; sqrt(1 - a) key]        v_t = [sqrt(b) tag' ; sqrt(1 - b) onehot(value)]

A question knows the key, [0 ; key], and the slot to read; its answer is the largest of the one-hot part. With a = b = 0
there is nothing in a write that says to which segment it belongs.
"""

import math
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mixassay import draws
from mixassay.errors import UserError
from mixassay.tasks import SPLITS, Split
from mixassay.tasks.streams.lengths import LEAST, Law, segment_lengths
from mixassay.tasks.streams.normal import length, normal


class Writes(NamedTuple):
    """N streams of T writes."""

    k: Tensor  # float64 [N, T, d_tag + d_key], unit vectors
    v: Tensor  # float64 [N, T, d_tag + values], unit vectors
    segment: Tensor  # int64 [N, T], ascending from 0
    key: Tensor  # int64 [N, T], the number of the key written
    value: Tensor  # int64 [N, T], and of its value
    question: Tensor  # float64 [N, T, d_tag + d_key], what asks for the key: a unit vector without tag


@dataclass(frozen=True, kw_only=True)
class RecallStream:
    """`tokens` writes in `segments` segments, of lengths by a law (`lengths.py`), none shorter than 4.

    A segment binds each of `keys` keys to one of `values` values, any of them, and writes the keys in one random
    permutation after the other. Keys are random directions in d_key dimensions, tags in d_tag.
    tag_key, tag_value: a and b, the share of a vector's energy that is its segment's tag.
    """

    version: ClassVar[int] = 1

    tokens: int = 256
    segments: int = 8
    lengths: Law = "geometric"
    keys: int = 16
    values: int = 64
    tag_key: float = 0.0
    tag_value: float = 0.0
    d_key: int = 32
    d_tag: int = 8

    def __post_init__(self) -> None:
        def need(right: bool, message: str) -> None:
            if not right:
                raise UserError(f"recall_stream: {message}")

        for name in ("segments", "keys", "values"):
            need(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        room = f"segments={self.segments} needs tokens from {LEAST * self.segments} to 2**17, got {self.tokens}"
        need(LEAST * self.segments <= self.tokens <= 2**17, room)
        laws = ("fixed", "geometric", "pareto")
        need(self.lengths in laws, f'lengths must be "fixed", "geometric" or "pareto", got "{self.lengths}"')
        for name in ("tag_key", "tag_value"):
            need(0 <= getattr(self, name) <= 1, f"{name} is a share, 0 to 1, got {getattr(self, name)}")
        for name in ("d_key", "d_tag"):
            need(2 <= getattr(self, name) <= 512, f"{name} must be 2 to 512, got {getattr(self, name)}")

    def draw(self, index: Tensor, *, seed: int | Tensor, split: Split = "test") -> Writes:
        """Streams `index` int64 [N], on `index.device`: stream i is a pure function of (fields, seed, split, i)."""
        names = [repr(float(x) if isinstance(x, int) else x) for x in (getattr(self, f.name) for f in fields(self))]
        stream = draws.stream("recall_stream", self.version, *names)
        N, T, J, P, D = len(index), self.tokens, self.segments, self.keys, self.d_tag
        rounds = T // P + J  # permutations of the keys that are enough for all segments
        sizes = [2 * J, J * P, rounds * P, P * self.d_key, J * D, J * D]
        words = draws.bits(seed, index + (SPLITS.index(split) << 61), stream, sum(sizes))
        for_lengths, for_values, for_rounds, *for_directions = torch.split(words, sizes, dim=1)
        lengths = segment_lengths(for_lengths, J, T, self.lengths)
        token = torch.arange(T, device=index.device)
        segment = (token[:, None] >= lengths.cumsum(1)[:, None]).sum(2)
        offset = token - (lengths.cumsum(1) - lengths).gather(1, segment)
        begun = -(-lengths // P)
        at = (begun.cumsum(1) - begun).gather(1, segment) * P + offset
        key = draws.ranked(for_rounds.reshape(-1, P))[1].view(N, -1).gather(1, at)
        value = draws.below(for_values, self.values).gather(1, segment * P + key)

        directions = [unit(normal(x).view(N, -1, d)) for x, d in zip(for_directions, (self.d_key, D, D), strict=True)]
        keys, tag_k, tag_v = (pick(x, i) for x, i in zip(directions, (key, segment, segment), strict=True))
        onehot = torch.nn.functional.one_hot(value, self.values).double()
        k = torch.cat((math.sqrt(self.tag_key) * tag_k, math.sqrt(1 - self.tag_key) * keys), dim=2)
        v = torch.cat((math.sqrt(self.tag_value) * tag_v, math.sqrt(1 - self.tag_value) * onehot), dim=2)
        return Writes(k, v, segment, key, value, torch.cat((torch.zeros_like(tag_k), keys), dim=2))


def unit(x: Tensor) -> Tensor:
    return x.double() / length(x)


def pick(x: Tensor, index: Tensor) -> Tensor:
    """x [N, J, d] at index [N, T]: [N, T, d]."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))
