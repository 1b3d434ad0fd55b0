from typing import Any

import numpy as np
import pytest
import scipy.stats

from mixassay.runners import stats
from mixassay.runners.stats import Moments


def test_mean_and_sample_deviation():
    rng = np.random.default_rng(0)
    for n in (2, 3, 5, 40):
        values = rng.random(n).tolist()
        m = stats.moments(values)
        assert m.mean == pytest.approx(np.mean(values), rel=1e-15)
        assert m.std == pytest.approx(np.std(values, ddof=1), rel=1e-13)
        assert m.n == n


def test_equal_values_have_no_deviation_at_all():
    assert stats.moments([0.1] * 5) == Moments(0.1, 0.0, 5)


def test_one_value_has_no_known_deviation_and_none_no_mean():
    assert stats.moments([0.25]) == Moments(0.25, None, 1)
    with pytest.raises(ValueError, match="no values"):
        stats.moments([])


def test_quantiles_agree_with_scipy():
    for level in (0.9, 0.95, 0.99):
        for df in (1, 2, 3.7, 4, 8, 30, 200, 9000):
            assert stats.quantile(df, level) == pytest.approx(scipy.stats.t.ppf((1 + level) / 2, df), rel=1e-7)
    assert stats.quantile(4) == pytest.approx(2.776, abs=5e-4)
    assert stats.quantile(1e9) == pytest.approx(1.95996, rel=2e-4)


def test_interval_of_a_mean():
    values = [0.81, 0.92, 0.83, 0.85, 0.95]
    low, high = stats.interval(stats.moments(values)) or (0, 0)
    wanted = scipy.stats.t.interval(0.95, 4, loc=np.mean(values), scale=scipy.stats.sem(values))
    assert (low, high) == pytest.approx(wanted, rel=1e-8)
    assert stats.interval(Moments(0.5, None, 1)) is None


def test_welch_from_raw_values_agrees_with_scipy():
    rng = np.random.default_rng(1)
    for n, k in ((5, 5), (5, 3), (2, 9)):
        a, b = rng.normal(1, 2, n), rng.normal(0, 0.5, k)
        d = stats.difference(stats.moments(a.tolist()), stats.moments(b.tolist()))
        test: Any = scipy.stats.ttest_ind(a, b, equal_var=False)
        interval = test.confidence_interval(0.95)
        assert d.value == pytest.approx(a.mean() - b.mean(), rel=1e-12)
        assert d.df == pytest.approx(test.df, rel=1e-12)
        assert d.se == pytest.approx(d.value / test.statistic, rel=1e-9)
        assert (d.low, d.high) == pytest.approx((interval.low, interval.high), rel=1e-6)
        assert d.clear == (test.pvalue < 0.05)


def test_what_cannot_be_estimated_is_none():
    known = Moments(0.9, 0.1, 5)
    for other in (Moments(0.5, None, 5), Moments(0.5, None, 1)):
        d = stats.difference(known, other)
        assert (d.value, d.low, d.high, d.clear) == (pytest.approx(0.4), None, None, False)
    d = stats.difference(Moments(1.0, 0.0, 5), Moments(0.9, 0.0, 5))
    assert (d.low, d.clear) == (None, False), "no spread at all is no evidence of a small error"


def test_solved_counts_from_the_bound_on():
    assert stats.solved([1.0, 0.99, 0.98], 0.99) == 2
