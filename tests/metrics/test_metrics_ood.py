import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.metrics import roc_curve as sklearn_roc_curve

from scalla import metrics
from scalla.types import InputError

ALL = (metrics.auroc, metrics.aupr, metrics.fpr95, metrics.roc_curve)
# Few distinct values: ties within and between the kinds.
SCORES = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=40)


def test_values_by_hand() -> None:
    inside, outside = [1.0, 2.0, 3.0], [2.0, 4.0]
    # Pairs (out > in): 2 beats 1, ties 2, loses to 3; 4 beats all three: (1 + ½ + 3) / 6.
    assert metrics.auroc(inside, outside) == 4.5 / 6
    assert metrics.fpr95(inside, outside) == 2 / 3  # both OOD need threshold 2, which flags 2 and 3
    # Thresholds 4: P 1, R ½; 3: R ½; 2: P 2/4, R 1: ½·1 + ½·½.
    assert metrics.aupr(inside, outside) == 0.75
    curve = metrics.roc_curve(inside, outside)
    assert curve.thresholds.tolist() == [float("inf"), 4.0, 3.0, 2.0, 1.0]
    assert curve.tpr.tolist() == [0.0, 0.5, 0.5, 1.0, 1.0]
    torch.testing.assert_close(curve.fpr, torch.tensor([0, 0, 1 / 3, 2 / 3, 1], dtype=torch.float64))


def test_perfect_separation_and_its_reverse() -> None:
    low, high = torch.arange(50.0), torch.arange(50.0) + 100
    assert (metrics.auroc(low, high), metrics.aupr(low, high), metrics.fpr95(low, high)) == (1.0, 1.0, 0.0)
    assert (metrics.auroc(high, low), metrics.fpr95(high, low)) == (0.0, 1.0)
    constant = torch.ones(30)
    assert (metrics.auroc(constant, constant), metrics.fpr95(constant, constant)) == (0.5, 1.0)
    assert metrics.aupr(constant, torch.ones(10)) == 0.25


@settings(max_examples=80, deadline=None)
@given(SCORES, SCORES)
def test_against_scikit_learn(inside: list[float], outside: list[float]) -> None:
    scores, target = np.array(inside + outside), np.array([0] * len(inside) + [1] * len(outside))
    assert metrics.auroc(inside, outside) == pytest.approx(roc_auc_score(target, scores), abs=1e-12)
    assert metrics.aupr(inside, outside) == pytest.approx(average_precision_score(target, scores), abs=1e-12)
    fpr, tpr, thresholds = sklearn_roc_curve(target, scores, drop_intermediate=False)
    curve = metrics.roc_curve(inside, outside)
    np.testing.assert_allclose(curve.fpr, fpr, atol=1e-12)
    np.testing.assert_allclose(curve.tpr, tpr, atol=1e-12)
    np.testing.assert_array_equal(curve.thresholds, thresholds)
    assert metrics.fpr95(inside, outside) == pytest.approx(fpr[tpr >= 0.95 - 1e-12].min(), abs=1e-12)
    assert float(torch.trapezoid(curve.tpr, curve.fpr)) == pytest.approx(metrics.auroc(inside, outside))


@settings(max_examples=40, deadline=None)
@given(SCORES, SCORES)
def test_rank_statistics_see_ranks_only(inside: list[float], outside: list[float]) -> None:
    stretched = np.exp(np.array(inside)), np.exp(np.array(outside))
    assert metrics.auroc(*stretched) == metrics.auroc(inside, outside)
    assert metrics.fpr95(*stretched) == metrics.fpr95(inside, outside)
    assert metrics.auroc(outside, inside) == pytest.approx(1 - metrics.auroc(inside, outside), abs=1e-12)


@pytest.mark.parametrize("num_out", [1, 7, 19, 20, 21, 60, 100, 1000])
def test_fpr95_flags_at_least_95_percent_and_no_more_than_needed(num_out: int) -> None:
    outside = torch.arange(num_out, dtype=torch.float64)
    inside = torch.arange(num_out, dtype=torch.float64) - 0.5
    needed = next(k for k in range(num_out + 1) if 100 * k >= 95 * num_out)
    expected = (inside >= outside[num_out - needed]).double().mean()
    assert metrics.fpr95(inside, outside) == float(expected)


def test_infinite_scores_are_ranked() -> None:
    assert metrics.auroc([float("-inf"), 0.0], [1.0, float("inf")]) == 1.0


@pytest.mark.parametrize("metric", ALL)
def test_errors(metric: object) -> None:
    scores = torch.arange(4.0)
    with pytest.raises(InputError, match=r"got scores_out of shape \(0,\), which is empty"):
        metric(scores, torch.zeros(0))
    with pytest.raises(InputError, match=r"got scores_in of shape \(0,\), which is empty"):
        metric([], scores)
    with pytest.raises(InputError, match="got 2 NaN among the 3 values of scores_in"):
        metric(np.array([np.nan, 1.0, np.nan]), scores)
    with pytest.raises(InputError, match=r"got scores_out of shape \(4, 1\); wanted one score for each"):
        metric(scores, scores[:, None])


def test_twenty_thousand_scores_take_milliseconds() -> None:
    generator = torch.Generator().manual_seed(0)
    inside = torch.randn(10_000, generator=generator)
    outside = 1 + torch.randn(10_000, generator=generator)
    for metric in ALL:
        start = time.perf_counter()
        metric(inside, outside)
        assert time.perf_counter() - start < 1.0  # milliseconds on an idle core; a loop over pairs takes minutes
    # N(0,1) against N(1,1): AUROC = Φ(1/√2) = 0.76025; standard error 0.0034.
    assert metrics.auroc(inside, outside) == pytest.approx(0.76025, abs=0.014)
