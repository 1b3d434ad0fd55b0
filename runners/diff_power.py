"""What `diff` gets wrong, and what it misses: its own tests on tables whose truth is known.

    python -P -m mixassay.runners.diff_power > docs/diff-power.md     half a minute of one core

Seeds come in four kinds: normal; near 1 (one minus an exponential of mean half a point); solve or fail (99.5 with
probability 0.7, else about 40); and, for single tests, of unequal spread. Seeds that both sides share are correlated by
rho, by a normal copula: 0.99 is the same mathematics in another order of summation, 0.7 a small change of the
algorithm, 0 two trainings that have gone apart. Accuracies are hits among 24 000 items.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from scipy import special  # type: ignore[import-untyped]

from mixassay.runners import evidence
from mixassay.runners.evidence import ALPHA, Bools, Evidence, Floats
from mixassay.settings import Compare

N, ITEMS = 5, 24_000
MIXERS, CELLS = 7, 12
MARGIN = Compare().margin
RHOS = (0.0, 0.7, 0.99)
POINT = 0.01

Quantile = Callable[[Floats], Floats]
"""An accuracy from a uniform number."""


def normal(mean: float, sd: float) -> Quantile:
    def accuracy(u: Floats) -> Floats:
        return np.asarray(mean + sd * special.ndtri(u), dtype=np.float64)

    return accuracy


def near_one(u: Floats) -> Floats:
    return np.asarray(1 + 0.5 * POINT * np.log(u))


def solve_or_fail(rate: float) -> Quantile:
    """Of those that solve, 99.5 with a deviation of 0.2; of the others, 40 with one of 5."""

    def accuracy(u: Floats) -> Floats:
        solves = u >= 1 - rate
        rest = np.where(solves, (u - 1 + rate) / max(rate, 1e-12), u / max(1 - rate, 1e-12))  # uniform again
        z = special.ndtri(rest.clip(1e-9, 1 - 1e-9))
        return np.asarray(np.where(solves, 0.995 + 0.2 * POINT * z, 0.4 + 5 * POINT * z), dtype=np.float64)

    return accuracy


MIXED: list[Quantile] = [
    *(normal(0.7, sd * POINT) for sd in (0.2, 0.5, 1, 1, 2, 3)),
    near_one, near_one, near_one,
    solve_or_fail(0.7), solve_or_fail(0.7), solve_or_fail(0.7),
]  # fmt: skip
"""The twelve cells of a mixer."""


def draw(rng: Generator, before: Quantile, after: Quantile, rho: float, repeats: int) -> tuple[Floats, Floats]:
    """Seeds on both sides, [repeats, N] each."""
    z = rng.standard_normal((2, repeats, N))
    x, y = z[0], rho * z[0] + np.sqrt(1 - rho**2) * z[1]
    return counted(before(special.ndtr(x))), counted(after(special.ndtr(y)))


def counted(accuracy: Floats) -> Floats:
    return np.round(np.clip(accuracy, 0, 1) * ITEMS) / ITEMS


def weigh(before: Floats, after: Floats) -> Evidence:
    floors = evidence.floor(before, ITEMS), evidence.floor(after, ITEMS)
    return Evidence(evidence.welch(before, after, *floors), evidence.paired(before, after, *floors))


def shifted(quantile: Quantile, by: float) -> Quantile:
    return lambda u: quantile(u) + by


# -- one test ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Single:
    """A test that stands alone. `rates` is what happens in which share of the repeats."""

    name: str
    before: Quantile
    after: Quantile
    rho: float = 0.0

    def rates(self, rng: Generator, repeats: int) -> dict[str, float]:
        found = weigh(*draw(rng, self.before, self.after, self.rho, repeats))
        paired = found.paired
        assert paired is not None, "all seeds are shared"
        p = {"Welch": found.welch.p, "paired": paired.p, "ours": found.p}
        rates = {name: float((values <= ALPHA).mean()) for name, values in p.items()}
        return {**rates, "equivalent": float(found.equivalent(MARGIN).mean())}


def singles() -> Iterator[Single]:
    one = normal(0.7, POINT)
    yield Single("no change: normal", one, one)
    yield Single("no change: near 1", near_one, near_one)
    yield Single("no change: solve or fail", solve_or_fail(0.7), solve_or_fail(0.7))
    yield Single("no change: sd 0.5 and 3", normal(0.7, 0.5 * POINT), normal(0.7, 3 * POINT))
    yield Single("no change: all at 100", lambda u: u * 0 + 1, lambda u: u * 0 + 1)
    for sd in (0.3, 0.5):
        yield Single(f"no change: sd {sd}", normal(0.7, sd * POINT), normal(0.7, sd * POINT))
    for rho in RHOS:
        yield Single(f"-2 points, sd 1, rho {rho:g}", one, shifted(one, -2 * POINT), rho)
    yield Single("solve rate 100 % to 50 %", solve_or_fail(1.0), solve_or_fail(0.5))


# -- a table -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """7 mixers of 12 cells, or fewer. `changed` replaces the first cells of the first mixer, before and after."""

    name: str
    changed: tuple[tuple[Quantile, Quantile], ...] = ()
    rho: float = 0.0
    mixers: int = MIXERS
    cells: int = CELLS

    def rates(self, rng: Generator, repeats: int) -> dict[str, float]:
        """Shares of tables with a verdict that is false or right; right ones as a share of the changed cells."""
        kinds = [(kind, kind) for _ in range(self.mixers) for kind in MIXED[: self.cells]]
        kinds[: len(self.changed)] = self.changed
        drawn = [draw(rng, *kind, self.rho, repeats) for kind in kinds]
        found = weigh(*(np.stack(side, axis=1) for side in zip(*drawn, strict=True)))  # [repeats, cells]
        d, p = found.welch.d, found.p
        called = evidence.is_change(evidence.holm(p), d, MARGIN)
        suspect = evidence.is_change(p, d, MARGIN) & ~called
        upheld = self.confirm(rng, kinds, suspect, d)
        mixers = self.together(found)
        true = np.arange(len(kinds)) < len(self.changed)
        row = np.arange(self.mixers) < bool(self.changed)
        wrong = {
            "raw p < .05": evidence.is_change(found.welch.p, d, 0) & ~true,
            "Holm": called & ~true,
            "confirmed": (called | upheld) & ~true,
            "mixers": mixers & ~row,
            "any": np.concatenate([called & ~true, upheld & ~true, mixers & ~row], axis=-1),
        }
        rates = {f"false: {name}": float(calls.any(-1).mean()) for name, calls in wrong.items()}
        rates["suspects"] = float(suspect.sum(-1).mean())
        if self.changed:
            right = {"Holm": called[:, true], "confirmed": (called | upheld)[:, true], "mixer": mixers[:, row]}
            rates |= {f"seen: {name}": float(calls.mean()) for name, calls in right.items()}
        return rates

    def together(self, found: Evidence) -> Bools:
        """Which mixers change as a whole, [repeats, mixers]."""
        shape = (-1, self.mixers, self.cells)
        d, p = evidence.together([lens.z.reshape(shape) for lens in found.lenses], found.welch.d.reshape(shape))
        return evidence.is_change(evidence.holm(p), d, MARGIN)

    def confirm(self, rng: Generator, kinds: list[tuple[Quantile, Quantile]], suspect: Bools, d: Floats) -> Bools:
        """Suspects that fresh seeds uphold."""
        upheld = np.zeros_like(suspect)
        fresh = [weigh(*draw(rng, *kind, self.rho, len(suspect))) for kind in kinds]
        p = np.where(suspect, np.stack([found.p for found in fresh], axis=1), 1.0)
        again = np.stack([found.welch.d for found in fresh], axis=1)
        for count in range(1, int(suspect.sum(-1).max(initial=0)) + 1):  # Holm over the suspects of each table alone
            rows = np.flatnonzero(suspect.sum(-1) == count)
            at = np.argsort(~suspect[rows], axis=-1, kind="stable")[:, :count]
            adjusted = evidence.holm(np.take_along_axis(p[rows], at, -1))
            sure = evidence.is_change(adjusted, np.take_along_axis(again[rows], at, -1), MARGIN)
            same = np.take_along_axis(again[rows] * d[rows] > 0, at, -1)
            upheld[rows[:, None], at] = sure & same
        return upheld


def tables() -> Iterator[Table]:
    for rho in RHOS:
        yield Table(f"no change, rho {rho:g}", rho=rho)
    yield Table("no change, 16 cells", mixers=4, cells=4)
    one, perfect, third = normal(0.7, POINT), normal(0.998, 0.1 * POINT), solve_or_fail(0.7)
    yield Table("one cell near 100: -35", ((perfect, shifted(perfect, -0.35)),))
    for rho in RHOS[:2]:
        yield Table(f"one cell of sd 1: -5, rho {rho:g}", ((one, shifted(one, -5 * POINT)),), rho)
    for rho in RHOS:
        yield Table(f"one cell that solves or fails: -5, rho {rho:g}", ((third, shifted(third, -5 * POINT)),), rho)
    yield Table("one mixer, 12 cells: -3", tuple((kind, shifted(kind, -3 * POINT)) for kind in MIXED))


# -- the page ----------------------------------------------------------------------------------------------------------

PAGE = """\
# What `mixassay diff` gets wrong, and what it misses

