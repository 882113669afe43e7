"""The variance that comes back where an input is unfamiliar, against its definition and independent oracles."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cases import mlp
from scalla import FileFormatError, InputError, NotFittedError, ScaLLA, metrics
from scalla.checkpoint import read_file, write_file
from scalla.density import ClassGaussians, ClassMoments
from scalla.functional import FrozenNetwork
from scalla.hidden import hidden_of, mark, usual_layers, vectors
from scalla.residual import Residual, variance

CENTRES = torch.tensor([[-2.0, 0.0], [2.0, 0.0], [0.0, 3.0]], dtype=torch.float64)


def blobs(num: int, seed: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (num,), generator=rng)
    return CENTRES[y] + 0.6 * torch.randn(num, 2, generator=rng, dtype=torch.float64), y


def loader(x: Tensor, y: Tensor, size: int = 50) -> DataLoader:
    return DataLoader(TensorDataset(x, y), batch_size=size)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    """A classifier of the blobs, trained."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = blobs(300, 0)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net.eval().requires_grad_(True)


def fitted(network: nn.Module, **options: object) -> ScaLLA:
    return ScaLLA(network, num_features=6, seed=3, **options).fit(loader(*blobs(300, 0)), num_steps=20)


def with_residual(network: nn.Module, **options: object) -> ScaLLA:
    return fitted(network).fit_residual(loader(*blobs(300, 0)), loader(*blobs(200, 1)), **options)


# -- distances --


@pytest.mark.parametrize("shared", [False, True])
def test_distance_is_that_of_gaussians(shared: bool) -> None:
    h, y = blobs(400, 2)
    moments = ClassMoments(3, h[:70], shared=shared)
    for part in (slice(0, 70), slice(70, 400)):
        moments.add(h[part], y[part])
    gaussians = ClassGaussians(3, 2, shared=shared, like=h)
    moments.write(gaussians, ridge=0.1)
    covs = torch.stack([torch.cov(h[y == k].mT, correction=0) for k in range(3)])
    counts = torch.bincount(y).double()
    within = torch.einsum("k,kde->de", counts / 400, covs)
    covs = within.expand(3, 2, 2) if shared else covs
    covs = covs + 0.1 * within.diagonal().mean() * torch.eye(2, dtype=h.dtype)
    means = torch.stack([h[y == k].mean(0) for k in range(3)])
    log_probs = torch.distributions.MultivariateNormal(means, covs).log_prob(h[:, None])
    # −2 log N = d + log det S + D log 2π, less the smallest log det
    wanted = (-2 * log_probs - 2 * math.log(2 * math.pi) - torch.logdet(covs).min()).amin(1)
    torch.testing.assert_close(gaussians(h), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shared", [False, True])
def test_class_without_data_is_near_nothing(shared: bool) -> None:
    h, y = blobs(200, 2)
    both = []
    for num_classes in (3, 5):
        moments = ClassMoments(num_classes, h, shared=shared)
        moments.add(h, y)
        both.append(ClassGaussians(num_classes, 2, shared=shared, like=h))
        moments.write(both[-1], ridge=0.1)
    torch.testing.assert_close(both[1](h), both[0](h))


# -- layers --


def test_usual_layers_are_the_last_convolution_and_linear_ones() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 7), nn.Linear(7, 5),
        nn.ReLU(), nn.Linear(5, 2),
    )  # fmt: skip
    x = torch.randn(4, 1, 8, 8)
    frozen = FrozenNetwork(net)
    assert usual_layers(frozen, x) == ["2", "4", "5", "7"]
    mark(frozen, ["2", "7"])
    found = hidden_of(frozen, ["2", "7"], x)
    given = net[1](net[0](x))
    wanted = torch.cat([given.mean((2, 3)), given.amax((2, 3)), given.std((2, 3), correction=0)], 1)
    torch.testing.assert_close(found["2"], wanted)
    torch.testing.assert_close(found["7"], net[:7](x))


def test_positions_of_a_sequence_are_pooled() -> None:
    h = torch.randn(3, 5, 4)
    torch.testing.assert_close(vectors(h, nn.Linear(4, 2))[:, :4], h.mean(1))


def test_network_without_such_layers_is_refused() -> None:
    class Bilinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    with pytest.raises(InputError, match="name the layers whose inputs tell what is familiar"):
        usual_layers(FrozenNetwork(Bilinear()), torch.randn(4, 2))


# -- the variance --


