"""The Gaussian over the feature weights and its evidence, against dense matrices and finite differences."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import loader, mlp, normal
from scalla import InputError, ScaLLA
from scalla.ggn import GGNSums
from scalla.posterior import Posterior

M = 6


def sums(levels: int = 1, *, rank: int = 12, scale: float = 1.0, num_data: int = 20, seed: int = 1) -> GGNSums:
    root = scale * normal(levels, rank, M, seed=seed, dtype=torch.float64)
    return GGNSums(root.mT @ root, 5 + torch.arange(levels, dtype=torch.float64), num_data)


def posterior(
    found: GGNSums | None = None,
    likelihood: Any = "classification",
    *,
    delta: float = 0.7,
    sigma: Any = 1.0,
    temperature: float = 1.0,
) -> Posterior:
    return Posterior(
        found or sums(),
        likelihood,
        num_outputs=3,
        prior_precision=torch.tensor(delta, dtype=torch.float64),
        sigma_noise=torch.tensor(sigma, dtype=torch.float64),
        temperature=temperature,
        weights_sq_norm=4.0,
        num_params=40,
    )


def dense_precision(found: GGNSums, sigma: Any, delta: float, temperature: float) -> Tensor:
    noise = torch.tensor(sigma, dtype=torch.float64).expand(len(found.ggn))
    total = sum(h / s**2 for h, s in zip(found.ggn, noise, strict=True))
    return total / temperature + delta * torch.eye(M, dtype=torch.float64)


SETTINGS: list[tuple[str, int, Any, float, float]] = [
    ("classification", 1, 1.0, 0.7, 1.0),
    ("classification", 1, 1.0, 1e-3, 3.0),
    ("regression", 3, 0.5, 0.7, 1.0),
    ("regression", 3, (0.5, 1.0, 4.0), 0.7, 0.2),
]


@pytest.mark.parametrize(("likelihood", "levels", "sigma", "delta", "temperature"), SETTINGS)
def test_precision_covariance_and_factor_belong_together(
    likelihood: str, levels: int, sigma: Any, delta: float, temperature: float
) -> None:
    data = sums(levels)
    found = posterior(data, likelihood, sigma=sigma, delta=delta, temperature=temperature)
    wanted = dense_precision(data, sigma, delta, temperature)
    torch.testing.assert_close(found.precision, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.covariance, torch.linalg.inv(wanted), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.factor @ found.factor.mT, found.covariance, rtol=1e-12, atol=1e-14)
    log_det = torch.linalg.slogdet(wanted / delta)[1]
    torch.testing.assert_close(found.log_det_ratio(), log_det, rtol=1e-10, atol=0)
    torch.testing.assert_close(found.scatter(), torch.tensor(4 * delta, dtype=torch.float64))


def test_log_likelihood_of_a_classification_is_minus_the_loss_over_the_temperature() -> None:
    assert float(posterior(temperature=2.0).log_likelihood()) == -5.0 / 2


def test_log_likelihood_of_a_regression_counts_each_output_with_its_noise() -> None:
    found = posterior(sums(3), "regression", sigma=(0.5, 1.0, 4.0), temperature=2.0)
    wanted = sum(
        -loss / (2 * s**2) / 2.0 - 20 * (math.log(s) + 0.5 * math.log(2 * math.pi))
        for loss, s in zip((5.0, 6.0, 7.0), (0.5, 1.0, 4.0), strict=True)
    )
    assert float(found.log_likelihood()) == pytest.approx(wanted, rel=1e-12)


def test_configuring_equals_building_anew() -> None:
    found = posterior(sums(3), "regression")
    found.configure(sigma_noise=torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64))
    found.configure(prior_precision=torch.tensor(0.02, dtype=torch.float64), temperature=3.0)
    wanted = posterior(sums(3), "regression", sigma=(0.5, 1.0, 4.0), delta=0.02, temperature=3.0)
    assert torch.equal(found.factor, wanted.factor)
    assert torch.equal(found.log_marginal_likelihood(), wanted.log_marginal_likelihood())


@pytest.mark.parametrize("delta", [1e-12, 1e-3, 1.0, 1e12])
def test_directions_without_data_keep_the_prior_variance_exactly(delta: float) -> None:
    """H of rank 2 in six dimensions, of a size whose rounding is a thousand times the smallest prior precision."""
    data = sums(rank=2, scale=30.0)
    found = posterior(data, delta=delta)
    assert int((found.eigenvalues > 0).sum()) == 2
    null = torch.linalg.eigh(data.ggn[0])[1][:, : M - 2]
    inside = null.mT @ found.covariance @ null
    torch.testing.assert_close(inside, torch.eye(M - 2, dtype=torch.float64) / delta, rtol=1e-6, atol=1e-6 / delta)


def test_without_data_the_posterior_is_the_prior() -> None:
    empty = GGNSums(torch.zeros(1, M, M, dtype=torch.float64), torch.zeros(1, dtype=torch.float64), 0)
    found = posterior(empty, delta=0.25)
    torch.testing.assert_close(found.covariance, 4 * torch.eye(M, dtype=torch.float64))
    assert float(found.log_det_ratio()) == 0
    assert float(found.log_marginal_likelihood()) == -0.5 * 0.25 * 4


def test_moving_keeps_float64() -> None:
    found = posterior()
    before = found.factor
    for moved in (found.to(torch.float32), found.half(), found.to("cpu"), found.float()):
        assert moved is found
        assert {t.dtype for t in (found.ggn, found.loss, found.factor, found.precision)} == {torch.float64}
        assert torch.equal(found.factor, before)


# ---------------------------------------------------------------- evidence


@pytest.mark.parametrize(("likelihood", "levels", "sigma", "delta", "temperature"), SETTINGS)
def test_the_evidence_is_differentiable(
    likelihood: Any, levels: int, sigma: Any, delta: float, temperature: float
) -> None:
    """In δ and in every σ, against finite differences."""
    found = posterior(sums(levels), likelihood, sigma=sigma, delta=delta, temperature=temperature)
    at = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda d: found.log_marginal_likelihood(d), (at,), rtol=1e-6)
    if likelihood == "regression":
        noise = (torch.tensor(sigma, dtype=torch.float64) + 0.2).requires_grad_()
        assert torch.autograd.gradcheck(lambda d, s: found.log_marginal_likelihood(d, s), (at, noise), rtol=1e-6)


@pytest.mark.parametrize("rank", [0, 2])
def test_the_evidence_of_a_singular_precision_is_differentiable(rank: int) -> None:
    """Equal eigenvalues must not make the gradient NaN."""
    found = posterior(sums(3, rank=rank), "regression")
    delta, sigma = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.3, 0.5))
    assert torch.autograd.gradcheck(lambda d, s: found.log_marginal_likelihood(d, s), (delta, sigma), rtol=1e-6)


def test_trial_values_equal_set_values() -> None:
    trial = posterior(sums(3), "regression").log_marginal_likelihood(
        torch.tensor(0.1, dtype=torch.float64), torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
    )
    wanted = posterior(sums(3), "regression", delta=0.1, sigma=(0.5, 1.0, 4.0)).log_marginal_likelihood()
    torch.testing.assert_close(trial, wanted, rtol=1e-12, atol=0)


# ---------------------------------------------------------------- adding and taking away


def test_adding_and_taking_away_are_sums() -> None:
    found, more = posterior(sums(3), "regression"), sums(3, seed=9, num_data=4)
    found.plus(more, +1)
    assert found.num_data == 24
    torch.testing.assert_close(found.ggn, sums(3).ggn + more.ggn)
    torch.testing.assert_close(found.loss, sums(3).loss + more.loss)
    found.plus(more, -1)
    assert found.num_data == 20
    torch.testing.assert_close(found.precision, posterior(sums(3), "regression").precision, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_the_order_of_adding_and_taking_away_does_not_matter(order: tuple[int, ...]) -> None:
    """+b, +c and −a in any order on a posterior of a: that of b and c."""
    a, b, c = (sums(3, seed=seed, num_data=seed, scale=scale) for seed, scale in ((1, 1.0), (2, 0.1), (3, 10.0)))
    found = posterior(a, "regression")
    for step in order:
        found.plus(*((b, +1), (c, +1), (a, -1))[step])
    wanted = posterior(GGNSums(b.ggn + c.ggn, b.loss + c.loss, 5), "regression")
    assert found.num_data == 5
    torch.testing.assert_close(found.precision, wanted.precision, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found.log_marginal_likelihood(), wanted.log_marginal_likelihood(), rtol=1e-12, atol=0)


def test_taking_all_away_leaves_exactly_nothing() -> None:
    found = posterior()
    found.plus(sums(seed=2, num_data=7), +1)
    found.plus(GGNSums(found.ggn * (1 - 1e-15), found.loss, found.num_data), -1)
    assert found.num_data == 0
    assert not bool(found.ggn.any())
    assert not bool(found.loss.any())


@pytest.mark.parametrize("found", [sums(scale=2.0, num_data=3), sums(num_data=21), sums(seed=2, num_data=2)])
def test_what_is_not_in_the_posterior_cannot_be_taken_away(found: GGNSums) -> None:
    before = posterior()
    with pytest.raises(InputError, match="Forget only what was given"):
        before.plus(found, -1)
    assert torch.equal(before.factor, posterior().factor)
    assert before.num_data == 20


# ---------------------------------------------------------------- through ScaLLA


def fitted(likelihood: Any = "classification", num_outputs: int = 3, **options: Any) -> ScaLLA:
    x = normal(20, 2)
    y = torch.arange(20) % 3 if likelihood == "classification" else normal(20, num_outputs, seed=3)
    return ScaLLA(mlp(num_outputs), likelihood, num_features=M, **options).fit(loader(x, y), num_steps=2)


def test_the_evidence_mutates_nothing() -> None:
    la = fitted("regression", sigma_noise=torch.tensor([0.5, 1.0, 2.0]))
    before = {k: v.clone() for k, v in la.state_dict().items()}
    variance, evidence = la.functional_variance(normal(4, 2)), la.log_marginal_likelihood()
    delta = torch.tensor(3.0, requires_grad=True)
    sigma = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
    found = la.log_marginal_likelihood(delta, sigma)
    found.backward()
    assert bool(torch.isfinite(delta.grad).all() & torch.isfinite(sigma.grad).all())  # type: ignore[arg-type]
    assert float(found.detach()) != float(evidence)
    assert torch.equal(la.log_marginal_likelihood(), evidence)
    assert torch.equal(la.functional_variance(normal(4, 2)), variance)
    after = la.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[k], v) for k, v in before.items())


def test_settings_are_kept_in_float64() -> None:
    la = fitted("regression", prior_precision=0.1, sigma_noise=0.3, temperature=0.7)
    assert float(la.prior_precision) == 0.1
    assert float(la.sigma_noise) == 0.3
    assert la.temperature == 0.7
    la.prior_precision, la.sigma_noise = 0.2, [0.1, 0.2, 0.3]  # type: ignore[assignment]
    assert float(la.prior_precision) == 0.2
    assert la.sigma_noise.tolist() == [0.1, 0.2, 0.3]


def test_attributes_say_what_was_fitted() -> None:
    la = fitted()
    assert (la.n_data, la.n_outputs, la.n_params) == (20, 3, 33)
    assert la.posterior_precision.shape == la.posterior_covariance.shape == (M, M)
    identity = la.posterior_precision @ la.posterior_covariance
    torch.testing.assert_close(identity, torch.eye(M, dtype=torch.float64), rtol=0, atol=1e-9)
    total = la.log_likelihood - 0.5 * (la.log_det_ratio + la.scatter)
    torch.testing.assert_close(la.log_marginal_likelihood(), total)
    assert "20 inputs" in repr(la)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, "much", None, torch.ones(0)])
@pytest.mark.parametrize("name", ["prior_precision", "temperature", "sigma_noise"])
def test_settings_that_are_not_positive_are_refused(name: str, value: Any) -> None:
    la = fitted("regression")
    before = la.functional_variance(normal(4, 2))
    with pytest.raises(InputError, match=name):
        setattr(la, name, value)
    with pytest.raises(InputError, match=name):
        ScaLLA(mlp(3), "regression", **{name: value})
    assert torch.equal(la.functional_variance(normal(4, 2)), before)


def test_settings_of_the_wrong_size_are_refused() -> None:
    with pytest.raises(InputError, match="give one number"):
        ScaLLA(mlp(), prior_precision=torch.ones(3))
    with pytest.raises(InputError, match="2 entries for 3 outputs"):
        fitted("regression", sigma_noise=torch.ones(2))
    la = fitted("regression")
    with pytest.raises(InputError, match="2 entries for 3 outputs"):
        la.sigma_noise = torch.ones(2)
    assert la.sigma_noise.shape == ()
    with pytest.raises(InputError, match="no observation noise"):
        ScaLLA(mlp(), "classification", sigma_noise=0.5)
    with pytest.raises(InputError, match="no observation noise"):
        fitted().log_marginal_likelihood(sigma_noise=1.0)
    with pytest.raises(InputError, match="prior_precision"):
        fitted().log_marginal_likelihood(prior_precision=-1.0)