Its own tests on tables whose truth is known, `python -P -m mixassay.runners.diff_power > docs/diff-power.md`. {kinds}

## One cell

{many:,} repeats, {N} seeds a side: the share of them in which p <= {ALPHA:g}, and in which the change is bounded by a
point.

{singles}

## A table of {MIXERS} mixers with {CELLS} cells each

{repeats:,} tables. `false`: the share of tables with any verdict on what did not change, by cells as they are called
(Holm), by cells after `--confirm` too, by mixers as a whole, by all of these (any). `suspects`: cells for `--confirm`.
`seen`: the share of changed cells that are called, and of tables in which their mixer is, as a whole.

{tables}
"""


def page(repeats: int) -> str:
    """`docs/diff-power.md`."""
    return PAGE.format(
        kinds=(__doc__ or "").split("\n\n")[-1].strip(),
        singles=grid([(case.name, case.rates(stream(case.name), 10 * repeats)) for case in singles()]),
        tables=grid([(case.name, case.rates(stream(case.name), repeats)) for case in tables()]),
        **{"many": 10 * repeats, "repeats": repeats, "N": N, "ALPHA": ALPHA, "MIXERS": MIXERS, "CELLS": CELLS},
    )


def stream(name: str) -> Generator:
    return np.random.default_rng(list(name.encode()))


def grid(cases: list[tuple[str, dict[str, float]]]) -> str:
    """A Markdown table."""
    heads = list(dict.fromkeys(name for _, rates in cases for name in rates))
    lines = [["", *heads], ["---", *("---:" for _ in heads)]]
    lines += [[name, *(f"{rates[head]:.3f}" if head in rates else "" for head in heads)] for name, rates in cases]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(page(4000))