def test_variance_is_its_formula(network: nn.Module) -> None:
    la = with_residual(network)
    assert la.residual is not None
    x = blobs(40, 5)[0]
    outputs_scale, base, log_size, power = la.residual.shape.tolist()
    frozen = FrozenNetwork(network)
    mark(frozen, la.residual.layers)
    hidden = hidden_of(frozen, la.residual.layers, x)
    distances = torch.stack([d(hidden[k]) for k, d in zip(la.residual.layers, la.residual.densities, strict=True)], 1)
    z = ((distances.log() - la.residual.centre) / la.residual.width).clamp_min(0).square().mean(1).sqrt()
    added = base + (log_size + power * z).exp()
    with torch.no_grad():
        features = la.features(x)
    posterior = features @ la.posterior_covariance @ features.mT
    wanted = outputs_scale**2 * posterior + added[:, None, None] * torch.eye(3, dtype=x.dtype)
    torch.testing.assert_close(la.predict(x).mean, outputs_scale * network(x).detach())
    torch.testing.assert_close(la.functional_variance(x), wanted, rtol=1e-9, atol=1e-12)
    assert la.residual.layers == ["0", "2", "4"]


def test_half_of_held_out_inputs_are_at_zero_and_one_in_a_hundred_above_one(network: nn.Module) -> None:
    la = with_residual(network, layers=["4"])
    frozen = FrozenNetwork(network)
    mark(frozen, ["4"])
    assert la.residual is not None
    z = la.residual.unfamiliarity(hidden_of(frozen, ["4"], blobs(200, 1)[0]))
    assert int((z < 1e-9).sum()) == 100
    assert float(z.quantile(0.99)) == pytest.approx(1.0, abs=1e-9)


def test_draws_are_functions(network: nn.Module) -> None:
    """Samples at two places have the covariance that is claimed, and those without a residual keep their draws of w."""
    plain, la = fitted(network), with_residual(network)
    x = torch.cat([blobs(2, 7)[0], torch.tensor([[9.0, -9.0]], dtype=torch.float64)])
    samples = la.functional_samples(x, 40_000) - la.predict(x).mean
    empirical = torch.einsum("sbc,sde->bcde", samples, samples).reshape(9, 9) / 40_000
    wanted = la.functional_covariance(x)
    assert float((empirical - wanted).norm() / wanted.norm()) < 0.05
    torch.testing.assert_close(la.function_sampler(5)(x), la.functional_samples(x, 5))
    assert la.residual is not None
    la.residual.shape.copy_(torch.tensor([1.0, 0.0, -40.0, 0.0]))
    torch.testing.assert_close(la.functional_samples(x, 5), plain.functional_samples(x, 5), atol=1e-7, rtol=0)


def test_far_inputs_are_told_apart_and_held_out_data_none_the_worse(network: nn.Module) -> None:
    """With a context that is made of the training inputs alone."""
    plain, la = fitted(network), with_residual(network)
    x, y = blobs(400, 11)
    assert float(la.predict(x).log_prob(y).mean()) > float(plain.predict(x).log_prob(y).mean()) - 0.02
    far = torch.tensor([0.0, 1.0]) + 8 * nn.functional.normalize(torch.randn(200, 2, dtype=torch.float64), dim=1)
    found = {
        score: [metrics.auroc(m.ood_score(x, score), m.ood_score(far, score)) for m in (plain, la)]
        for score in ("predictive_entropy", "gaussian_entropy")
    }
    print(found)
    assert found["gaussian_entropy"][1] > 0.95
    assert found["predictive_entropy"][1] > 0.95 > found["predictive_entropy"][0]


def test_context_makes_its_like_uncertain(network: nn.Module) -> None:
    far = 6 * nn.functional.normalize(torch.randn(200, 2, dtype=torch.float64), dim=1)
    without, beside = (with_residual(network, context=c, context_weight=0.1) for c in (None, far))
    assert float(beside.predict(far).entropy.mean()) > float(without.predict(far).entropy.mean())


def test_context_as_familiar_as_held_out_data_is_left_out_and_said_so(network: nn.Module) -> None:
    x = blobs(200, 1)[0]
    alone = with_residual(network, context=None)
    with pytest.warns(UserWarning, match="every input of the context is as familiar as held-out data"):
        beside = with_residual(network, context=x[alone.predict(x).entropy.argsort()[:50]], context_weight=1.0)
    assert alone.residual is not None
    assert beside.residual is not None
    torch.testing.assert_close(beside.residual.shape, alone.residual.shape)


