"""SNGP: features against their kernel, norms against dense operators, the head's covariance, conventions."""

import copy
import math

import pytest
import torch
from torch import nn

from scalla.baselines.protocol import Method
from scalla.baselines.sngp import SNGP, RandomFeatureHead, SpectralBound, reinitialise, spectral_bounds
from scalla.types import InputError, NotFittedError, UnsupportedModuleError


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def image_data(num_inputs=48, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    y = torch.arange(num_inputs) % 3
    x = torch.randn(num_inputs, 2, 6, 6, generator=generator, dtype=dtype) + y[:, None, None, None]
    return [(x[:24], y[:24]), (x[24:], y[24:])], x, y


def image_network(num_outputs=3):
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 5, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(20, 8),
        nn.ReLU(),
        nn.Linear(8, num_outputs),
    )


def dense_operator_norm(layer, input_shape):
    """‖W‖₂ of a layer by an SVD of its matrix, one unit vector for each entry of the input."""
    size = math.prod(input_shape)
    basis = torch.eye(size, dtype=layer.weight.dtype).reshape(size, *input_shape)
    with torch.no_grad():
        images = layer(basis) - layer(torch.zeros_like(basis[:1]))
    return torch.linalg.svdvals(images.flatten(1).double()).max().item()


# -- the head --


def features_error(num_features, num_heads=40):
    """Root mean square error of φ·φ' against the RBF kernel, over inputs and heads."""
    h = torch.randn(12, 6, dtype=torch.float64)
    kernel = torch.exp(-torch.cdist(h, h).square() / (2 * 2.0**2))
    errors = []
    for _ in range(num_heads):
        head = RandomFeatureHead(nn.Linear(6, 1).double(), num_features, 2.0)
        phi = head.features(h)
        errors.append((phi @ phi.mT - kernel).square().mean())
    return torch.stack(errors).mean().sqrt().item()


def test_random_features_approach_the_kernel_at_the_monte_carlo_rate():
    few, many = features_error(64), features_error(1024)
    assert few / many == pytest.approx(4, rel=0.25)
    # a product of two cosines times 2 has variance at most 1 + ½
    assert many < math.sqrt(1.5 / 1024)


def test_random_features_are_unbiased_and_orthogonal_within_a_block():
    head = RandomFeatureHead(nn.Linear(6, 1).double(), 60_000, 2.0)
    h = torch.randn(5, 6, dtype=torch.float64)
    kernel = torch.exp(-torch.cdist(h, h).square() / 8)
    assert (head.features(h) @ head.features(h).mT - kernel).abs().max() < 5 * math.sqrt(1.5 / 60_000)
    block = head.frequencies[6:12]
    gram = block @ block.mT
    torch.testing.assert_close(gram, torch.diag(gram.diagonal()), rtol=0, atol=1e-10)
    # rows are N(0, I/ℓ²): squared length 6/4 on average, mean 0
    assert head.frequencies.square().sum(1).mean().item() == pytest.approx(1.5, rel=0.02)
    assert head.frequencies.mean().abs() < 5 * 0.5 / math.sqrt(360_000)


# -- spectral norms --


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.Linear(7, 5), (7,)),
        (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 6, 6)),
        (lambda: nn.Conv2d(2, 4, 3, stride=2), (2, 7, 7)),
        (lambda: nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2), (4, 6, 6)),
        (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 5, 5)),
        (lambda: nn.Conv1d(3, 4, 3, padding="same"), (3, 9)),
    ],
    ids=["linear", "conv", "stride", "groups-dilation", "circular", "conv1d"],
)
def test_spectral_norm_is_that_of_the_dense_operator(build, shape):
    layer = build().double()
    bound = SpectralBound("layer", layer, torch.Size(shape), 0.5)
    exact = dense_operator_norm(layer, shape)
    assert bound.norm() == pytest.approx(exact, rel=1e-5)
    assert bound.power_iteration() <= exact * (1 + 1e-12)
    before = layer.weight.detach().clone()
    bound.project_exactly()
    torch.testing.assert_close(layer.weight, before * (0.5 / exact), rtol=1e-4, atol=0)


def test_a_small_weight_is_left_as_it_is():
    layer = nn.Conv2d(1, 2, 3, padding=1)
    before = layer.weight.detach().clone()
    bound = SpectralBound("layer", layer, torch.Size((1, 5, 5)), 100.0)
    bound.project()
    bound.project_exactly()
    assert torch.equal(layer.weight, before)
    nn.init.zeros_(layer.weight)
    bound.project_exactly()
    assert not layer.weight.any()


