"""Surrogates: the last layer widened in any network, heads on its features; starts, sizes, the network left alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import CASES, BatchNormCNN, Case, EncoderClassifier, mlp, normal, tiny_bert, words
from scalla.features import FeatureMap
from scalla.functional import FrozenNetwork, find_head
from scalla.surrogate import Mirror, Trunk, build_surrogate
from scalla.types import InputError
from untouched import assert_untouched, same_bits, state_of

NUM_FEATURES = 4


def built(
    kind: str, model: nn.Module, x: Any, *, num_features: int = NUM_FEATURES, seed: int = 0, **options: Any
) -> FeatureMap:
    """The network with a new surrogate, as a fit begins with it."""
    with torch.no_grad():
        num_outputs = FrozenNetwork(model)(x).shape[-1]
    features = FeatureMap(model, {}, num_outputs=num_outputs, num_features=num_features)
    features.build(kind, x, options, seed)
    return features


def raw(features: FeatureMap, x: Any) -> Tensor:
    with torch.no_grad():
        return features.raw(x)


def mirror_of(features: FeatureMap) -> Mirror:
    assert isinstance(features.surrogate, Mirror)
    return features.surrogate


# ---------------------------------------------------------------- any network


@pytest.mark.parametrize("kind", ["mirror", "trunk"])
@pytest.mark.parametrize("name", CASES)
def test_features_of_every_network_have_the_size_of_the_normalised_kernel(name: str, kind: str) -> None:
    """(B, C, m), and g(x) g(x)ᵀ one on average over the first inputs: that is the scale of the target."""
    case: Case = CASES[name]
    model, x = case.model(), case.inputs(64)
    before, random_state = state_of(model), torch.get_rng_state()
    features = raw(built(kind, model, x, num_features=50), x)
    assert features.shape == (64, case.num_outputs, 50)
    diagonal = float(features.square().sum(-1).mean())
    assert diagonal == pytest.approx(1, abs=1e-3 if kind == "mirror" else 0.5)
    assert_untouched(model, before)
    assert torch.equal(torch.get_rng_state(), random_state)


class NamedOddly(nn.Module):
    """A head that is not called `fc`, and a layer of as many outputs that runs before it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(2, 3)
        self.stages = nn.ModuleDict({"a": nn.Sequential(nn.Tanh(), nn.Linear(3, 7)), "b": nn.Linear(7, 3)})
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.stages["b"](self.stages["a"](self.last(x)))


class SharedWeight(nn.Module):
    """Two layers with one weight, the last of them the head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.out = nn.Linear(3, 3)
        self.out.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.first(x)))


class SharedLayer(nn.Module):
    """One layer under two names, as networks with an alias for their head have it."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(2, 3)
        self.alias = self.classifier

    def forward(self, x: Tensor) -> Tensor:
        return self.alias(x)


def convolutional(head: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU(), head, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def conv1d_head() -> nn.Module:
    return nn.Sequential(nn.Conv1d(4, 3, 3, stride=2, dilation=2, padding=1), nn.AdaptiveAvgPool1d(1), nn.Flatten())


@pytest.mark.parametrize(
    ("build", "shape", "head"),
    [
        (NamedOddly, (2,), "stages.b"),
        (lambda: nn.Linear(2, 3), (2,), ""),
        (lambda: nn.Sequential(nn.Linear(2, 3, bias=False)), (2,), "0"),
        (SharedWeight, (3,), "out"),
        (SharedLayer, (2,), "classifier"),
        (lambda: nn.Sequential(nn.Tanh(), nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))), (2,), "1"),
        (lambda: convolutional(nn.Conv2d(5, 3, 1)), (1, 6, 6), "2"),
        (lambda: convolutional(nn.Conv2d(5, 3, 3, stride=2, padding="valid", bias=False)), (1, 6, 6), "2"),
        (lambda: convolutional(nn.utils.parametrizations.spectral_norm(nn.Conv2d(5, 3, 1))), (1, 6, 6), "2"),
        (lambda: convolutional(nn.utils.parametrizations.weight_norm(nn.Conv2d(5, 3, 1))), (1, 6, 6), "2"),
        (conv1d_head, (4, 8), "0"),
    ],
    ids=[
        "odd names", "the root itself", "no bias", "shared weight", "shared layer", "parametrised", "conv",
        "conv, strided", "spectral norm", "weight norm", "conv1d",
    ],
)  # fmt: skip
def test_heads_of_every_kind_are_widened(build: Any, shape: tuple[int, ...], head: str) -> None:
    torch.manual_seed(0)
    model, x = build(), normal(8, *shape)
    before = state_of(model)
    features = built("mirror", model, x)
    assert features.head == head
    found = raw(features, x)
    assert found.shape == (8, 3, NUM_FEATURES)
    assert float(found.square().sum(-1).mean()) == pytest.approx(1, abs=1e-3)
    old, new = model.get_submodule(head), mirror_of(features).head
    assert new.weight.shape == (3 * NUM_FEATURES, *old.weight.shape[1:])
    assert_untouched(model, before)