def test_overconfident_network_is_tempered(network: nn.Module) -> None:
    loud = copy.deepcopy(network)
    with torch.no_grad():
        loud[-1].weight.mul_(20)
        loud[-1].bias.mul_(20)
    x, y = blobs(2000, 4)
    y = torch.where(torch.rand(len(y), generator=torch.Generator().manual_seed(0)) < 0.2, (y + 1) % 3, y)
    found = fitted(loud).fit_residual(loader(*blobs(300, 0)), loader(x[::2], y[::2]), context=None)
    assert found.residual is not None
    assert float(found.residual.shape[0]) < 0.5
    alone, tempered = loud(x[1::2]).softmax(-1), found.predict(x[1::2], link_approx="mc", n_samples=500).probs
    assert metrics.ece(tempered, y[1::2]) < 0.4 * metrics.ece(alone, y[1::2])


def test_calibration_is_an_optimum_of_what_it_says(network: nn.Module) -> None:
    """No neighbour of (κ, v₀, α, p) has a better held-out likelihood by Monte Carlo than what was found."""
    la = with_residual(network, context=None)
    assert la.residual is not None
    found = la.residual.shape.clone()
    x, y = blobs(200, 1)

    def held_out(shape: Tensor) -> float:
        assert la.residual is not None
        la.residual.shape.copy_(shape)
        return float(la.predict(x, link_approx="mc", n_samples=2000).log_prob(y).mean())

    best = held_out(found)
    for change in ([0.3, 0, 0, 0], [-0.3, 0, 0, 0], [0, 1, 1, 0], [0, 0, 3, 0], [0, 0, -3, 0], [0, 0, 0, 3]):
        assert held_out(found + torch.tensor(change)) < best + 2e-3


def test_regression_in_the_units_of_each_output() -> None:
    x = torch.linspace(-1, 1, 80, dtype=torch.float64)[:, None]
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(80, 2, generator=rng, dtype=torch.float64)
    y = torch.cat([x.sin(), 100 * x.cos()], 1) + torch.tensor([0.1, 10.0]) * noise
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = torch.optim.Adam(net.parameters(), 3e-2)
    for _ in range(400):
        optimizer.zero_grad()
        ((net(x) - y) / torch.tensor([1.0, 100.0])).square().mean().backward()
        optimizer.step()
    train, held = loader(x[::2], y[::2]), loader(x[1::2], y[1::2])
    la = ScaLLA(net, "regression", num_features=4, sigma_noise=torch.tensor([0.1, 10.0]), seed=0)
    la = la.fit(train, num_steps=20)
    narrow = la.predict(torch.tensor([[6.0]])).var
    la.fit_residual(train, held)
    assert la.residual is not None
    assert float(la.residual.shape[0]) == 1.0
    torch.testing.assert_close(la.residual.scale, (net(x[1::2]) - y[1::2]).square().mean(0).detach())
    assert bool((la.predict(torch.tensor([[6.0]])).var > narrow).all())
    with pytest.raises(InputError, match="got a context for a regression"):
        la.fit_residual(train, held, context=x)


@pytest.mark.parametrize("outputs", [1, 2])
def test_two_classes_by_one_logit_or_two(outputs: int) -> None:
    x, y = blobs(120, 0)
    la = ScaLLA(mlp(outputs).double(), num_features=3).fit(loader(x, y % 2), num_steps=5)
    la.fit_residual(loader(x, y % 2), loader(x, y % 2), context=5 * x)
    probs = la(x)
    assert probs.shape == (120, outputs)
    assert bool(((probs >= 0) & (probs <= 1)).all())


