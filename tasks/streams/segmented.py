"""A stream of tokens from one regime after the other, to measure where a cut into slots should be.

A regime is a mean direction of keys and one of values. Tokens are unit vectors near them, until the regime changes:

    token    0  1  2  3  4  5  6  7  8  9 10 11 ...        k_t = unit(mean + noise), v_t likewise
    segment  0  0  0  0  0  1  1  1  1  2  2  2            means turn by `angle` at each change
    needle   .  .  .  *  .  .  .  .  .  .  .  .            a token that has nothing to do with its regime
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
from mixassay.tasks.streams.normal import BITS, ONE, direction, length, normal, product


class Stream(NamedTuple):
    """N streams of T tokens, and the truth about them."""

    k: Tensor  # float64 [N, T, K], unit vectors
    v: Tensor  # float64 [N, T, V], unit vectors
    segment: Tensor  # int64 [N, T], ascending from 0
    needle: Tensor  # bool [N, T]

    @property
    def changes(self) -> Tensor:
        """bool [N, T], the first token of each segment."""
        first = torch.ones_like(self.needle[:, :1])
        return torch.cat((first, self.segment.diff(dim=1) > 0), dim=1)


@dataclass(frozen=True, kw_only=True)
class SegmentedStream:
    """`segments` regimes in `tokens` tokens, lengths by a law (`lengths.py`), none shorter than 4.

    angle: degrees between the means of consecutive regimes, of keys and of values alike, about a random axis.
    sigma: noise is normal with E|noise|^2 = sigma^2; null: no regime at all, tokens are random directions.
    ramp: after a change this many tokens lead over, mean (1 - f) old + f new with f = 1/(ramp+1), 2/(ramp+1), ...
    pool: 0, or the number of regimes that recur, in random order, none twice in a row; `angle` then says nothing.
    needles: the share of tokens that are random directions instead.

    >>> stream = SegmentedStream(tokens=24, segments=3, d_key=2, d_value=2).draw(torch.tensor([8]), seed=0)
    >>> stream.segment.tolist()[0]
    [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    >>> [[round(x, 2) for x in k] for k in stream.k[0, [7, 8, 9, 10]].tolist()]
    [[0.95, 0.32], [-0.46, 0.89], [-0.44, 0.9], [-0.53, 0.85]]
    """

    version: ClassVar[int] = 1

    tokens: int = 512
    segments: int = 8
    lengths: Law = "geometric"
    angle: float = 90.0
    sigma: float | None = 0.2
    ramp: int = 0
    pool: int = 0
    needles: float = 0.0
    d_key: int = 16
    d_value: int = 16

    def __post_init__(self) -> None:
        def need(right: bool, message: str) -> None:
            if not right:
                raise UserError(f"segmented_stream: {message}")

        need(self.segments >= 1, f"segments must be at least 1, got {self.segments}")
        room = f"segments={self.segments} needs tokens from {LEAST * self.segments} to 2**17, got {self.tokens}"
        need(LEAST * self.segments <= self.tokens <= 2**17, room)
        laws = ("fixed", "geometric", "pareto")
        need(self.lengths in laws, f'lengths must be "fixed", "geometric" or "pareto", got "{self.lengths}"')
        need(0 <= self.angle <= 180, f"angle must be 0 to 180 degrees, got {self.angle}")
        need(self.sigma is None or 0 <= self.sigma <= 64, f"sigma must be 0 to 64, or null, got {self.sigma}")
        need(self.ramp >= 0, f"ramp must be at least 0, got {self.ramp}")
        need(self.pool == 0 or self.pool >= 2, f"pool must be 0, or at least 2 regimes, got {self.pool}")
        need(0 <= self.needles <= 1, f"needles is a share, 0 to 1, got {self.needles}")
        for name in ("d_key", "d_value"):
            need(2 <= getattr(self, name) <= 512, f"{name} must be 2 to 512, got {getattr(self, name)}")

    def draw(self, index: Tensor, *, seed: int | Tensor, split: Split = "test") -> Stream:
        """Streams `index` int64 [N], on `index.device`: stream i is a pure function of (fields, seed, split, i)."""
        names = [repr(_plain(getattr(self, field.name))) for field in fields(self)]
        stream = draws.stream("segmented_stream", self.version, *names)
        counter = index + (SPLITS.index(split) << 61)
        T, J, widths = self.tokens, self.segments, (self.d_key, self.d_value)
        regimes = self.pool or J
        sizes = [2 * J, J, T, *(regimes * d for d in widths), *(T * d for d in widths)]
        words = torch.split(draws.bits(seed, counter, stream, sum(sizes)), sizes, dim=1)
        for_lengths, for_order, for_needles, *rest = words
        lengths = segment_lengths(for_lengths, J, T, self.lengths)
        token = torch.arange(T, device=index.device)
        segment = (token[:, None] >= lengths.cumsum(1)[:, None]).sum(2)  # [N, T]
        offset = token - (lengths.cumsum(1) - lengths).gather(1, segment)
        needle = for_needles < round(self.needles * 2**32)
        found = []
        for d, for_means, for_noise in zip(widths, rest[:2], rest[2:], strict=True):
            means = normal(for_means).view(len(index), regimes, d)
            means = self._recurring(means, for_order) if self.pool else self._turning(means)
            mean = _at(means, segment)
            if self.ramp:
                mean = self._ramped(mean, _at(means, (segment - 1).clamp(min=0)), segment, offset)
            noise = normal(for_noise).view(len(index), T, d)
            if self.sigma is not None:
                scaled = noise * round(self.sigma / math.sqrt(d) * ONE) >> BITS
                noise = torch.where(needle[..., None], noise, mean + scaled)
            found.append(noise.double() / length(noise))
        return Stream(found[0], found[1], segment, needle)

    def _turning(self, raw: Tensor) -> Tensor:
        """Means [N, J, d] of which each is the last one turned by the angle, towards raw [N, J, d]."""
        cos, sin = (round(f(math.radians(self.angle)) * ONE) for f in (math.cos, math.sin))
        means = [direction(raw[:, 0])]
        for j in range(1, raw.shape[1]):
            along = product(raw[:, j], means[-1]).sum(1, keepdim=True)
            aside = direction(raw[:, j] - product(along, means[-1]))
            means.append(direction(cos * means[-1] + sin * aside >> BITS))
        return torch.stack(means, dim=1)

    def _recurring(self, raw: Tensor, words: Tensor) -> Tensor:
        """Means [N, J, d] out of a pool [N, R, d], a step to any other one at each change."""
        R = raw.shape[1]
        step = 1 + draws.below(words, R - 1)
        step[:, 0] = 0
        return _at(direction(raw), step.cumsum(1) % R)

    def _ramped(self, mean: Tensor, before: Tensor, segment: Tensor, offset: Tensor) -> Tensor:
        part = (offset + 1)[..., None]
        over = direction((self.ramp + 1 - part) * before + part * mean)
        return torch.where(((offset < self.ramp) & (segment > 0))[..., None], over, mean)


def _at(x: Tensor, index: Tensor) -> Tensor:
    """x [N, J, d] at index [N, T]: [N, T, d]."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


def _plain(value: object) -> object:
    """1 and 1.0 name the same stream."""
    return float(value) if isinstance(value, int) else value