def test_every_feature_is_a_head_of_its_own_on_the_networks_hidden_layer() -> None:
    """g_cj(x) = w_cj · h(x) + b_cj, at the start with the network's own h and no bias."""
    model, x = mlp().double(), normal(9, 2, dtype=torch.float64)
    features = built("mirror", model, x)
    hidden = torch.tanh(model[0](x)).detach()
    head = mirror_of(features).head
    wanted = hidden @ head.weight.detach().view(3, NUM_FEATURES, -1).flatten(0, 1).T
    torch.testing.assert_close(raw(features, x), wanted.view(9, 3, NUM_FEATURES), rtol=1e-12, atol=1e-12)
    assert not head.bias.any()


def test_a_trained_start_is_the_networks_body_and_a_random_one_is_not() -> None:
    model, x = mlp(), normal(8, 2)
    trained = mirror_of(built("mirror", model, x)).body
    assert torch.equal(trained[0].weight, model[0].weight)
    fresh = mirror_of(built("mirror", model, x, start="random")).body
    assert not torch.equal(fresh[0].weight, model[0].weight)
    bound = 1 / math.sqrt(2)  # nn.Linear's own rule for two inputs
    assert float(fresh[0].weight.detach().abs().max()) <= bound
    assert float(raw(built("mirror", model, x, start="random"), x).square().sum(-1).mean()) == pytest.approx(
        1, abs=1e-3
    )


@pytest.mark.parametrize(("kind", "options"), [("mirror", {}), ("mirror", {"start": "random"}), ("trunk", {})])
def test_the_seed_alone_decides_the_start(kind: str, options: dict[str, Any]) -> None:
    model, x = BatchNormCNN(), normal(8, 1, 6, 6)
    found = []
    for global_seed, seed in ((1, 0), (2, 0), (2, 1)):
        torch.manual_seed(global_seed)
        found.append(raw(built(kind, model, x, seed=seed, **options), x))
    assert same_bits(found[0], found[1])
    assert not torch.equal(found[0], found[2])


# ---------------------------------------------------------------- mirror


def test_the_mirror_owns_its_weights_and_follows_no_change_of_the_network() -> None:
    model, x = BatchNormCNN(), normal(8, 1, 6, 6)
    features = built("mirror", model, x)
    mirror, before = mirror_of(features), raw(features, x)
    own = {t.data_ptr() for t in (*mirror.parameters(), *mirror.buffers())}
    assert own.isdisjoint({t.data_ptr() for t in (*model.parameters(), *model.buffers())})
    with torch.no_grad():
        for t in (*model.parameters(), *model.buffers()):
            t.add_(1)
    assert torch.equal(raw(features, x), before)


def test_the_mirror_stays_in_evaluation_mode() -> None:
    """Features depend on their own input alone: no dropout, no statistics of the batch."""
    for case in ("dropout", "cnn_batchnorm", "transformer_encoder"):
        model, x = CASES[case].model().train(), CASES[case].inputs(8)
        features = built("mirror", model, x)
        features.set_training(True)
        assert features.surrogate is not None
        assert features.surrogate.training
        whole = raw(features, x)
        torch.testing.assert_close(whole, torch.cat([raw(features, x[:3]), raw(features, x[3:])]), rtol=1e-4, atol=1e-5)
        assert torch.equal(raw(features, x), whole)


def test_all_of_the_mirror_is_trained_whatever_the_network_freezes() -> None:
    model = mlp()
    for p in model.parameters():
        p.requires_grad_(False)
    features = built("mirror", model, normal(8, 2))
    assert len(features.trainable()) == 4
    assert all(p.requires_grad for p in features.trainable())
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("kind", ["mirror", "trunk"])
def test_surrogates_of_half_precision_networks_are_float32(kind: str) -> None:
    model = mlp().bfloat16()
    features = built(kind, model, normal(8, 2))
    assert features.surrogate is not None
    assert {p.dtype for p in features.surrogate.parameters()} == {torch.float32}
    assert raw(features, normal(8, 2)).dtype == torch.float32
    double = built(kind, mlp().double(), normal(8, 2))
    assert raw(double, normal(8, 2)).dtype == torch.float64


