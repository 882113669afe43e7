import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import root_mean_squared_error
from torchmetrics.functional.regression import continuous_ranked_probability_score

from scalla import metrics
from scalla.types import InputError

MEAN, VAR, Y = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 4.0]), torch.tensor([1.0, 1.0])


def test_values_by_hand() -> None:
    assert metrics.rmse(MEAN, Y) == pytest.approx(math.sqrt(0.5), abs=1e-15)
    constant = 0.5 * math.log(2 * math.pi)
    expected = (constant + 0.5 + constant + math.log(2)) / 2
    assert metrics.gaussian_nll(MEAN, VAR, Y) == pytest.approx(expected, abs=1e-12)
    # CRPS of N(0, σ²) at its mean: σ (2φ(0) − 1/√π) = σ · 0.233695
    assert metrics.crps_gaussian([1.0], [4.0], [1.0]) == pytest.approx(2 * 0.2336949772, abs=1e-9)
    assert metrics.crps_gaussian([0.0], [1.0], [1.0]) == pytest.approx(0.6024413576, abs=1e-9)
    assert metrics.interval_coverage(MEAN, VAR, Y, level=0.6) == 0.5  # z = 0.8416: 1σ is out, 0σ is in


@settings(max_examples=25, deadline=None)
@given(st.floats(-3, 3), st.floats(0.1, 3), st.floats(-5, 5))
def test_crps_is_the_integral_of_its_definition(mean: float, std: float, y: float) -> None:
    x = torch.linspace(-30, 30, 120_001, dtype=torch.float64)
    cdf = torch.special.ndtr((x - mean) / std)
    integral = float(torch.trapezoid((cdf - (x >= y).double()).square(), x))
    assert metrics.crps_gaussian([mean], [std**2], [y]) == pytest.approx(integral, abs=5e-4)


def test_against_scikit_learn_torchmetrics_and_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, y = torch.randn(2, 300, 2, generator=generator, dtype=torch.float64)
    var = torch.rand(300, 2, generator=generator, dtype=torch.float64) + 0.1
    assert metrics.rmse(mean, y) == pytest.approx(root_mean_squared_error(y.ravel(), mean.ravel()), abs=1e-12)
    log_density = torch.distributions.Normal(mean, var.sqrt()).log_prob(y).mean()
    assert metrics.gaussian_nll(mean, var, y) == pytest.approx(-float(log_density), abs=1e-12)
    few = slice(0, 80)
    draws = mean[few, :1] + var[few, :1].sqrt() * torch.randn(80, 500, generator=generator)
    sampled = continuous_ranked_probability_score(draws, y[few, 0])
    exact = metrics.crps_gaussian(mean[few, 0], var[few, 0], y[few, 0])
    assert exact == pytest.approx(float(sampled), abs=0.01)


@pytest.mark.parametrize("level", [0.5, 0.8, 0.95])
def test_coverage_of_the_true_model_is_the_level(level: float) -> None:
    rng = np.random.default_rng(0)
    std = rng.uniform(0.5, 2, 20_000)
    y = 3 + std * rng.standard_normal(20_000)
    coverage = metrics.interval_coverage(np.full(20_000, 3.0), std**2, y, level)
    assert coverage == pytest.approx(level, abs=4 * math.sqrt(level * (1 - level) / 20_000))


def test_variance_zero() -> None:
    zero = torch.zeros(2)
    assert metrics.crps_gaussian(zero, zero, torch.tensor([0.0, -3.0])) == 1.5  # the absolute error
    assert metrics.interval_coverage(zero, zero, torch.tensor([0.0, -3.0])) == 0.5
    with pytest.raises(InputError, match=r"got var with 2 zeros.*var_with_noise"):
        metrics.gaussian_nll(zero, zero, zero)


def test_errors() -> None:
    with pytest.raises(InputError, match=r"got shapes mean \(2,\), y \(2, 1\); wanted the same shape"):
        metrics.rmse(MEAN, Y[:, None])
    for metric in (metrics.gaussian_nll, metrics.crps_gaussian, metrics.interval_coverage):
        with pytest.raises(InputError, match=r"got shapes mean \(2,\), var \(2, 1\)"):
            metric(MEAN, VAR[:, None], Y)
        with pytest.raises(InputError, match=r"1 negative values .least -1.; .*var.exp"):
            metric(MEAN, torch.tensor([-1.0, 1.0]), Y)
        with pytest.raises(InputError, match="1 NaN among the 2 values of y"):
            metric(MEAN, VAR, torch.tensor([float("nan"), 0.0]))
        with pytest.raises(InputError, match="1 infinite among the 2 values of mean"):
            metric(torch.tensor([float("inf"), 0.0]), VAR, Y)
        with pytest.raises(InputError, match="which is empty"):
            metric([], [], [])
    for level in (0.0, 1.0, 95.0):
        with pytest.raises(InputError, match="wanted a share strictly between 0 and 1"):
            metrics.interval_coverage(MEAN, VAR, Y, level)
