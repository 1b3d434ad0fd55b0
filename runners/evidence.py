"""Whether two sets of seeds differ: two t tests and one answer. Arrays in, arrays out; leading axes are tests at once.

A seed that is shared by both sides may bring nearly all of its variance along (the same rows and initialisation, summed
in another order), or none (training has gone apart). So there are two lenses, Welch's and the paired one, and twice the
smaller p is the price of looking twice:

    p = min(1, 2 min(p_welch, p_paired))

A variance is never taken for less than what counting hits among n scored items leaves, q (1 - q) / n with
q = (hits + 1/2) / (n + 1): five seeds at 100 % are an ordinary case, not a division by zero.

`diff.py` decides by these functions, and so does the simulation that measures their errors (`diff_power.py`).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special  # type: ignore[import-untyped]  # scipy.stats, its user, takes a second to import

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

ALPHA = 0.05
POWER = 0.8
"""How often a change must be seen for "could have seen"."""


@dataclass(frozen=True)
class Lens:
    """A difference of means, head - base, as one test sees it: with a standard error and degrees of freedom."""

    d: Floats
    se: Floats
    df: Floats

    @property
    def t(self) -> Floats:
        return self.d / self.se

    @property
    def p(self) -> Floats:
        return _floats(2 * special.stdtr(self.df, -np.abs(self.t)))

    @property
    def z(self) -> Floats:
        """The normal deviate that is as improbable as t: what can be added up over cells."""
        return _floats(np.sign(self.t) * -special.ndtri(special.stdtr(self.df, -np.abs(self.t))))

    def within(self, margin: float, alpha: float) -> Bools:
        """Two one-sided tests at `alpha`: whether the 1 - 2 alpha interval of d lies inside (-margin, margin)."""
        return np.asarray(np.abs(self.d) + special.stdtrit(self.df, 1 - alpha) * self.se < margin)

    def smallest(self, alpha: float) -> Floats:
        """The change of which a two-sided test at `alpha` sees four in five."""
        return _floats((special.stdtrit(self.df, 1 - alpha / 2) + special.stdtrit(self.df, POWER)) * self.se)


@dataclass(frozen=True)
class Evidence:
    """What two sets of runs say about a change. `paired` is None where fewer than three seeds are shared."""

    welch: Lens
    paired: Lens | None

    @property
    def lenses(self) -> list[Lens]:
        return [self.welch] if self.paired is None else [self.welch, self.paired]

    @property
    def p(self) -> Floats:
        return twice_the_least([lens.p for lens in self.lenses])

    def equivalent(self, margin: float) -> Bools:
        """Whether either lens, at its share of alpha, bounds the change by the margin."""
        within = [lens.within(margin, ALPHA / len(self.lenses)) for lens in self.lenses]
        return np.asarray(np.logical_or.reduce(within))

    @property
    def smallest(self) -> Floats:
        """The smallest change that could have been seen, in a test that stands alone."""
        return _floats(np.minimum.reduce([lens.smallest(ALPHA / len(self.lenses)) for lens in self.lenses]))


def floor(accuracy: Any, items: Any) -> Floats:
    """The variance of an accuracy by counting alone."""
    q = (np.asarray(accuracy) * items + 0.5) / (np.asarray(items) + 1)
    return _floats(q * (1 - q) / items)


def welch(base: Floats, head: Floats, base_floor: Floats, head_floor: Floats) -> Lens:
    """Seeds as independent samples, [..., n] and [..., m]; floors are of the same shapes (Welch 1947)."""
    n, m = base.shape[-1], head.shape[-1]
    vb = np.maximum(base.var(-1, ddof=1), base_floor.mean(-1)) / n
    vh = np.maximum(head.var(-1, ddof=1), head_floor.mean(-1)) / m
    df = (vb + vh) ** 2 / (vb**2 / (n - 1) + vh**2 / (m - 1))
    return Lens(head.mean(-1) - base.mean(-1), np.sqrt(vb + vh), df)


def paired(base: Floats, head: Floats, base_floor: Floats, head_floor: Floats) -> Lens:
    """The same seeds before and after, [..., n] each, in one order."""
    d, n = head - base, base.shape[-1]
    variance = np.maximum(d.var(-1, ddof=1), (base_floor + head_floor).mean(-1)) / n
    return Lens(d.mean(-1), np.sqrt(variance), np.full(d.shape[:-1], n - 1.0))


def holm(p: Floats) -> Floats:
    """Adjusted p over the last axis (Holm 1979): the k-th smallest of m counts m - k + 1 times."""
    order, m = np.argsort(p, axis=-1), p.shape[-1]
    scaled = np.take_along_axis(p, order, -1) * np.arange(m, 0, -1)
    adjusted = np.empty_like(scaled)
    np.put_along_axis(adjusted, order, np.minimum(1, np.maximum.accumulate(scaled, axis=-1)), -1)
    return _floats(adjusted)


def together(z: list[Floats], d: Floats) -> tuple[Floats, Floats]:
    """A mixer's cells [..., k] as one: the median change, and p of having gone that way.

    `z` are the cells' by each lens; their sums decide (Stouffer 1949). The median, since a few cells whose seeds solve
    or fail would drown the rest in a mean.
    """
    median = np.median(d, axis=-1)
    sums = [np.sign(median) * each.sum(-1) / np.sqrt(each.shape[-1]) for each in z]
    return _floats(median), twice_the_least([_floats(np.minimum(1, 2 * special.ndtr(-each))) for each in sums])


def is_change(p: Floats, d: Floats, margin: float) -> Bools:
    """Improbable by chance and large enough to matter."""
    return (p <= ALPHA) & (np.abs(d) >= margin)


def twice_the_least(p: list[Floats]) -> Floats:
    """The smaller p of two lenses counts twice."""
    return _floats(np.minimum(1, len(p) * np.minimum.reduce(p)))


def _floats(x: Any) -> Floats:
    return np.asarray(x, dtype=np.float64)