class FixedWidth(nn.Module):
    """What comes after the head knows its width."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.head, self.shape = nn.Linear(2, 3), shape

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).reshape(self.shape)


@pytest.mark.parametrize(
    ("shape", "found"),
    [((-1, 3), r"changed the network's output to \(32, 3\)"), ((8, -1, 3), r"changed .* to \(8, 4, 3\)"),
     ((8, 3), "made the network fail .*shape '.8, 3.'")],
)  # fmt: skip
def test_a_network_that_depends_on_the_width_of_its_head_is_refused(shape: tuple[int, ...], found: str) -> None:
    x = normal(8, 2)
    network = FrozenNetwork(FixedWidth(*shape))
    mirror = Mirror(network, "head", 3, NUM_FEATURES)
    with pytest.raises(InputError, match=f"to 12 outputs {found}.*depends on its width. Use a surrogate of your own"):
        mirror.initialise(network, x, seed=0)
    with pytest.raises(InputError, match="something runs after that layer and changes its output"):
        Trunk(network, "head", 3, NUM_FEATURES).initialise(network, x, seed=0)


def test_heads_that_cannot_be_widened_are_refused() -> None:
    grouped = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Conv2d(3, 3, 1, groups=3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(InputError, match="groups=3; only groups=1 can be widened"):
        built("mirror", grouped, normal(4, 1, 6, 6))
    with pytest.raises(InputError, match=r"300000000 outputs .*on a layer of 5 inputs make 1.5e\+09 weights, too many"):
        built("mirror", mlp(), normal(4, 2), num_features=100_000_000)


# ---------------------------------------------------------------- trunk


@pytest.mark.parametrize("hidden", [0, 6])
def test_the_trunk_is_a_head_on_the_standardised_penultimate_features(hidden: int) -> None:
    model, x = mlp().double(), normal(30, 2, dtype=torch.float64)
    features = built("trunk", model, x, hidden=hidden)
    trunk = features.surrogate
    assert isinstance(trunk, Trunk)
    phi = torch.tanh(model[0](x)).detach()
    torch.testing.assert_close(trunk.shift, phi.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(trunk.spread, phi.std(0, correction=0).mean(), rtol=1e-12, atol=1e-12)
    h = (phi - phi.mean(0)) / phi.std(0, correction=0).mean()
    wanted = h @ trunk.linear.weight.detach().T
    assert (trunk.expand is None) == (hidden == 0)
    if trunk.expand is not None and trunk.correct is not None:
        wanted = wanted + torch.relu(h @ trunk.expand.weight.detach().T) @ trunk.correct.weight.detach().T
    torch.testing.assert_close(raw(features, x), wanted.view(30, 3, NUM_FEATURES), rtol=1e-12, atol=1e-12)


def test_the_trunk_shares_the_networks_pass() -> None:
    """One forward pass of the network gives outputs and features."""
    model, x = mlp(), normal(8, 2)
    features = built("trunk", model, x)
    features.set_training(False)
    passes: list[nn.Module] = []
    with torch.no_grad():
        features.network.twin[0].register_forward_hook(lambda mod, args, out: passes.append(mod))
        outputs, found = features(x)
        torch.testing.assert_close(outputs, model(x))
    assert len(passes) == 1
    assert torch.equal(found, raw(features, x))


def test_a_trunk_on_convolutions_without_anything_after_them() -> None:
    """The head may be a convolution whose output is pooled afterwards: then its input is no row of features."""
    model = convolutional(nn.Conv2d(5, 3, 1))
    found = raw(built("trunk", model, normal(8, 1, 6, 6)), normal(8, 1, 6, 6))
    assert found.shape == (8, 3, NUM_FEATURES)


class AfterTheHead(nn.Module):
    def __init__(self, after: nn.Module) -> None:
        super().__init__()
        self.head, self.after = nn.Linear(2, 3), after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.head(x))


def test_a_network_with_something_after_its_head_has_no_trunk() -> None:
    model, x = AfterTheHead(nn.LogSoftmax(-1)), normal(8, 2)
    with pytest.raises(InputError, match=r"something runs after that layer.*surrogate='mirror' or a module"):
        built("trunk", model, x)
    assert raw(built("mirror", model, x), x).shape == (8, 3, NUM_FEATURES)
    each_alone = AfterTheHead(nn.Softplus())  # leaves the hidden units apart from the outputs
    assert raw(built("trunk", each_alone, x), x).shape == (8, 3, NUM_FEATURES)


def test_features_of_constant_hidden_units_are_finite() -> None:
    """Hidden units that are all zero (dead ReLUs) have no spread to divide by."""
    model = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 3))
    with torch.no_grad():
        model[0].bias.fill_(-100)
    for kind in ("mirror", "trunk"):
        assert torch.isfinite(raw(built(kind, model, normal(8, 2)), normal(8, 2))).all()


# ---------------------------------------------------------------- networks that take mappings, and options


@pytest.mark.parametrize("kind", ["mirror", "trunk"])
def test_networks_with_keyword_inputs(kind: str) -> None:
    model, x = tiny_bert(), words(6)
    features = built(kind, model, x)
    assert features.head == "classifier"
    assert raw(features, x).shape == (6, 3, NUM_FEATURES)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("mirror", {"start": "zero"}, "start='zero' for the mirror surrogate; choose 'trained' or 'random'"),
        ("mirror", {"hidden": 3}, r"surrogate_options \['hidden'\] for 'mirror'; it takes \[.*'start'.*\]"),
        ("trunk", {"start": "random"}, r"surrogate_options \['start'\] for 'trunk'; it takes \[.*'hidden'.*\]"),
        ("branch", {}, "surrogate='branch'; choose 'mirror', 'trunk' or give a module"),
    ],
)
def test_kinds_and_options_that_do_not_exist_are_refused(kind: str, options: dict[str, Any], message: str) -> None:
    network = FrozenNetwork(EncoderClassifier())
    with pytest.raises(InputError, match=message):
        build_surrogate(kind, network, find_head(network, normal(2, 4, 8)), 3, NUM_FEATURES, options)
