"""The published evaluation, against a small direct computation with loops."""

import math

import pytest
import torch
from made_methods import GaussianMethod, SamplingMethod
from tiny_images import tiny_images
from torch import Tensor

from scalla.baselines.protocol import function_noise
from scalla.benchmark.as_published import as_published, double_softmax_entropy, transposed_probs
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
    torch.testing.assert_close(
        transposed_probs(method, x, num_samples=SAMPLES), directly(method, x, SAMPLES), atol=1e-7, rtol=0
    )


def test_transposed_samples_have_covariance_ltl_and_not_llt() -> None:
    """What the difference is: the second moments of f + Lᵀ ε."""
    prediction = GaussianMethod().predict(tiny_images().test[0][:1], n_samples=1)
    lower = torch.linalg.cholesky(prediction.cov[0])
    noise = function_noise(10, 200_000, seed=0, generator=None, like=lower)
    found = torch.cov(lower.T @ noise)
    torch.testing.assert_close(found, lower.T @ lower, atol=0.05 * float(lower.square().max()), rtol=0)
    assert float((found - prediction.cov[0]).norm() / prediction.cov[0].norm()) > 0.3


def test_more_inputs_than_a_chunk_give_the_same() -> None:
    method = GaussianMethod()
    x = tiny_images(num=300).test[0]
    x = torch.cat([x, x])  # 600: more than a chunk of 500
    found = transposed_probs(method, x, num_samples=3)
    torch.testing.assert_close(found[:300], found[300:], atol=1e-12, rtol=0)


def test_double_softmax_by_hand() -> None:
    probs = torch.tensor([[0.7, 0.2, 0.1], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64)
    again = [math.exp(p) for p in (0.7, 0.2, 0.1)]
    again = [a / sum(again) for a in again]
    expected = torch.tensor([-sum(a * math.log(a) for a in again), math.log(3)], dtype=torch.float64)
    torch.testing.assert_close(double_softmax_entropy(probs), expected, atol=1e-12, rtol=0)


def test_columns() -> None:
    method, images = GaussianMethod(), tiny_images()
    found = as_published(method, images, num_samples=SAMPLES)
    assert found is not None
    probs = directly(method, images.test[0], SAMPLES)
    outside = directly(method, images.out["KMNIST"], SAMPLES)
    assert found["nll"] == pytest.approx(nll_of(probs, images.test[1]), rel=1e-6)
    assert found["accuracy"] == pytest.approx(float((probs.argmax(-1) == images.test[1]).double().mean()))
    assert found["auc"]["KMNIST"] == auroc(double_softmax_entropy(probs), double_softmax_entropy(outside))
    assert set(found["auc"]) == set(images.out)


@pytest.mark.parametrize("method", [GaussianMethod(rank=0), SamplingMethod()])
def test_without_a_gaussian_there_is_nothing_to_transpose(method: GaussianMethod) -> None:
    assert as_published(method, tiny_images(), num_samples=4) is None
