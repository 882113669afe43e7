"""The published evaluation, against a small direct computation with loops."""

import math

import pytest
import torch
from made_methods import GaussianMethod, SamplingMethod
from tiny_images import tiny_images
from torch import Tensor

from scalla.baselines.protocol import function_noise
from scalla.benchmark.as_published import double_softmax_entropy, transposed_probs
from scalla.benchmark.measure import measure, outputs_of
from scalla.metrics import auroc
from scalla.metrics import nll as nll_of

SAMPLES = 50


def directly(method: GaussianMethod, x: Tensor, samples: int) -> Tensor:
    """One input and one sample after the other: f + Lᵀ ε with L the lower Cholesky factor."""
    prediction = method.predict(x, n_samples=1)
    noise = function_noise(10, samples, seed=0, generator=None, like=prediction.mean)
    found = []
    for mean, factor in zip(prediction.mean, prediction.factor, strict=True):
        lower = torch.linalg.cholesky(factor @ factor.T)
        draws = [torch.softmax(mean + lower.T @ noise[:, s], 0) for s in range(samples)]
        found.append(torch.stack(draws).mean(0))
    return torch.stack(found)


def test_transposed_factor() -> None:
    method, x = GaussianMethod(), tiny_images().test[0]
    found = transposed_probs(method.predict(x, n_samples=1), num_samples=SAMPLES)
    torch.testing.assert_close(found, directly(method, x, SAMPLES), atol=1e-7, rtol=0)


def test_transposed_samples_have_covariance_ltl_and_not_llt() -> None:
    """What the difference is: the second moments of f + Lᵀ ε."""
    prediction = GaussianMethod().predict(tiny_images().test[0][:1], n_samples=1)
    lower = torch.linalg.cholesky(prediction.cov[0])
    noise = function_noise(10, 200_000, seed=0, generator=None, like=lower)
    found = torch.cov(lower.T @ noise)
    torch.testing.assert_close(found, lower.T @ lower, atol=0.05 * float(lower.square().max()), rtol=0)
    assert float((found - prediction.cov[0]).norm() / prediction.cov[0].norm()) > 0.3


def test_more_inputs_than_a_chunk_give_the_same() -> None:
    method, x = GaussianMethod(), tiny_images().test[0]
    whole = outputs_of(method, x, num_samples=SAMPLES, transposed=True).transposed
    parts = outputs_of(method, x, num_samples=SAMPLES, transposed=True, chunk=3).transposed
    assert whole is not None
    assert parts is not None
    torch.testing.assert_close(parts, whole, atol=1e-12, rtol=0)


def test_double_softmax_by_hand() -> None:
    probs = torch.tensor([[0.7, 0.2, 0.1], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64)
    again = [math.exp(p) for p in (0.7, 0.2, 0.1)]
    again = [a / sum(again) for a in again]
    expected = torch.tensor([-sum(a * math.log(a) for a in again), math.log(3)], dtype=torch.float64)
    torch.testing.assert_close(double_softmax_entropy(probs), expected, atol=1e-12, rtol=0)


def test_columns() -> None:
    method, images = GaussianMethod(), tiny_images()
    found = measure(method, images, num_samples=SAMPLES, published=True)["metrics"]["as_published"]
    probs = directly(method, images.test[0], SAMPLES)
    outside = directly(method, images.out["KMNIST"], SAMPLES)
    assert found["nll"] == pytest.approx(nll_of(probs, images.test[1]), rel=1e-6)
    assert found["accuracy"] == pytest.approx(float((probs.argmax(-1) == images.test[1]).double().mean()))
    assert found["auc"]["KMNIST"] == auroc(double_softmax_entropy(probs), double_softmax_entropy(outside))
    assert set(found["auc"]) == set(images.out)


@pytest.mark.parametrize("method", [GaussianMethod(rank=0), SamplingMethod()])
def test_without_a_gaussian_there_is_nothing_to_transpose(method: GaussianMethod) -> None:
    assert measure(method, tiny_images(), num_samples=4, published=True)["metrics"]["as_published"] is None


def test_only_where_it_is_asked_for() -> None:
    assert measure(GaussianMethod(), tiny_images(), num_samples=4)["metrics"]["as_published"] is None
