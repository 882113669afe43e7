"""Probabilities, entropies and scores against direct formulas, numerical integration and dense determinants."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Dirichlet, MultivariateNormal, Normal
from torch.utils._python_dispatch import TorchDispatchMode

from cases import normal
from oracles import probit_probs
from scalla import SCORES, InputError, NumericalWarning, Prediction
from scalla.predictive import gaussian_entropy, log_mean_softmax, mean_softmax, ood_score, psd_cholesky, psd_logdet

NUM_INPUTS = 5


def prediction(
    num_outputs: int = 3, rank: int = 7, *, num_samples: int = 40, scale: float = 1.0, **options: Any
) -> Any:
    mean = normal(NUM_INPUTS, num_outputs, seed=1, dtype=torch.float64)
    factor = scale * normal(NUM_INPUTS, num_outputs, rank, seed=2, dtype=torch.float64)
    noise = normal(rank, num_samples, seed=3, dtype=torch.float64)
    return Prediction(mean, factor, noise=noise, **options)


def dense_cov(found: Prediction) -> Tensor:
    return torch.stack([a.double() @ a.double().T for a in found.factor])


def sigmoid_mean(mean: float, var: float) -> float:
    """∫ σ(f) N(f; mean, var) df by Gauss–Hermite quadrature."""
    nodes, weights = np.polynomial.hermite.hermgauss(80)
    f = mean + math.sqrt(2 * var) * nodes
    return float((weights / (1 + np.exp(-f))).sum() / math.sqrt(math.pi))


# ---------------------------------------------------------------- moments


def test_moments_are_those_of_the_factor() -> None:
    found = prediction(noise_var=torch.tensor([0.25], dtype=torch.float64), likelihood="regression")
    cov = dense_cov(found)
    torch.testing.assert_close(found.cov, cov, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.var, cov.diagonal(dim1=-2, dim2=-1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.var_with_noise, found.var + 0.25, rtol=1e-12, atol=0)
    assert len(found) == NUM_INPUTS


def test_a_prediction_from_samples_has_their_moments() -> None:
    samples = normal(50, NUM_INPUTS, 3, dtype=torch.float64)
    found = Prediction.from_samples(samples)
    torch.testing.assert_close(found.mean, samples.mean(0), rtol=1e-12, atol=1e-12)
    for i in range(NUM_INPUTS):
        torch.testing.assert_close(found.cov[i], torch.cov(samples[:, i].T), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.probs, samples.softmax(-1).mean(0), rtol=1e-12, atol=0)
    assert torch.equal(Prediction.from_samples(samples[:1]).var, torch.zeros(NUM_INPUTS, 3, dtype=torch.float64))


def test_fewer_samples_than_outputs_give_the_entropy_of_the_dimensions_they_span() -> None:
    samples = normal(4, NUM_INPUTS, 6, dtype=torch.float64)
    found = Prediction.from_samples(samples)
    for i in range(NUM_INPUTS):
        values = torch.linalg.eigvalsh(torch.cov(samples[:, i].T))[-3:]
        wanted = 0.5 * (2 * math.pi * math.e * values).log().sum()
        assert float(found.gaussian_entropy[i]) == pytest.approx(float(wanted), rel=1e-10)


def test_samples_of_a_single_logit_average_the_sigmoid() -> None:
    samples = normal(150, NUM_INPUTS, 1, dtype=torch.float64)
    found = Prediction.from_samples(samples)
    torch.testing.assert_close(found.probs, samples.sigmoid().mean(0), rtol=1e-12, atol=0)


def test_a_prediction_from_a_gaussian_has_its_covariance() -> None:
    mean, cov = prediction().mean, dense_cov(prediction())
    noise = normal(3, 20, dtype=torch.float64)
    found = Prediction.from_gaussian(mean, cov, noise=noise)
    torch.testing.assert_close(found.cov, cov, rtol=1e-10, atol=1e-12)
    lower = torch.linalg.cholesky(cov)
    samples = torch.stack([mean + (lower @ eps) for eps in noise.T])
    torch.testing.assert_close(found.probs, samples.softmax(-1).mean(0), rtol=1e-10, atol=0)


# ---------------------------------------------------------------- links


@pytest.mark.parametrize("num_outputs", [1, 2, 5])
@pytest.mark.parametrize("num_samples", [1, 16, 40])
def test_monte_carlo_is_the_mean_softmax_of_the_function_samples(num_outputs: int, num_samples: int) -> None:
    found = prediction(num_outputs, link="mc", num_samples=num_samples)
    total = torch.zeros(NUM_INPUTS, num_outputs, dtype=torch.float64)
    for eps in found.noise.T:
        f = found.mean + found.factor @ eps
        total += f.softmax(-1) if num_outputs > 1 else f.sigmoid()
    torch.testing.assert_close(found.probs, total / num_samples, rtol=1e-12, atol=0)


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_monte_carlo_converges_to_the_integral(num_outputs: int) -> None:
    found = prediction(num_outputs, link="mc", num_samples=50_000)
    for i in range(NUM_INPUTS):
        if num_outputs == 1:
            mean, var = found.mean[i, 0], found.var[i, 0]
        else:  # the softmax of two logits is the sigmoid of their difference
            mean, var = found.mean[i, 1] - found.mean[i, 0], (found.factor[i, 1] - found.factor[i, 0]).square().sum()
        assert float(found.probs[i, -1]) == pytest.approx(
            sigmoid_mean(float(mean), float(var)), abs=4 * 0.5 / 50_000**0.5
        )


@pytest.mark.parametrize("num_outputs", [2, 5])
def test_probit_scales_the_logits(num_outputs: int) -> None:
    found = prediction(num_outputs)
    torch.testing.assert_close(found.probs, probit_probs(found.mean, dense_cov(found)), rtol=1e-12, atol=0)


def test_probit_of_a_single_logit_is_close_to_the_integral() -> None:
    found = prediction(1)
    for mean, var, prob in zip(found.mean[:, 0], found.var[:, 0], found.probs[:, 0], strict=True):
        assert float(prob) == pytest.approx(float(torch.sigmoid(mean / torch.sqrt(1 + math.pi / 8 * var))), rel=1e-12)
        assert float(prob) == pytest.approx(sigmoid_mean(float(mean), float(var)), abs=0.02)


def gaussian_of_dirichlet(alpha: Tensor) -> tuple[Tensor, Tensor]:
    """The Laplace approximation of a Dirichlet in the softmax basis, by its definition (MacKay 1998)."""
    size = len(alpha)
    mean = alpha.log() - alpha.log().mean()
    cov = torch.zeros(size, size, dtype=torch.float64)
    for k in range(size):
        for l in range(size):
            cov[k, l] = (k == l) / alpha[k] - (1 / alpha[k] + 1 / alpha[l] - (1 / alpha).sum() / size) / size
    return mean, cov


@pytest.mark.parametrize("num_outputs", [2, 3, 10])
@pytest.mark.parametrize("common", [0.0, 3.0, 1e8])
def test_the_bridge_finds_the_dirichlet_again(num_outputs: int, common: float) -> None:
    """Also under any variance of the direction in which all logits move together, which a softmax does not see."""
    alpha = normal(num_outputs, dtype=torch.float64).exp() * 2
    mean, cov = gaussian_of_dirichlet(alpha)
    values, vectors = torch.linalg.eigh(cov)
    factor = torch.cat([vectors * values.clamp_min(0).sqrt(), torch.full((num_outputs, 1), common)], -1)
    found = Prediction(mean[None], factor[None], link="bridge")
    torch.testing.assert_close(found.probs[0], Dirichlet(alpha).mean, rtol=1e-6, atol=0)


def test_the_bridge_survives_a_large_common_variance_in_float32() -> None:
    alpha = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
    mean, cov = gaussian_of_dirichlet(alpha)
    values, vectors = torch.linalg.eigh(cov)
    factor = torch.cat([vectors * values.clamp_min(0).sqrt(), torch.full((4, 1), 1e3)], -1)
    found = Prediction(mean[None].float(), factor[None].float(), link="bridge")
    torch.testing.assert_close(found.probs[0], Dirichlet(alpha).mean.float(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("constant", [0.0, 5.0])
def test_without_common_variance_a_constant_moves_no_bridge(constant: float, dtype: torch.dtype) -> None:
    """Σ 1 = 0 but for rounding, which must not be taken for a direction of its own."""
    alpha = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
    mean, cov = gaussian_of_dirichlet(alpha)
    values, vectors = torch.linalg.eigh(cov)
    factor = (vectors * values.clamp_min(0).sqrt())[:, 1:]
    found = Prediction((mean + constant)[None].to(dtype), factor[None].to(dtype), link="bridge")
    torch.testing.assert_close(found.probs[0], Dirichlet(alpha).mean.to(dtype), rtol=1e-5, atol=0)


@pytest.mark.parametrize("normalise", [False, True])
def test_the_bridge_is_its_formula(normalise: bool) -> None:
    found = prediction(4, link="bridge_norm" if normalise else "bridge")
    one = torch.ones(4, dtype=torch.float64)
    for f, cov, probs in zip(found.mean, dense_cov(found), found.probs, strict=True):
        f = f - cov @ one * f.sum() / (one @ cov @ one)
        cov = cov - torch.outer(cov @ one, cov @ one) / (one @ cov @ one)
        if normalise:
            scale = cov.diagonal().mean() / math.sqrt(4 / 2)
            f, cov = f / scale.sqrt(), cov / scale
        alpha = (1 - 2 / 4 + f.exp() * (-f).exp().sum() / 16) / cov.diagonal()
        torch.testing.assert_close(probs, alpha / alpha.sum(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("link", ["probit", "mc"])
@pytest.mark.parametrize("num_outputs", [1, 3])
def test_without_variance_the_probabilities_are_the_networks(link: Any, num_outputs: int) -> None:
    found = prediction(num_outputs, link=link, scale=0.0)
    wanted = found.mean.softmax(-1) if num_outputs > 1 else found.mean.sigmoid()
    torch.testing.assert_close(found.probs, wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("link", ["probit", "mc", "bridge", "bridge_norm"])
@pytest.mark.parametrize("num_outputs", [1, 2, 4])
def test_probabilities_sum_to_one_and_log_probs_are_their_logarithms(link: Any, num_outputs: int) -> None:
    found = prediction(num_outputs, link=link)
    assert found.probs.shape == found.log_probs.shape == (NUM_INPUTS, num_outputs)
    assert bool(((found.probs > 0) & (found.probs < 1)).all())
    if num_outputs > 1:
        torch.testing.assert_close(found.probs.sum(-1), torch.ones(NUM_INPUTS, dtype=torch.float64))
    torch.testing.assert_close(found.log_probs, found.probs.log(), rtol=1e-9, atol=1e-12)
    labels = torch.arange(NUM_INPUTS) % max(num_outputs, 2)
    both = torch.cat([1 - found.probs, found.probs], -1) if num_outputs == 1 else found.probs
    wanted = torch.stack([p[int(c)] for p, c in zip(both, labels, strict=True)]).log()
    torch.testing.assert_close(found.log_prob(labels), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("link", ["probit", "mc"])
@pytest.mark.parametrize("num_outputs", [1, 3])
def test_log_probs_are_finite_where_probabilities_round_to_zero(
    link: Any, num_outputs: int, dtype: torch.dtype
) -> None:
    mean = torch.tensor([[-1e4, 1e4, 0.0]], dtype=dtype)[:, :num_outputs]
    found = Prediction(
        mean, torch.zeros(1, num_outputs, 2, dtype=dtype), link=link, noise=torch.ones(2, 3, dtype=dtype)
    )
    wrong = torch.tensor([0 if num_outputs > 1 else 1])
    assert float(found.log_prob(wrong)) == pytest.approx(-2e4 if num_outputs > 1 else -1e4)
    assert bool(torch.isfinite(found.log_probs).all())
    assert float(found.entropy) == 0.0
    assert float(found.mutual_information) == 0.0


def test_log_prob_of_a_regression_is_the_gaussian_density_with_noise() -> None:
    found = prediction(2, likelihood="regression", noise_var=torch.tensor([0.5, 2.0], dtype=torch.float64))
    y = normal(NUM_INPUTS, 2, seed=9, dtype=torch.float64)
    wanted = torch.zeros(NUM_INPUTS, dtype=torch.float64)
    for c, noise in enumerate((0.5, 2.0)):
        spread = (dense_cov(found)[:, c, c] + noise).sqrt()
        wanted += Normal(found.mean[:, c], spread).log_prob(y[:, c])
    torch.testing.assert_close(found.log_prob(y), wanted, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- entropies


def shannon(probs: Sequence[float]) -> float:
    return -sum(p * math.log(p) for p in probs if p > 0)


@pytest.mark.parametrize("link", ["probit", "mc"])
@pytest.mark.parametrize("num_outputs", [1, 4])
def test_entropy_is_shannons(link: Any, num_outputs: int) -> None:
    found = prediction(num_outputs, link=link)
    for probs, entropy in zip(found.probs, found.entropy, strict=True):
        every = probs.tolist() if num_outputs > 1 else [1 - float(probs), float(probs)]
        assert float(entropy) == pytest.approx(shannon(every), rel=1e-9)
    torch.testing.assert_close(
        found.max_prob, found.probs.amax(-1) if num_outputs > 1 else torch.maximum(found.probs, 1 - found.probs)[:, 0]
    )


def test_entropy_of_certainty_is_zero_and_of_ignorance_log_c() -> None:
    mean = torch.tensor([[1e4, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.float32)
    found = Prediction(mean, torch.zeros(2, 4, 3))
    assert float(found.entropy[0]) == 0.0
    assert float(found.entropy[1]) == pytest.approx(math.log(4), rel=1e-6)


@pytest.mark.parametrize(("num_outputs", "rank"), [(1, 1), (1, 6), (3, 3), (3, 9), (4, 2), (6, 5), (50, 4)])
def test_gaussian_entropy_is_that_of_the_support(num_outputs: int, rank: int) -> None:
    found = prediction(num_outputs, rank)
    for entropy, cov in zip(found.gaussian_entropy, dense_cov(found), strict=True):
        dims = min(num_outputs, rank)
        largest = torch.linalg.eigvalsh(cov)[-dims:]
        wanted = 0.5 * (largest.log().sum() + dims * math.log(2 * math.pi * math.e))
        assert float(entropy) == pytest.approx(float(wanted), rel=1e-9, abs=1e-9)
        if rank >= num_outputs:
            reference = MultivariateNormal(torch.zeros(num_outputs, dtype=torch.float64), cov).entropy()
            assert float(entropy) == pytest.approx(float(reference), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("num_outputs", "rank"), [(2, 1), (3, 2), (3, 9), (4, 2), (6, 5), (6, 4), (50, 4)])
def test_projected_entropy_leaves_out_the_common_direction(num_outputs: int, rank: int) -> None:
    found = prediction(num_outputs, rank)
    one = torch.ones(num_outputs, 1, dtype=torch.float64)
    basis = torch.linalg.qr(torch.cat([one, torch.eye(num_outputs, dtype=torch.float64)[:, 1:]], -1))[0][:, 1:]
    dims = min(num_outputs - 1, rank)
    for entropy, cov in zip(found.gaussian_entropy_projected, dense_cov(found), strict=True):
        inside = basis.T @ cov @ basis
        if dims == num_outputs - 1:
            log_det = torch.linalg.slogdet(inside)[1]
        else:
            log_det = torch.linalg.eigvalsh(inside)[-dims:].log().sum()
        assert float(entropy) == pytest.approx(float(0.5 * (log_det + dims * math.log(2 * math.pi * math.e))), rel=1e-9)


def test_projected_entropy_does_not_see_the_common_direction() -> None:
    found = prediction(3, 6)
    shifted = torch.cat([found.factor, torch.full((NUM_INPUTS, 3, 1), 100.0, dtype=torch.float64)], -1)
    torch.testing.assert_close(
        gaussian_entropy(shifted, project_common=True), found.gaussian_entropy_projected, rtol=1e-9, atol=1e-9
    )
    assert bool((gaussian_entropy(shifted) > found.gaussian_entropy + 3).all())
    with pytest.raises(InputError, match="no direction left"):
        gaussian_entropy(found.factor[:, :1], project_common=True)


def test_gaussian_entropy_is_computed_in_float64() -> None:
    """Two outputs that agree to 1e-6: their float32 Gram matrix is singular, the float64 one is not."""
    factor = torch.tensor([[[1.0, 0.0], [1.0, 2**-20]]], dtype=torch.float32)
    wanted = 0.5 * math.log(2.0**-40) + math.log(2 * math.pi * math.e)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(gaussian_entropy(factor)) == pytest.approx(wanted, rel=1e-6)


def test_without_a_posterior_the_gaussian_entropy_says_nothing() -> None:
    assert torch.equal(gaussian_entropy(torch.zeros(4, 3, 0)), torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("link", ["probit", "mc"])
@pytest.mark.parametrize("num_outputs", [1, 4])
def test_mutual_information_is_entropy_of_the_mean_less_mean_entropy(link: Any, num_outputs: int) -> None:
    found = prediction(num_outputs, link=link)
    for i in range(NUM_INPUTS):
        every = []
        for eps in found.noise.T:
            f = found.mean[i] + found.factor[i] @ eps
            every.append(f.softmax(-1).tolist() if num_outputs > 1 else [float(f.sigmoid()), 1 - float(f.sigmoid())])
        mean = [sum(column) / len(every) for column in zip(*every, strict=True)]
        wanted = shannon(mean) - sum(shannon(p) for p in every) / len(every)
        assert float(found.mutual_information[i]) == pytest.approx(wanted, abs=1e-10)
        assert wanted > 0


def test_mutual_information_is_never_negative() -> None:
    """Rounding would make it so, where all functions agree."""
    mean = normal(2000, 10, dtype=torch.float32) * 5
    found = Prediction(mean, 1e-6 * normal(2000, 10, 4), noise=normal(4, 30))
    assert float(found.mutual_information.min()) >= 0
    assert float(found.mutual_information.max()) < 1e-5


# ---------------------------------------------------------------- scores


@pytest.mark.parametrize("score", SCORES)
def test_every_score_is_larger_further_out(score: str) -> None:
    """Inside: a sure class and little variance. Outside: no class stands out, and the functions disagree."""
    inside = Prediction(torch.tensor([[6.0, 0, 0]]), 0.1 * normal(1, 3, 5), noise=normal(5, 200))
    outside = Prediction(torch.tensor([[0.3, 0, 0]]), 2.0 * normal(1, 3, 5), noise=normal(5, 200))
    assert float(ood_score(outside, score)) > float(ood_score(inside, score)) + 1e-3


def test_scores_are_what_their_names_say() -> None:
    found = prediction()
    wanted = {
        "predictive_entropy": found.entropy,
        "gaussian_entropy": found.gaussian_entropy,
        "gaussian_entropy_projected": found.gaussian_entropy_projected,
        "mutual_information": found.mutual_information,
        "max_prob": 1 - found.probs.amax(-1),
        "variance": dense_cov(found).diagonal(dim1=-2, dim2=-1).sum(-1),
    }
    assert set(wanted) == set(SCORES)
    for name, value in wanted.items():
        torch.testing.assert_close(ood_score(found, name), value)


def test_scores_that_do_not_exist_are_refused() -> None:
    with pytest.raises(InputError, match="choose one of predictive_entropy"):
        ood_score(prediction(), "distance")
    regression = prediction(likelihood="regression")
    for name in SCORES:
        if name in ("gaussian_entropy", "variance"):
            assert ood_score(regression, name).shape == (NUM_INPUTS,)
        else:
            with pytest.raises(InputError, match="no class probabilities"):
                ood_score(regression, name)


# ---------------------------------------------------------------- the object


def test_a_prediction_is_frozen_and_computes_when_read() -> None:
    found = prediction(link="mc")
    fields = {f.name for f in dataclasses.fields(found)}
    assert set(vars(found)) == fields
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.mean = found.mean + 1
    first = found.probs
    assert set(vars(found)) == fields | {"probs", "_two_or_more_probs", "_monte_carlo"}
    assert found.probs is first


@pytest.mark.parametrize("name", ["probs", "log_probs", "entropy", "mutual_information", "max_prob"])
def test_a_regression_has_no_probabilities(name: str) -> None:
    with pytest.raises(AttributeError, match="likelihood='classification' only"):
        getattr(prediction(likelihood="regression"), name)


def test_what_is_missing_is_said() -> None:
    with pytest.raises(AttributeError, match="regression"):
        _ = prediction().var_with_noise
    with pytest.raises(InputError, match="n_samples > 0"):
        _ = Prediction(torch.zeros(1, 3), torch.zeros(1, 3, 2), link="mc").probs
    with pytest.raises(InputError, match="choose one of probit, mc"):
        prediction(link="laplace")
    for average in (mean_softmax, log_mean_softmax):
        with pytest.raises(InputError, match="n_samples > 0"):
            average([])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("link", ["probit", "mc", "bridge", "bridge_norm"])
def test_results_keep_the_dtype(link: Any, dtype: torch.dtype) -> None:
    found = Prediction(
        normal(4, 3, dtype=dtype), normal(4, 3, 6, dtype=dtype), link=link, noise=normal(6, 9, dtype=dtype)
    )
    names = ("probs", "log_probs", "entropy", "mutual_information", "var", "cov", "max_prob")
    assert {getattr(found, name).dtype for name in names} == {dtype}


class LargestTensor(TorchDispatchMode):
    """The most entries that any tensor has that is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor):
                self.entries = max(self.entries, t.numel())
        return out