def test_norms_are_within_the_bound_after_training():
    loader, _, _ = image_data()
    settings = {"num_features": 32, "num_epochs": 10, "lr": 0.02}
    free = SNGP(image_network(), norm_bound=1e6, **settings).fit(loader)
    method = SNGP(image_network(), norm_bound=0.7, **settings).fit(loader)
    shapes = {"0": (2, 6, 6), "3": (4, 6, 6), "7": (20,)}
    assert [b.name for b in method.bounds] == list(shapes)
    for name, shape in shapes.items():
        assert dense_operator_norm(method.trunk.get_submodule(name), shape) <= 0.7 * (1 + 1e-4)
        assert dense_operator_norm(free.trunk.get_submodule(name), shape) > 0.7


# -- the covariance of the head --


def test_covariance_of_the_head_by_dense_algebra():
    loader, x, _ = image_data(dtype=torch.float64)
    method = SNGP(image_network().double(), num_features=24, ridge=0.5, num_epochs=3, lr=0.01).fit(loader)
    phi = method.head.features(method.trunk(x)).detach()
    probs = (phi @ method.head.weight.mT).softmax(1)
    # diagonal blocks of the dense softmax Hessian Σ_n (diag p − ppᵀ) ⊗ φφᵀ over all C·D weights
    hessian = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None]
    dense = torch.einsum("nab,nd,ne->adbe", hessian, phi, phi).reshape(72, 72)
    test_x = x[:5] + 1.0
    test_phi = method.head.features(method.trunk(test_x)).detach()
    prediction = method.predict(test_x)
    for c in range(3):
        block = dense[24 * c : 24 * (c + 1), 24 * c : 24 * (c + 1)] + 0.5 * torch.eye(24).double()
        torch.testing.assert_close(method.precision[c], block, rtol=1e-9, atol=1e-10)
        expected = torch.einsum("bd,de,be->b", test_phi, torch.linalg.inv(block), test_phi)
        torch.testing.assert_close(prediction.var[:, c], expected, rtol=1e-8, atol=0)
    assert torch.equal(prediction.cov, torch.diag_embed(prediction.cov.diagonal(dim1=1, dim2=2)))


def test_regression_is_bayesian_linear_regression_in_the_features():
    x = torch.linspace(-2, 2, 30, dtype=torch.float64)[:, None]
    y = torch.sin(2 * x)
    network = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    targets = torch.cat([y, -y], 1)
    method = SNGP(network, "regression", num_features=20, sigma_noise=0.2, num_epochs=1500, lr=0.02)
    method.fit([(x, targets)])
    phi = method.head.features(method.trunk(x)).detach()
    precision = torch.eye(20).double() + phi.mT @ phi / 0.04
    torch.testing.assert_close(method.precision, precision[None])
    prediction = method.predict(x)
    expected = torch.einsum("bd,de,be->b", phi, torch.linalg.inv(precision), phi)
    torch.testing.assert_close(prediction.var, expected[:, None].expand(30, 2))
    torch.testing.assert_close(prediction.var_with_noise, prediction.var + 0.04)
    assert (prediction.mean - targets).square().mean().sqrt() < 0.1
    # β is where the ridge and the data put it, given the features
    posterior_mean = torch.linalg.solve(precision, phi.mT @ targets / 0.04)
    torch.testing.assert_close(phi @ posterior_mean, prediction.mean, rtol=0, atol=0.01)


def test_a_huge_ridge_leaves_no_variance():
    loader, x, _ = image_data()
    prediction = SNGP(image_network(), num_features=16, ridge=1e8, num_epochs=1).fit(loader).predict(x)
    assert prediction.var.max() < 1e-7
    torch.testing.assert_close(prediction.probs, prediction.mean.softmax(1), rtol=1e-3, atol=1e-4)


# -- conventions --