def test_network_is_untouched_and_batches_do_not_matter(network: nn.Module) -> None:
    before = {k: t.clone() for k, t in network.state_dict().items()}
    hooks = [len(m._forward_pre_hooks) for m in network.modules()]
    la = with_residual(network)
    assert all(torch.equal(t, before[k]) for k, t in network.state_dict().items())
    assert [len(m._forward_pre_hooks) for m in network.modules()] == hooks
    x = blobs(30, 5)[0]
    torch.testing.assert_close(torch.cat([la(part) for part in x.split(7)]), la(x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("surrogate", ["mirror", "trunk"])
def test_saved_and_loaded(network: nn.Module, tmp_path: Path, surrogate: str) -> None:
    la = fitted(network, surrogate=surrogate)
    la.fit_residual(loader(*blobs(300, 0)), loader(*blobs(200, 1)))
    x = blobs(20, 5)[0]
    la.save(tmp_path / "la.safetensors")
    again = ScaLLA.load(tmp_path / "la.safetensors", network)
    assert torch.equal(again(x), la(x))
    other = ScaLLA(network, num_features=6, seed=3, surrogate=surrogate)
    other.load_state_dict(la.state_dict())
    assert torch.equal(other(x), la(x))


def test_half_precision_saved_and_loaded(network: nn.Module, tmp_path: Path) -> None:
    """Distances are kept in float32 beside a network in bfloat16, and come back so."""
    half = copy.deepcopy(network).bfloat16()
    x, y = blobs(120, 0)
    la = ScaLLA(half, num_features=3).fit(loader(x.bfloat16(), y), num_steps=2)
    la.fit_residual(loader(x.bfloat16(), y), loader(x.bfloat16(), y), context=None)
    assert la.residual is not None
    assert la.residual.scale.dtype == torch.float32
    la.save(tmp_path / "la.safetensors")
    assert torch.equal(ScaLLA.load(tmp_path / "la.safetensors", half)(x), la(x))


def test_fitted_again_the_layers_speak_once(network: nn.Module) -> None:
    la = with_residual(network)
    la.fit_residual(loader(*blobs(300, 0)), loader(*blobs(200, 1)), layers=["2", "4"])
    assert la.feature_map is not None
    twin = la.feature_map.network.twin
    assert [len(m._forward_pre_hooks) for m in twin] == [0, 0, 1, 0, 1]


def test_damaged_residual_is_refused(network: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "la.safetensors"
    with_residual(network).save(path)
    tensors, meta = read_file(path, "posterior")
    del meta["kind"], meta["schema"]
    for change, message in (
        ({"sizes": [[3, 10**9, 1], [3, 12, 3], [3, 8, 3]]}, "its residual is not of the sizes"),
        ({"layers": ["0", "2", "nowhere"]}, "layers of its residual are not those"),
    ):
        write_file(path, tensors, {**meta, "residual": {**meta["residual"], **change}}, "posterior")
        with pytest.raises(FileFormatError, match=message):
            ScaLLA.load(path, network)


@pytest.mark.parametrize("surrogate", ["mirror", "trunk"])
def test_exported(tmp_path: Path, surrogate: str) -> None:
    """`export` compares ONNX Runtime with PyTorch's own prediction itself."""
    pytest.importorskip("onnxruntime")
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.rand(90, 1, 6, 6), torch.randint(3, (90,))
    la = ScaLLA(net, num_features=4, surrogate=surrogate).fit(loader(x, y), num_steps=5)
    la.fit_residual(loader(x, y), loader(x.flip(-1), y))
    exported = la.export(tmp_path / "la.onnx", x[:5])
    assert exported.max_difference is not None
    assert exported.max_difference < 1e-4
    program = la.export_program(x[:5])
    torch.testing.assert_close(program.module()(x[:7])["probs"], la(x[:7]))


def test_a_new_fit_drops_it(network: nn.Module) -> None:
    la = with_residual(network)
    assert isinstance(la.residual, Residual)
    assert la.fit(loader(*blobs(300, 0)), num_steps=1).residual is None


def test_bad_input(network: nn.Module) -> None:
    x, y = blobs(60, 0)
    with pytest.raises(NotFittedError):
        ScaLLA(network).fit_residual(loader(x, y), loader(x, y))
    la = fitted(network)
    for options, message in (
        ({"layers": ["nowhere"]}, r"got layers=\['nowhere'\]; wanted names of layers"),
        ({"layers": []}, r"got layers=\[\]"),
        ({"ridge": 0.0}, "ridge=0.0"),
        ({"context_weight": -1.0}, "context_weight=-1.0"),
    ):
        with pytest.raises(InputError, match=message):
            la.fit_residual(loader(x, y), loader(x, y), **options)
    with pytest.raises(InputError, match="got context='generate'; wanted 'generated'"):
        la.fit_residual(loader(x, y), loader(x, y), context="generate")
    with pytest.raises(InputError, match="NaN or infinite values in the inputs of val_loader"):
        la.fit_residual(loader(x, y), loader(x * torch.nan, y))
    assert la.residual is None


def test_variance_is_bounded() -> None:
    found = variance(torch.tensor([-1e9, 1e9]), *torch.tensor([0.0, 0.0, 1.0]))
    assert float(found[0]) > 0
    assert math.isfinite(float(found[1]))