@pytest.mark.parametrize("link", ["probit", "mc", "bridge"])
def test_with_a_thousand_classes_no_covariance_is_formed_unasked(link: Any) -> None:
    num_inputs, num_outputs, rank = 64, 1000, 20
    found = Prediction(
        normal(num_inputs, num_outputs), normal(num_inputs, num_outputs, rank), link=link, noise=normal(rank, 100)
    )
    with LargestTensor() as largest:
        for name in ("probs", "log_probs", "var", "entropy", "mutual_information", "max_prob"):
            assert bool(torch.isfinite(getattr(found, name)).all())
        for name in SCORES:
            assert ood_score(found, name).shape == (num_inputs,)
    assert largest.entries <= num_inputs * num_outputs * rank  # the factor itself
    with LargestTensor() as largest:
        assert found.cov.shape == (num_inputs, num_outputs, num_outputs)
    assert largest.entries == num_inputs * num_outputs**2  # the count above would have seen it


# ---------------------------------------------------------------- factorisation


def test_cholesky_is_exact_and_silent_where_it_can_be() -> None:
    matrix = dense_cov(prediction())
    factor = psd_cholesky(matrix)
    torch.testing.assert_close(factor @ factor.mT, matrix, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(psd_logdet(matrix), torch.linalg.slogdet(matrix)[1], rtol=1e-12, atol=1e-12)
    assert psd_cholesky(matrix.float()).dtype == torch.float64


def test_jitter_is_never_silent_and_names_its_size() -> None:
    singular = torch.ones(3, 3, dtype=torch.float64)
    with pytest.warns(NumericalWarning, match=r"added jitter of up to 1\.0e-1\d, 1e-1\d times .* 1 of 1 matrices"):
        factor = psd_cholesky(singular)
    torch.testing.assert_close(factor @ factor.mT, singular, rtol=1e-9, atol=1e-9)


def test_jitter_of_one_matrix_depends_on_no_other() -> None:
    """One that is nearly positive definite and one that needs a thousand times more stand in one batch."""
    nearly = torch.ones(3, 3, dtype=torch.float64) * 5
    far = torch.diag(torch.tensor([1.0, 1.0, -1e-6], dtype=torch.float64))
    fine = torch.eye(3, dtype=torch.float64)
    with pytest.warns(NumericalWarning, match="2 of 3 matrices"):
        together = psd_cholesky(torch.stack([nearly, far, fine]))
    with pytest.warns(NumericalWarning, match="1 of 1 matrices"):
        alone = psd_cholesky(nearly[None])
    assert torch.equal(together[0], alone[0])
    assert torch.equal(together[2], fine)


def test_a_matrix_of_zeros_has_a_finite_determinant() -> None:
    with pytest.warns(NumericalWarning):
        assert bool(torch.isfinite(psd_logdet(torch.zeros(2, 3, 3))).all())


def test_what_is_no_covariance_is_refused() -> None:
    with pytest.raises(InputError, match="NaN or infinite"):
        psd_cholesky(torch.full((2, 2), math.nan))
    with pytest.raises(InputError, match="not a covariance"):
        psd_cholesky(torch.diag(torch.tensor([1.0, -3.0])))
