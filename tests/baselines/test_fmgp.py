"""FMGP: Σ, KL and the second mean against an exact GP, and the conventions of a method."""

import copy

import pytest
import torch
from torch import nn

from scalla.baselines.fmgp import FMGP, SparseGP, inducing_pairs, kmeans, median_distance, sample_inputs
from scalla.baselines.protocol import Method
from scalla.types import InputError, NotFittedError


def exact_kernel(x, z, gp, phi_x=None, phi_z=None):
    """K((x, c), (z, c')) of every pair by loops over the outputs: (B·C, M·C), C running fastest."""
    scaled = (x[:, None] - z[None]) / gp.log_length_scale.exp()
    base = torch.exp(-0.5 * scaled.square().sum(-1))
    if phi_x is not None:
        base = base * (phi_x @ phi_z.mT + 1)
    factor = gp.output_factor.tril()
    return torch.kron(base, factor @ factor.mT)


def random_gp(num_inputs=9, num_outputs=3, dims=2, *, one_pair_each=False, phi_dims=None, seed=0):
    """A GP whose kernel is not at its start, with all (input, output) pairs for inducing pairs, or some."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_inputs, dims, generator=generator, dtype=torch.float64)
    if one_pair_each:
        inducing, outputs = x, torch.randint(num_outputs, (num_inputs,), generator=generator)
    else:
        inducing = x.repeat_interleave(num_outputs, 0)
        outputs = torch.arange(num_outputs).repeat(num_inputs)
    gp = SparseGP(inducing, outputs, num_outputs=num_outputs, length_scale=0.8, sigma_noise=0.3)
    with torch.no_grad():
        gp.output_factor += 0.5 * torch.randn(num_outputs, num_outputs, generator=generator, dtype=torch.float64)
        gp.log_length_scale += torch.linspace(-0.3, 0.3, dims, dtype=torch.float64)
        size = len(gp.variational_factor)
        gp.variational_factor += 0.3 * torch.randn(size, size, generator=generator, dtype=torch.float64)
        gp.second_weights += torch.randn(size, generator=generator, dtype=torch.float64)
    return gp, x, inducing.clone(), outputs.clone()


def posterior_cov(gp, x):
    transform, _, _ = gp.solve()
    return gp.covariance(gp.project(gp.kernel(x, gp.inducing, None, None), transform)).detach()


def dense_blocks(joint, num_inputs, num_outputs):
    index = torch.arange(num_inputs)
    return joint.reshape(num_inputs, num_outputs, num_inputs, num_outputs)[index, :, index]


def dense_parts(gp, x, inducing, outputs, phi_x=None, phi_z=None):
    """K_xx (joint), K_xz, K_z, A, H by dense algebra, inducing pairs in the GP's order."""
    num_outputs = len(gp.output_factor)
    order = outputs.argsort(stable=True)
    rows = order * num_outputs + outputs[order]
    k_xz = exact_kernel(x, inducing, gp, phi_x, phi_z)[:, rows]
    k_z = exact_kernel(inducing, inducing, gp, phi_z, phi_z)[rows][:, rows]
    factor = gp.variational_factor.tril()
    h = torch.eye(len(order), dtype=torch.float64) + factor.mT @ k_z @ factor
    return exact_kernel(x, x, gp, phi_x, phi_x), k_xz, k_z, factor @ torch.linalg.inv(h) @ factor.mT, h


