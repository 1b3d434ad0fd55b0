"""The random numbers of one sample: a pure function of (task, version, length, seed, index) and the use's name."""

from uuid import UUID

import torch

from mixassay import draws


class Chance:
    """Named draws: every use has its own stream, so that a new one moves none of the others."""

    def __init__(self, seed: int, index: int, *names: str | int) -> None:
        self._seed, self._index, self._names = seed, torch.tensor([index]), names

    def _words(self, use: str, n: int) -> torch.Tensor:
        return draws.bits(self._seed, self._index, draws.stream(*self._names, use), n)

    def below(self, use: str, n: int, limit: int) -> list[int]:
        """n numbers, uniform in [0, limit), limit <= 2^31."""
        return _row(draws.below(self._words(use, n), limit))

    def distinct(self, use: str, n: int, limit: int) -> list[int]:
        """n different numbers of [0, limit), every sequence equally likely."""
        return _row(draws.distinct(self._words(use, draws.words_for_distinct(n, limit)), n, limit))

    def order(self, use: str, n: int) -> list[int]:
        """A shuffle of range(n)."""
        return _row(draws.ranked(self._words(use, n))[1])

    def uuids(self, use: str, n: int) -> list[str]:
        """n UUIDs, version 4 (122 random bits)."""
        words = _row(self._words(use, 4 * n))
        parts = zip(words[::4], words[1::4], words[2::4], words[3::4], strict=True)
        return [str(UUID(int=a << 96 | b << 64 | c << 32 | d, version=4)) for a, b, c, d in parts]


def _row(x: torch.Tensor) -> list[int]:
    return [int(v) for v in x[0].tolist()]
