"""MFVI: its KL in closed form, the mean-field posterior of a linear model, the conventions."""

import copy

import pytest
import torch
from torch import nn

from scalla.baselines.mfvi import MFVI, draw_weights, kl_to_prior
from scalla.baselines.minibatch import check_settings
from scalla.baselines.protocol import Method
from scalla.types import InputError, NotFittedError


def classification_data(num_inputs=60):
    generator = torch.Generator().manual_seed(3)
    y = torch.arange(num_inputs) % 3
    x = torch.randn(num_inputs, 4, generator=generator) + y[:, None]
    return [(x[:30], y[:30]), (x[30:], y[30:])], x


def small_network(num_outputs=3):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, num_outputs))


def test_kl_agrees_with_torch_distributions():
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    log_std = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    posterior = torch.distributions.Normal(mean, log_std.exp())
    prior = torch.distributions.Normal(torch.zeros_like(mean), torch.full_like(mean, 0.7**-0.5))
    expected = torch.distributions.kl_divergence(posterior, prior).sum()
    torch.testing.assert_close(kl_to_prior(mean, log_std, 0.7), expected, rtol=1e-12, atol=0)


def test_kl_by_hand_and_zero_at_the_prior():
    # μ = 1, σ = 1, δ = 1: ½ (1 + 1 − 1 − 0) = ½
    assert kl_to_prior(torch.ones(1), torch.zeros(1), 1.0).item() == pytest.approx(0.5)
    assert kl_to_prior(torch.zeros(4), torch.full((4,), 0.5).log(), 4.0).item() == pytest.approx(0.0, abs=1e-6)


def test_linear_gaussian_model_converges_to_the_mean_field_posterior():
    """KL(q ‖ N(m, Λ⁻¹)) over diagonal q is least at μ = m, σ_i² = 1/Λ_ii."""
    generator = torch.Generator().manual_seed(1)
    mixing = torch.tensor([[1.0, 0.6, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 1.0]], dtype=torch.float64)
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64) @ mixing
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)[:, None]
    y = y + 0.5 * torch.randn(40, 1, generator=generator, dtype=torch.float64)
    precision = x.mT @ x / 0.25 + 2.0 * torch.eye(3, dtype=torch.float64)
    posterior_mean = torch.linalg.solve(precision, x.mT @ y / 0.25).squeeze(1)

    model = nn.Linear(3, 1, bias=False).double()
    method = MFVI(
        model,
        "regression",
        prior_precision=2.0,
        sigma_noise=0.5,
        num_steps=1500,
        lr=0.03,
        num_draws=8,
        init_std=0.01,
    ).fit([(x, y)])
    std = method.log_std["weight"].exp().squeeze(0)
    expected = precision.diagonal().rsqrt()
    torch.testing.assert_close(std, expected, rtol=0.03, atol=0)
    assert ((method.mean["weight"].squeeze(0) - posterior_mean).abs() < 0.1 * expected).all()

    prediction = method.predict(x, n_samples=4000)
    exact_var = x.square() @ std.square()
    torch.testing.assert_close(prediction.var.squeeze(1), exact_var, rtol=0.15, atol=0)
    torch.testing.assert_close(prediction.var_with_noise, prediction.var + 0.25)


def test_draws_have_the_mean_and_variance_of_q():
    mean, log_std = {"w": torch.tensor([1.0, -3.0])}, {"w": torch.tensor([0.5, 2.0]).log()}
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([draw_weights(mean, log_std, generator)["w"] for _ in range(20_000)])
    # four standard errors of a mean and of a standard deviation
    assert ((draws.mean(0) - mean["w"]).abs() < 4 * torch.tensor([0.5, 2.0]) / 20_000**0.5).all()
    torch.testing.assert_close(draws.std(0), torch.tensor([0.5, 2.0]), rtol=4 / 40_000**0.5, atol=0)


def test_objective_falls_and_the_network_is_left_alone():
    loader, x = classification_data()
    model = small_network().train()
    model[0].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    method = MFVI(model, num_steps=200, lr=1e-2)
    assert method.fit(loader) is method
    assert isinstance(method, Method)
    assert len(method.history) == 200
    assert sum(method.history[-20:]) < sum(method.history[:20])
    assert model.training
    assert not model[0].weight.requires_grad
    assert all(p.grad is None for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert method.predict(x).probs.argmax(1).shape == (60,)


def test_same_seed_same_result_and_the_global_generator_is_not_used():
    loader, x = classification_data()
    model = small_network()
    state = torch.random.get_rng_state()
    first = MFVI(model, num_steps=20, seed=5).fit(loader).predict(x)
    assert torch.equal(torch.random.get_rng_state(), state)
    second = MFVI(model, num_steps=20, seed=5).fit(loader).predict(x)
    other = MFVI(model, num_steps=20, seed=6).fit(loader).predict(x)
    assert torch.equal(first.samples, second.samples)
    assert not torch.equal(first.samples, other.samples)


def test_prediction_does_not_depend_on_the_batch():
    loader, x = classification_data()
    method = MFVI(small_network(), num_steps=20, init_std=0.1).fit(loader)
    whole = method.predict(x).probs
    parts = torch.cat([method.predict(part).probs for part in x.split(7)])
    torch.testing.assert_close(whole, parts, rtol=1e-5, atol=1e-6)
    assert torch.equal(method.predict(x, generator=torch.Generator().manual_seed(0)).probs, whole)


def test_without_steps_and_with_a_tiny_deviation_it_is_the_network():
    loader, x = classification_data()
    model = small_network().eval()
    method = MFVI(model, num_steps=0, init_std=1e-7).fit(loader)
    torch.testing.assert_close(method.predict(x).mean, model(x).detach(), rtol=1e-4, atol=1e-5)


def test_a_strong_prior_shrinks_the_weights_to_zero_mean():
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    method = MFVI(nn.Linear(2, 1), "regression", prior_precision=1e6, num_steps=500, lr=0.02, init_std=1e-3).fit(
        [(x, x.sum(1))]
    )
    assert method.mean["weight"].abs().max() < 0.02
    torch.testing.assert_close(method.log_std["weight"].exp(), torch.full((1, 2), 1e-3), rtol=0.05, atol=0)


def test_errors_name_the_remedy():
    with pytest.raises(InputError, match="prior_precision=-1"):
        MFVI(small_network(), prior_precision=-1.0)
    with pytest.raises(InputError, match="'classification' or 'regression'"):
        check_settings("poisson")
    with pytest.raises(NotFittedError, match=r"call fit\(train_loader\)"):
        MFVI(small_network()).predict(torch.zeros(1, 4))
    with pytest.raises(InputError, match="is empty"):
        MFVI(small_network()).fit([])
    loader, x = classification_data()
    with pytest.raises(InputError, match="n_samples=0"):
        MFVI(small_network(), num_steps=0).fit(loader).predict(x, n_samples=0)