@pytest.mark.parametrize("one_pair_each", [False, True])
def test_covariance_variance_kl_and_second_mean_by_dense_algebra(one_pair_each):
    gp, x, inducing, outputs = random_gp(one_pair_each=one_pair_each)
    test_x = x[:4] + 0.2
    k_xx, k_xz, k_z, a, h = dense_parts(gp, test_x, inducing, outputs)
    transform, gram, kl = gp.solve()
    kernel = gp.kernel(test_x, gp.inducing, None, None)
    projected = gp.project(kernel, transform)
    expected = dense_blocks(k_xx - k_xz @ a @ k_xz.mT, 4, 3)
    torch.testing.assert_close(gp.covariance(projected), expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(gp.variance(projected), expected.diagonal(dim1=1, dim2=2), rtol=1e-9, atol=1e-10)
    # the KL from the moments of q(u) = N(q_μ, K_z − K_z A K_z), by torch.distributions
    q_mean = k_z @ transform @ gp.second_weights
    jitter = 1e-12 * torch.eye(len(k_z), dtype=torch.float64)
    q_cov = k_z - k_z @ a @ k_z
    expected_kl = torch.distributions.kl_divergence(
        torch.distributions.MultivariateNormal(q_mean, (q_cov + q_cov.mT) / 2 + jitter),
        torch.distributions.MultivariateNormal(torch.zeros_like(q_mean), k_z + jitter),
    )
    penalty = 0.5 * gp.second_weights @ gram @ gp.second_weights
    torch.testing.assert_close(kl + penalty, expected_kl, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(kl, 0.5 * torch.logdet(h) - 0.5 * torch.trace(k_z @ a), rtol=1e-9, atol=1e-9)
    expected_mean = (k_xz @ torch.linalg.solve(k_z, q_mean)).reshape(4, 3)
    torch.testing.assert_close(gp.second_mean(kernel, transform), expected_mean, rtol=1e-6, atol=1e-6)


def test_last_layer_kernel_multiplies_every_pair_of_outputs():
    gp, x, inducing, outputs = random_gp(one_pair_each=True)
    phi_x, phi_z = torch.sin(x @ torch.ones(2, 5).double()), torch.sin(inducing @ torch.ones(2, 5).double())
    order = outputs.argsort(stable=True)
    k_xx, k_xz, _, a, _ = dense_parts(gp, x, inducing, outputs, phi_x, phi_z)
    transform, _, _ = gp.solve(phi_z[order])
    projected = gp.project(gp.kernel(x, gp.inducing, phi_x, phi_z[order]), transform)
    expected = dense_blocks(k_xx - k_xz @ a @ k_xz.mT, 9, 3)
    torch.testing.assert_close(gp.covariance(projected, phi_x), expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(gp.variance(projected, phi_x), expected.diagonal(dim1=1, dim2=2), rtol=1e-9, atol=1e-10)


def exact_gp_covariance(gp, x, test_x, noise_var):
    k, k_star = exact_kernel(x, x, gp), exact_kernel(test_x, x, gp)
    noisy = k + noise_var * torch.eye(len(k), dtype=torch.float64)
    joint = exact_kernel(test_x, test_x, gp) - k_star @ torch.linalg.solve(noisy, k_star.mT)
    return dense_blocks(joint, len(test_x), len(gp.output_factor)).detach()


def test_with_inducing_inputs_at_the_data_the_best_l_is_the_exact_gp():
    """L = I/σ makes A = (K + σ²I)⁻¹."""
    gp, x, _, _ = random_gp()
    test_x = torch.cat([x, x[:4] + 0.3])
    with torch.no_grad():
        gp.variational_factor.copy_(torch.eye(27, dtype=torch.float64) / 0.3)
    torch.testing.assert_close(
        posterior_cov(gp, test_x), exact_gp_covariance(gp, x, test_x, 0.09), rtol=1e-6, atol=1e-10
    )


def test_the_evidence_bound_over_l_is_best_at_the_exact_gp():
    """Σ_n tr Σ(x_n)/2σ² + KL, minimised over L from I, gives the exact posterior covariance."""
    gp, x, _, _ = random_gp(num_inputs=6, num_outputs=2)
    with torch.no_grad():
        gp.variational_factor.copy_(torch.eye(12))
    optimizer = torch.optim.LBFGS(
        [gp.variational_factor],
        max_iter=500,
        tolerance_grad=1e-10,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def closure():
        optimizer.zero_grad()
        transform, _, kl = gp.solve()
        var = gp.variance(gp.project(gp.kernel(x, gp.inducing, None, None), transform))
        loss = var.sum() / (2 * 0.09) + kl
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.testing.assert_close(posterior_cov(gp, x), exact_gp_covariance(gp, x, x, 0.09), rtol=1e-4, atol=1e-6)


def test_loss_is_the_sum_of_both_bounds():
    loader, _ = classification_data()
    method = FMGP(small_network(), num_inducing=6, num_steps=3, lr=0.1).fit(loader)
    gp, (x, y) = method.gp, loader[0]
    flat, mean = x.double(), method.network(x).double()
    transform, gram, kl = gp.solve()
    kernel = gp.kernel(flat, gp.inducing, None, None)
    scale = (1 + torch.pi / 8 * gp.variance(gp.project(kernel, transform))).sqrt()
    index = torch.arange(len(y))
    expected = 2 * kl + 0.5 * gp.second_weights @ gram @ gp.second_weights
    for outputs in (mean, gp.second_mean(kernel, transform)):
        expected = expected - 60 / 30 * (outputs / scale).log_softmax(1)[index, y].sum()
    torch.testing.assert_close(method._loss(gp, x, y, 60), expected / 60)


def test_regression_recovers_noise_and_gives_more_variance_away_from_the_data():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(80, 1, generator=generator) * 4 - 2
    y = torch.sin(2 * x) + 0.1 * torch.randn(80, 1, generator=generator)

    class Sine(nn.Module):
        def forward(self, x):
            return torch.sin(2 * x)

    method = FMGP(Sine(), "regression", num_inducing=15, num_steps=600, lr=0.03).fit([(x, y)])
    near, far = method.predict(x), method.predict(torch.tensor([[6.0]]))
    torch.testing.assert_close(near.mean, torch.sin(2 * x))
    assert near.var.mean() < 0.05 * far.var.item()
    # the residuals' deviation is 0.1: noise and what is left of Σ together must say so
    assert near.var_with_noise.mean().sqrt().item() == pytest.approx(0.1, rel=0.35)


def classification_data(num_inputs=60):
    generator = torch.Generator().manual_seed(3)
    y = torch.arange(num_inputs) % 3
    x = torch.randn(num_inputs, 4, generator=generator) + y[:, None]
    return [(x[:30], y[:30]), (x[30:], y[30:])], x


def small_network(num_outputs=3):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, num_outputs))


@pytest.mark.parametrize("last_layer_kernel", [False, True])
def test_training_falls_mean_is_the_network_and_the_network_is_left_alone(last_layer_kernel):
    loader, x = classification_data()
    model = small_network().train()
    before = copy.deepcopy(model.state_dict())
    method = FMGP(model, num_inducing=10, num_steps=100, lr=0.02, last_layer_kernel=last_layer_kernel)
    assert method.fit(loader) is method
    assert isinstance(method, Method)
    assert len(method.history) == 100
    assert sum(method.history[-10:]) < sum(method.history[:10])
    assert model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    prediction = method.predict(x)
    torch.testing.assert_close(prediction.mean, copy.deepcopy(model).eval()(x).detach())
    assert (torch.linalg.eigvalsh(prediction.cov) > -1e-6).all()
    torch.testing.assert_close(prediction.probs.sum(1), torch.ones(60))


def test_same_seed_same_result_batches_do_not_matter_global_generator_unused():
    loader, x = classification_data()
    state = torch.random.get_rng_state()
    settings = {"num_inducing": 9, "num_steps": 20, "lr": 0.01}
    method = FMGP(small_network(), seed=5, **settings).fit(loader)
    whole = method.predict(x)
    again = FMGP(small_network(), seed=5, **settings).fit(loader).predict(x)
    other = FMGP(small_network(), seed=6, **settings).fit(loader).predict(x)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(whole.factor, again.factor)
    assert torch.equal(whole.probs, again.probs)
    assert not torch.equal(whole.factor, other.factor)
    parts = [method.predict(part) for part in x.split(7)]
    torch.testing.assert_close(whole.cov, torch.cat([p.cov for p in parts]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(whole.probs, torch.cat([p.probs for p in parts]), rtol=1e-5, atol=1e-6)
    assert method.predict(x, n_samples=0).var.shape == (60, 3)


def test_binary_with_a_single_logit():
    loader, x = classification_data()
    loader = [(a, (b > 0).long()) for a, b in loader]
    method = FMGP(small_network(1), num_inducing=5, num_steps=30, lr=0.01).fit(loader)
    assert method.predict(x).probs.shape == (60, 1)


def test_images_and_float32():
    x = torch.rand(12, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    for settings in ({}, {"last_layer_kernel": True}, {"dtype": torch.float32}):
        method = FMGP(model, num_inducing=4, num_steps=3, **settings).fit([(x, torch.arange(12) % 2)])
        assert method.predict(x).probs.shape == (12, 2)
        assert method.gp.inducing.dtype == settings.get("dtype", torch.float64)


def test_start_of_length_scales_and_inducing_pairs():
    x = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64)
    assert median_distance(x) == 2.0
    generator = torch.Generator().manual_seed(0)
    loader, _ = classification_data()
    method = FMGP(small_network(), num_inducing=7, num_steps=0).fit(loader)
    all_x = torch.cat([a for a, _ in loader]).double()
    torch.testing.assert_close(
        method.gp.log_length_scale.exp(), (torch.pdist(all_x).median() / 2**0.5).expand(4), rtol=1e-9, atol=0
    )
    assert method.gp.inducing_output.tolist() == [0, 0, 0, 1, 1, 2, 2]
    # the two inputs of a class of two are its own centres
    data = torch.tensor([[0.0], [5.0], [9.0], [1.0]], dtype=torch.float64)
    z, c = inducing_pairs(data, torch.tensor([0, 1, 1, 0]), 2, 4, generator)
    assert sorted(z[c == 0, 0].tolist()) == [0.0, 1.0]
    assert sorted(z[c == 1, 0].tolist()) == [5.0, 9.0]


def test_kmeans_finds_separate_groups_and_the_sample_is_uniform():
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(50, 2, generator=generator) + 100 * k for k in range(2)])
    centres = kmeans(x, 2, generator)
    expected = torch.stack([x[:50].mean(0), x[50:].mean(0)])
    torch.testing.assert_close(centres[centres[:, 0].argsort()], expected)

    values = torch.arange(1000.0)[:, None]
    loader = [(part, part[:, 0].long()) for part in values.split(32)]
    sample, y, num_inputs = sample_inputs(loader, 100, generator)
    assert num_inputs == 1000
    assert sample[:, 0].long().unique().numel() == 100
    assert torch.equal(sample[:, 0].long(), y)
    assert abs(sample.mean().item() - 499.5) < 4 * 288.7 / 10


def test_errors_name_the_remedy():
    with pytest.raises(NotFittedError, match=r"call fit\(train_loader\)"):
        FMGP(small_network()).predict(torch.zeros(1, 4))
    with pytest.raises(InputError, match="FMGP measures distances"):
        FMGP(small_network()).fit([({"input_ids": torch.zeros(2, 4)}, torch.zeros(2))])
    with pytest.raises(InputError, match=r"torch\.int64"):
        FMGP(small_network()).fit([(torch.zeros(2, 4).long(), torch.zeros(2))])