def test_it_learns_is_a_method_and_leaves_the_network_alone():
    loader, x, y = image_data()
    model = image_network().eval()
    model[0].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    state = torch.random.get_rng_state()
    method = SNGP(model, num_features=64, num_epochs=40, lr=0.01)
    assert method.fit(loader) is method
    assert torch.equal(torch.random.get_rng_state(), state)
    assert isinstance(method, Method)
    assert len(method.history) == 40
    assert method.history[-1] < 0.5 * method.history[0]
    prediction = method.predict(x)
    assert (prediction.probs.argmax(1) == y).float().mean() > 0.9
    assert not model.training
    assert not model[0].weight.requires_grad
    assert all(p.grad is None for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_trained_weights_are_not_used_and_the_seed_is():
    loader, x, _ = image_data()
    model, other_weights = image_network(), image_network()
    settings = {"num_features": 16, "num_epochs": 2}
    first = SNGP(model, seed=5, **settings).fit(loader).predict(x)
    second = SNGP(other_weights, seed=5, **settings).fit(loader).predict(x)
    third = SNGP(model, seed=6, **settings).fit(loader).predict(x)
    assert torch.equal(first.mean, second.mean)
    assert torch.equal(first.probs, second.probs)
    assert not torch.equal(first.mean, third.mean)


def test_prediction_does_not_depend_on_the_batch_and_changes_no_statistic():
    loader, x, _ = image_data()
    method = SNGP(image_network(), num_features=16, num_epochs=2).fit(loader)
    buffers = copy.deepcopy(method.trunk.state_dict())
    precision = method.precision.clone()
    whole = method.predict(x)
    parts = [method.predict(part) for part in x.split(7)]
    torch.testing.assert_close(whole.probs, torch.cat([p.probs for p in parts]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole.var, torch.cat([p.var for p in parts]), rtol=1e-4, atol=1e-6)
    assert torch.equal(precision, method.precision)
    for name, value in method.trunk.state_dict().items():
        assert torch.equal(value, buffers[name]), name


def test_mean_field_link_and_a_single_logit():
    loader, x, _ = image_data()
    loader = [(a, (b > 0).long()) for a, b in loader]
    method = SNGP(image_network(1), num_features=16, num_epochs=2, link="probit").fit(loader)
    prediction = method.predict(x)
    expected = torch.sigmoid(prediction.mean / (1 + math.pi / 8 * prediction.var).sqrt())
    torch.testing.assert_close(prediction.probs, expected)
    probs = torch.sigmoid(prediction.mean[:, 0].double())
    phi = method.head.features(method.trunk(x)).double()
    expected_precision = torch.einsum("n,nd,ne->de", probs * (1 - probs), phi, phi) + torch.eye(16)
    torch.testing.assert_close(method.precision[0], expected_precision, rtol=1e-5, atol=1e-6)


def test_more_variance_away_from_the_data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, generator=generator) * 0.3 + torch.tensor([[1.5, 0.0]])
    y = (torch.arange(200) % 2).long()
    x[y == 1] -= torch.tensor([[3.0, 0.0]])
    network = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    method = SNGP(network, num_features=256, num_epochs=60, lr=0.01).fit([(x, y)])
    assert (method.predict(x).probs.argmax(1) == y).float().mean() > 0.98
    assert method.predict(torch.tensor([[0.0, 15.0]])).var.mean() > 1.5 * method.predict(x).var.mean()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.out = nn.Linear(2, 2)

    def forward(self, x):
        return self.out(self.scale * x)


def test_weights_without_a_way_to_draw_them_anew_need_build():
    x, y = torch.randn(6, 2), torch.arange(6) % 2
    with pytest.raises(UnsupportedModuleError, match=r"Scaled.*build="):
        SNGP(Scaled()).fit([(x, y)])
    method = SNGP(Scaled(), build=Scaled, num_features=8, num_epochs=1).fit([(x, y)])
    assert method.predict(x).probs.shape == (6, 2)


def test_reinitialise_draws_every_weight_anew():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.MultiheadAttention(4, 2))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7.0)
    assert all((p != 7).all() for p in reinitialise(model).parameters())
    assert all((p == 7).all() for p in model.parameters())


def test_a_network_that_is_one_linear_layer_and_layers_run_on_sequences():
    x, y = torch.randn(8, 3), torch.arange(8) % 2
    method = SNGP(nn.Linear(3, 2), num_features=8, num_epochs=1).fit([(x, y)])
    assert method.bounds == []
    assert method.predict(x).probs.shape == (8, 2)
    sequence = nn.Sequential(nn.Linear(3, 5), nn.Flatten(), nn.Linear(20, 2))
    (bound,) = spectral_bounds(sequence[:2], torch.randn(8, 4, 3), 1.0)
    assert bound.vector.shape == (1, 3)


def test_errors_name_the_remedy():
    x, y = torch.randn(6, 3), torch.arange(6) % 2
    with pytest.raises(NotFittedError, match=r"call fit\(train_loader\)"):
        SNGP(nn.Linear(3, 2)).predict(x)
    with pytest.raises(InputError, match="norm_bound=0"):
        SNGP(nn.Linear(3, 2), norm_bound=0.0)
    with pytest.raises(UnsupportedModuleError, match="leave log_softmax to the loss"):
        SNGP(nn.Sequential(nn.Linear(3, 2), nn.LogSoftmax(1))).fit([(x, y)])
    with pytest.raises(UnsupportedModuleError, match="0 is a Conv1d"):
        SNGP(nn.Sequential(nn.Conv1d(3, 2, 1), nn.Flatten())).fit([(x[:, :, None], y)])
