"""VaLLA: with all training outputs as inducing pairs it is the exact GP."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from scalla.baselines.valla import VaLLA, kmeans, kmeans_within_classes


def tiny_mlp(num_outputs):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, num_outputs)).double()


def jacobians(model, x):
    rows = []
    for single in x:
        for output in model(single[None])[0]:
            grads = torch.autograd.grad(output, list(model.parameters()), retain_graph=True)
            rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


def exact_gp_covariance(model, x, x_test, *, sigma, delta, num_outputs):
    train, test = jacobians(model, x), jacobians(model, x_test)
    kernel, cross, prior = train @ train.T / delta, test @ train.T / delta, test @ test.T / delta
    noisy = kernel + sigma**2 * torch.eye(len(kernel), dtype=kernel.dtype)
    cov = prior - cross @ torch.linalg.solve(noisy, cross.T)
    blocks = cov.reshape(len(x_test), num_outputs, len(x_test), num_outputs)
    return torch.stack([blocks[i, :, i] for i in range(len(x_test))])


@pytest.fixture
def regression():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    y = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    pairs = x.repeat_interleave(2, 0), torch.arange(2).repeat(6)
    return tiny_mlp(2), x, y, pairs


def test_training_reaches_the_exact_gaussian_process(regression):
    model, x, y, pairs = regression
    x_test = x[:3] + 0.5
    method = VaLLA(
        model,
        "regression",
        num_steps=1000,
        lr=1e-2,
        batch_size=6,
        sigma_noise=0.6,
        prior_precision=0.5,
        learn_inducing=False,
        learn_prior=False,
        inducing=pairs,
    ).fit([(x, y)])
    wanted = exact_gp_covariance(model, x, x_test, sigma=0.6, delta=0.5, num_outputs=2)
    error = (method.predict(x_test).cov - wanted).norm() / wanted.norm()
    assert float(error) < 0.01
    assert method.fitted_prior_precision == pytest.approx(0.5)


def test_the_exact_process_is_a_stationary_point_and_a_minimum(regression):
    """At L = I/σ the gradient of the loss in L is zero, and the loss is −log evidence with its mean at f."""
    model, x, y, pairs = regression
    sigma, delta = 0.6, 0.5
    method = VaLLA(model, "regression", num_steps=0, sigma_noise=sigma, prior_precision=delta, inducing=pairs).fit(
        [(x, y)]
    )
    state = method._state
    with torch.no_grad():
        state.factor.copy_(torch.eye(12, dtype=torch.float64) / sigma)
    state.factor.requires_grad_(True)
    loss = method._loss(state, x, y, num_data=6)
    loss.backward()
    assert float(state.factor.grad.tril().abs().max()) < 1e-10
    rows = jacobians(model, x)
    kernel = rows @ rows.T / delta
    log_det = torch.logdet(torch.eye(12, dtype=torch.float64) + kernel / sigma**2)
    residual = (y - model(x)).square().sum() / sigma**2
    constant = 12 * torch.log(torch.tensor(2 * torch.pi * sigma**2, dtype=torch.float64))
    wanted = 0.5 * (log_det + residual + constant)
    torch.testing.assert_close(loss.detach(), wanted.detach(), rtol=1e-10, atol=1e-10)


def test_without_information_the_posterior_is_the_prior(regression):
    model, x, y, pairs = regression
    method = VaLLA(model, "regression", num_steps=0, prior_precision=2.0, inducing=pairs).fit([(x, y)])
    with torch.no_grad():
        method._state.factor.zero_()
    method._prepared = None
    rows = jacobians(model, x).reshape(6, 2, -1)
    torch.testing.assert_close(method.predict(x).cov, rows @ rows.mT / 2.0, rtol=1e-9, atol=1e-10)


def test_classification_lowers_its_loss_and_variance_and_is_reproducible():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
    model = tiny_mlp(3)
    loader = DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True)

    def fit():
        return VaLLA(model, num_inducing=9, num_steps=150, batch_size=30, lr=1e-2, seed=4).fit(loader)

    method, again = fit(), fit()
    assert sum(method.losses[-10:]) < 0.98 * sum(method.losses[:10])
    assert method.losses == again.losses
    assert torch.equal(method.predict(x).probs, again.predict(x).probs)
    rows = jacobians(model, x).reshape(60, 3, -1)
    prior = rows.square().sum(-1) / method.fitted_prior_precision
    assert bool((method.predict(x).var < prior).all())
    assert not torch.equal(method._state.inputs, kmeans_within_classes(x, y, 9, torch.Generator().manual_seed(4))[0])


def test_gradient_of_the_loss_in_the_inducing_inputs_by_finite_differences():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (20,), generator=generator)
    method = VaLLA(tiny_mlp(3), num_inducing=6, num_steps=0).fit([(x, y)])
    state = method._state
    state.inputs.requires_grad_(True)
    method._loss(state, x, y, num_data=20).backward()
    gradient = state.inputs.grad.clone()
    state.inputs.requires_grad_(False)
    step = 1e-5
    for index in ((0, 0), (3, 1), (5, 0)):
        values = []
        for sign in (1, -1):
            state.inputs[index] += sign * step
            values.append(float(method._loss(state, x, y, num_data=20)))
            state.inputs[index] -= sign * step
        assert float(gradient[index]) == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5, abs=1e-7)


def test_kmeans_finds_separated_clusters():
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0]], dtype=torch.float64)
    x = (centres[:, None] + 0.1 * torch.randn(2, 30, 2, generator=generator, dtype=torch.float64)).flatten(0, 1)
    y = torch.arange(2).repeat_interleave(30)
    found = kmeans(x, 2, generator)
    torch.testing.assert_close(found[found[:, 0].argsort()], centres, rtol=0, atol=0.1)
    inputs, labels = kmeans_within_classes(x, y, 5, generator)
    assert labels.tolist() == [0, 0, 0, 1, 1]
    assert bool(((inputs[:, 0] > 5).long() == labels).all())
