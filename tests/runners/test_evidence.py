import math
from typing import Any

import numpy as np
import pytest
import scipy.stats

from mixassay.runners import evidence
from mixassay.runners.evidence import Evidence, Lens

NO_FLOOR = np.zeros(5)


def samples(n: int = 5, m: int = 5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(0.7, 0.02, n), rng.normal(0.68, 0.05, m)


@pytest.mark.parametrize(("n", "m"), [(5, 5), (3, 9)])
def test_welch_is_scipys(n: int, m: int) -> None:
    b, h = samples(n, m)
    lens = evidence.welch(b, h, np.zeros(n), np.zeros(m))
    wanted: Any = scipy.stats.ttest_ind(h, b, equal_var=False)
    again = scipy.stats.ttest_ind_from_stats(
        h.mean(), h.std(ddof=1), m, b.mean(), b.std(ddof=1), n, equal_var=False
    ).pvalue
    assert (lens.t, lens.df, lens.p) == pytest.approx((wanted.statistic, wanted.df, wanted.pvalue), rel=1e-12)
    assert lens.p == pytest.approx(again, rel=1e-12)


def test_paired_is_scipys() -> None:
    b, h = samples()
    lens = evidence.paired(b, h, NO_FLOOR, NO_FLOOR)
    wanted: Any = scipy.stats.ttest_rel(h, b)
    assert (lens.t, lens.df, lens.p) == pytest.approx((wanted.statistic, 4, wanted.pvalue), rel=1e-12)


def test_z_is_the_normal_deviate_of_the_same_p_and_finite_for_the_surest() -> None:
    for t in (-2.5, 0.0, 1.0, 1e4):
        lens = Lens(np.array(t), np.array(1.0), np.array(4.0))
        assert 2 * scipy.stats.norm.sf(abs(lens.z)) == pytest.approx(float(lens.p), rel=1e-9)
        assert np.sign(lens.z) == np.sign(t)
        assert math.isfinite(float(lens.z))


def test_the_floor_is_the_variance_of_counting_and_never_zero() -> None:
    assert evidence.floor(0.5, 10_000) == pytest.approx(0.25 / 10_000, rel=1e-6)
    assert evidence.floor(1.0, 99) == pytest.approx(0.5 / 100 * 99.5 / 100 / 99, rel=1e-12)
    ones = np.ones(5)
    by_count = evidence.floor(ones, 24_000)
    tie = Evidence(evidence.welch(ones, ones, by_count, by_count), evidence.paired(ones, ones, by_count, by_count))
    assert tie.p == 1
    assert tie.equivalent(0.01)
    fall = ones - 0.02  # equal on all seeds, so that no variance is left but the floor's
    counted = evidence.floor(fall, 24_000)
    changed = evidence.welch(ones, fall, by_count, counted)
    assert 0 < changed.p < 1e-3
    assert changed.se == pytest.approx(math.sqrt((by_count[0] + counted[0]) / 5))


def test_twice_the_smaller_p_at_most_one() -> None:
    def lens(t: float) -> Lens:
        return Lens(np.array(t), np.array(1.0), np.array(4.0))

    both = Evidence(lens(1.0), lens(3.0))
    assert both.p == pytest.approx(2 * lens(3.0).p)
    assert Evidence(lens(0.1), lens(0.0)).p == 1
    assert Evidence(lens(3.0), None).p == lens(3.0).p, "one lens alone costs nothing"


def test_equivalence_is_an_interval_inside_the_margin() -> None:
    lens = Lens(np.array(0.002), np.array(0.002), np.array(4.0))
    high = 0.002 + float(scipy.stats.t.ppf(0.975, 4)) * 0.002
    assert lens.within(high + 1e-9, 0.025)
    assert not lens.within(high - 1e-9, 0.025)
    wide = Lens(np.array(0.0), np.array(1.0), np.array(8.0))
    assert Evidence(wide, lens).equivalent(high + 1e-9), "either lens will do"
    assert not Evidence(wide, None).equivalent(high + 1e-9)


def test_the_smallest_change_is_seen_in_four_of_five_cases() -> None:
    rng = np.random.default_rng(1)
    lens = Lens(np.array(0.0), np.array(math.sqrt(2 / 5)), np.array(8.0))  # as if sd 1 were known
    b, h = rng.normal(0, 1, (2, 20_000, 5))
    found = evidence.welch(b, h + lens.smallest(0.05), np.zeros_like(b), np.zeros_like(h))
    assert (found.p <= 0.05).mean() == pytest.approx(0.8, abs=0.03)


def test_holm() -> None:
    p = np.array([0.01, 0.04, 0.03, 0.005, 1.0])  # by hand: sorted .005*5 .01*4 .03*3 .04*2 1*1, then never falling
    assert evidence.holm(p) == pytest.approx([0.04, 0.09, 0.09, 0.025, 1.0])
    assert evidence.holm(np.array([0.9, 0.8])) == pytest.approx([1, 1])
    assert evidence.holm(np.stack([p, p[::-1]]))[1] == pytest.approx([1.0, 0.025, 0.09, 0.09, 0.04])
    assert len(evidence.holm(np.array([]))) == 0


def test_cells_together_are_stouffers() -> None:
    z, d = np.array([-1.2, -1.0, -1.5, 0.3]), np.array([-0.02, -0.03, -0.01, 0.3])
    median, p = evidence.together([z], d)
    found: Any = scipy.stats.combine_pvalues(scipy.stats.norm.cdf(z), method="stouffer")
    assert median == pytest.approx(-0.015), "which one large change does not move"
    assert p == pytest.approx(2 * found.pvalue)
    assert evidence.together([z, z], d)[1] == pytest.approx(4 * found.pvalue)
    assert evidence.together([z], -d)[1] == 1, "a median that goes the other way is no finding"


def test_a_change_is_improbable_and_large() -> None:
    def change(p: float, d: float) -> bool:
        return bool(evidence.is_change(np.array(p), np.array(d), 0.01))

    assert change(0.05, -0.01)
    assert not change(0.051, -0.5)
    assert not change(1e-9, 0.0099)
