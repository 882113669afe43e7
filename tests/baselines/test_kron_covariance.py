"""The covariance under Kronecker factors, from the factors of the layers: the same as laplace-torch's own."""

from __future__ import annotations

import pytest
import torch
from test_layer_factors import FACTORED, Sequence, made
from torch.utils.data import DataLoader, TensorDataset

from scalla.baselines import lla as lla_module
from scalla.baselines.kron_covariance import kron_covariance
from scalla.baselines.laplace_torch import quiet
from scalla.baselines.layer_factors import layer_factors
from scalla.baselines.lla import LLA


def fitted(make) -> tuple[LLA, torch.Tensor]:
    network, _, x = made(make)
    inputs = torch.randn(12, *x.shape[1:], dtype=torch.float64)
    loader = DataLoader(TensorDataset(inputs, torch.arange(12) % 3), batch_size=6)
    return LLA(network.twin, subset="all", structure="kron", prior_precision=0.7).fit(loader), x


@pytest.mark.parametrize("make", FACTORED)
@pytest.mark.parametrize("prior_precision", [0.7, 30.0])
def test_equals_laplace_torch(make, prior_precision: float) -> None:
    method, x = fitted(make)
    posterior = method._fitted()
    posterior.prior_precision = prior_precision
    with torch.no_grad(), quiet():
        mean, cov = posterior._glm_predictive_distribution(x)
    found = method.predict(x)
    torch.testing.assert_close(found.mean, mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.cov, cov, rtol=1e-8, atol=1e-10)


def test_it_is_this_way_that_plain_networks_take(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(lla_module, "kron_covariance", lambda *args: calls.append(1) or kron_covariance(*args))
    method, x = fitted(FACTORED[0])
    method.predict(x)
    assert calls == [1]


def test_other_networks_take_the_general_way() -> None:
    method, x = fitted(Sequence)
    posterior = method._fitted()
    with torch.no_grad(), quiet():
        _, cov = posterior._glm_predictive_distribution(x)
    torch.testing.assert_close(method.predict(x).cov, cov, rtol=1e-10, atol=1e-12)


def test_blocks_of_another_shape_are_left_alone() -> None:
    method, x = fitted(FACTORED[0])
    network, params, _ = made(FACTORED[0])
    factors = layer_factors(network, params, x)
    assert factors is not None
    precision = method._fitted().posterior_precision
    precision.damping = True
    assert kron_covariance(precision, params, factors) is None
    precision.damping = False
    fewer = dict(list(params.items())[1:])
    assert kron_covariance(precision, fewer, factors) is None
    turned = type(precision)(
        [tuple(reversed(v)) for v in precision.eigenvectors],
        [tuple(reversed(v)) for v in precision.eigenvalues],
        precision.deltas,
    )
    assert kron_covariance(turned, params, factors) is None
