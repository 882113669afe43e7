import math

import numpy as np
import pytest
from scipy import stats

from scalla.report.spread import Interval, Spread, one_more_seed, paired_difference, spread, t_quantile

VALUES = [0.912, 0.907, 0.915, 0.910, 0.921]


def test_mean_and_deviation() -> None:
    found = spread(VALUES)
    assert found == Spread(pytest.approx(np.mean(VALUES)), pytest.approx(np.std(VALUES, ddof=1)), 5)
    assert spread([0.3]) == Spread(0.3, None, 1)
    assert spread([]) is None


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 15])
def test_quantiles_are_those_of_student(degrees: int) -> None:
    assert t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), abs=6e-4)


def test_quantile_of_many_seeds_is_the_normal_one() -> None:
    assert t_quantile(500) == pytest.approx(stats.norm.ppf(0.975), abs=1e-3)


def test_paired_difference_is_the_interval_of_the_paired_t_test() -> None:
    ours = dict(enumerate(VALUES, 1))
    theirs = dict(enumerate([0.908, 0.906, 0.909, 0.905, 0.915], 1))
    found = paired_difference(ours, {**theirs, 9: 0.1})  # seed 9 is theirs alone
    expected = stats.ttest_rel(VALUES, [*theirs.values()]).confidence_interval(0.95)
    assert found is not None
    assert found.half_width is not None
    assert found.count == 5
    assert (found.mean - found.half_width, found.mean + found.half_width) == pytest.approx(expected, abs=1e-5)
    assert found.sign == 1


def test_what_is_common_to_a_seed_cancels() -> None:
    seeds = {1: 0.90, 2: 0.95, 3: 0.85}
    found = paired_difference({s: v + 0.01 for s, v in seeds.items()}, seeds)
    assert found is not None
    assert found.mean == pytest.approx(0.01)
    assert found.half_width == pytest.approx(0, abs=1e-12)


def test_no_seed_in_common_says_nothing() -> None:
    assert paired_difference({1: 0.5}, {2: 0.5}) is None
    assert paired_difference({1: 0.5}, {1: 0.25}) == Interval(0.25, None, 1)


def test_sign_needs_an_interval_that_leaves_zero_out() -> None:
    assert Interval(0.2, 0.1, 3).sign == 1
    assert Interval(-0.2, 0.1, 3).sign == -1
    assert Interval(0.2, 0.2, 3).sign == 0
    assert Interval(0.2, None, 1).sign == 0


def test_one_more_seed_is_the_prediction_interval() -> None:
    found = one_more_seed(VALUES)
    assert found is not None
    expected = stats.t.ppf(0.975, 4) * np.std(VALUES, ddof=1) * math.sqrt(1 + 1 / 5)
    assert found.half_width == pytest.approx(expected, rel=1e-3)
    assert one_more_seed([0.4]) == Interval(0.4, None, 1)
    assert one_more_seed([]) is None
