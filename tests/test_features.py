"""The feature map: the layout of C·m, its scale and checks; weights and modes shared with the network left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import BatchNormCNN, dropout_mlp, loader, mlp, normal
from oracles import JacobianFeatures, dense_jacobian
from scalla import InputError, ScaLLA
from scalla.features import undone_on_error
from untouched import assert_untouched, state_of

X, Y = normal(12, 2, dtype=torch.float64), torch.arange(12) % 3


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp().double()


def fitted(surrogate: Any, num_features: int = 4, *, num_steps: int = 0, model: nn.Module | None = None) -> ScaLLA:
    la = ScaLLA(model or network(), num_features=num_features, surrogate=surrogate)
    return la.fit(loader(X, Y, 5), num_steps=num_steps)


class Returns(nn.Module):
    """Whatever `function` makes of the inputs."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


# ---------------------------------------------------------------- layout


def test_a_module_of_ones_own_is_used_as_it_is() -> None:
    surrogate = Returns(lambda x: torch.arange(12.0, dtype=torch.float64).view(1, 3, 4) * x[:, :1, None])
    la = fitted(surrogate)
    assert torch.equal(la.features(X), surrogate(X))
    assert la.surrogate is surrogate


def test_feature_j_of_output_c_is_number_c_m_plus_j_of_the_widened_layer() -> None:
    """Output-major: the m features of one output lie together."""
    la = fitted("mirror", num_features=5)
    assert la.surrogate is not None
    assert la.feature_map is not None
    with torch.no_grad():
        flat = la.surrogate.body(X)  # type: ignore[operator, union-attr]
    assert flat.shape == (12, 15)
    found = la.features(X)
    for c in range(3):
        for j in range(5):
            torch.testing.assert_close(found[:, c, j], flat[:, 5 * c + j] * la.feature_map.scale, rtol=1e-12, atol=0)


@pytest.mark.parametrize("surrogate", ["mirror", "trunk"])
@pytest.mark.parametrize("num_features", [1, 2, 7, 50])
def test_any_number_of_features(num_features: int, surrogate: str) -> None:
    """m need not divide anything, and may exceed the data and the weights."""
    la = fitted(surrogate, num_features, num_steps=2)
    assert la.features(X[:5]).shape == (5, 3, num_features)
    assert la.posterior_precision.shape == (num_features, num_features)
    assert la.functional_variance(X[:5]).shape == (5, 3, 3)


def test_features_of_one_input_at_a_time() -> None:
    for surrogate in ("mirror", "trunk", JacobianFeatures(network())):
        la = fitted(surrogate, 33, num_steps=0 if isinstance(surrogate, nn.Module) else 2)
        torch.testing.assert_close(la.features(X), torch.cat([la.features(x[None]) for x in X]), rtol=1e-12, atol=1e-12)


def test_features_carry_gradients_when_asked_for_alone() -> None:
    x = X.clone().requires_grad_()
    assert not fitted("mirror").features(x).requires_grad
    la = ScaLLA(network(), num_features=4, enable_backprop=True).fit(loader(X, Y, 5), num_steps=1)
    (gradient,) = torch.autograd.grad(la.ood_score(x).sum(), x)
    step = 1e-6 * torch.eye(2, dtype=torch.float64)
    for k in range(2):  # against central differences
        difference = (la.ood_score(X + step[k]) - la.ood_score(X - step[k])) / 2e-6
        torch.testing.assert_close(gradient[:, k], difference.detach(), rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------- surrogates that do not fit


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x: x.new_zeros(len(x), 12), r"\(5, 12\)"),
        (lambda x: x.new_zeros(len(x), 3, 5), r"\(5, 3, 5\)"),
        (lambda x: x.new_zeros(len(x), 4, 3), r"\(5, 4, 3\)"),
        (lambda x: x.new_zeros(1, 3, 4), r"\(1, 3, 4\)"),
        (lambda x: (x.new_zeros(len(x), 3, 4),), "tuple"),
        (lambda x: None, "NoneType"),
    ],
)
@pytest.mark.parametrize("num_steps", [0, 3])
def test_features_of_another_shape_are_refused(function: Any, found: str, num_steps: int) -> None:
    message = rf"the surrogate gave {found} for 5 inputs; wanted \(B, C, m\) = \(5, 3, 4\), with C = 3 from the network"

    class Trainable(Returns):
        def __init__(self) -> None:
            super().__init__(function)
            self.weight = nn.Parameter(torch.zeros(()))

    with pytest.raises(InputError, match=message):
        fitted(Trainable(), num_steps=num_steps)


def test_a_shape_that_changes_with_the_batch_is_refused_when_it_comes() -> None:
    surrogate = Returns(lambda x: x.new_ones(len(x), 3, 4 if len(x) == 5 else 3))
    with pytest.raises(InputError, match=r"the surrogate gave \(2, 3, 3\) for 2 inputs; wanted .*\(2, 3, 4\)"):
        fitted(surrogate)  # the last batch of 12 = 5 + 5 + 2


def test_an_error_inside_a_surrogate_is_its_own() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        fitted(nn.Linear(7, 12, dtype=torch.float64))


def test_features_that_are_not_finite_are_refused() -> None:
    with pytest.raises(InputError, match="the features are NaN or infinite for finite inputs"):
        fitted(Returns(lambda x: x.new_full((len(x), 3, 4), torch.inf)))


def test_a_surrogate_without_weights_is_not_trained() -> None:
    surrogate = Returns(lambda x: x.new_ones(len(x), 3, 4))
    with pytest.raises(InputError, match="no trainable weights; give num_steps=0 to use it as it is"):
        fitted(surrogate, num_steps=3)


# ---------------------------------------------------------------- shared with the network


class OnTheNetwork(nn.Module):
    """A surrogate that holds the network itself: its hidden layer, then a layer of its own."""

    def __init__(self, model: nn.Sequential, at: int) -> None:
        super().__init__()
        self.model, self.at = model, at
        width = model(X[:2] if model[0].weight.ndim == 2 else normal(2, 1, 6, 6)).shape[-1] if at < 0 else None
        self.head = nn.Linear(width or model[-1].in_features, 12, dtype=model[-1].weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.model[: self.at](x)).view(-1, 3, 4)


def test_weights_of_the_network_inside_a_surrogate_are_not_trained() -> None:
    model = network()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    assert isinstance(model, nn.Sequential)
    surrogate = OnTheNetwork(model, 2)
    before, head = state_of(model), surrogate.head.weight.detach().clone()
    la = fitted(surrogate, num_steps=5, model=model)
    assert_untouched(model, before)
    assert not torch.equal(surrogate.head.weight, head)
    assert la.feature_map is not None
    assert len(la.feature_map.trainable()) == 2


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(5)], ids=["dropout", "batch normalisation"])
def test_layers_of_the_network_in_training_mode_inside_a_surrogate_are_refused(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(2, 5), layer, nn.Tanh(), nn.Linear(5, 3)).double().train()
    surrogate = OnTheNetwork(model, 3)
    before = state_of(model)
    with pytest.raises(InputError, match=r"layers of the network itself that are in training mode.*model.eval\(\)"):
        fitted(surrogate, num_steps=2, model=model)
    assert_untouched(model, before)
    model.eval()
    before = state_of(model)
    fitted(surrogate, num_steps=2, model=model)
    assert_untouched(model, before)


def test_a_surrogates_own_modes_are_those_of_training_then_of_evaluation() -> None:
    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.modes = nn.Linear(2, 12, dtype=torch.float64), []

        def forward(self, x: Tensor) -> Tensor:
            self.modes.append(self.training)
            return self.layer(x).view(-1, 3, 4)

    surrogate = Watched()
    fitted(surrogate, num_steps=3)
    # A check, three steps, then one pass over the three batches.
    assert surrogate.modes == [False, True, True, True, False, False, False]


# ---------------------------------------------------------------- following the network, and undoing


@pytest.mark.parametrize("surrogate", ["mirror", "trunk"])
def test_features_follow_the_network_to_another_precision(surrogate: str) -> None:
    model = BatchNormCNN()
    x = normal(8, 1, 6, 6)
    la = ScaLLA(model, num_features=4, surrogate=surrogate).fit([(x, torch.arange(8) % 3)], num_steps=2)
    before = la.features(x)
    la.double()
    assert la.features(x).dtype == torch.float64
    torch.testing.assert_close(la.features(x).float(), before, rtol=1e-4, atol=1e-5)
    assert next(iter(la.feature_map.params.values())).dtype == torch.float64  # type: ignore[union-attr]


def test_what_fails_leaves_a_module_as_it_was() -> None:
    module = nn.Sequential(dropout_mlp(), nn.BatchNorm1d(3)).eval()
    module[0].train()
    weight = module[0][0].weight
    weight.grad = torch.ones_like(weight)
    before, values = state_of(module), copy.deepcopy(module.state_dict())
    with pytest.raises(ZeroDivisionError), undone_on_error(module):  # noqa: PT012
        module.train()
        module(normal(4, 2)).sum().backward()
        with torch.no_grad():
            weight.add_(1)
        raise ZeroDivisionError
    after = module.state_dict()
    assert all(torch.equal(after[k], v) for k, v in values.items())
    assert [m.training for m in module.modules()] == before["modes"]
    assert weight.grad is not None
    with undone_on_error(module), torch.no_grad():
        weight.add_(1)
    assert not torch.equal(weight, values["0.0.weight"])


def test_exact_jacobians_are_features_in_the_kernels_own_scale() -> None:
    model = network()
    la = fitted(JacobianFeatures(model), 33, model=model)
    flat = la.features(X).flatten(0, 1)
    wanted = dense_jacobian(model, X).flatten(0, 1)
    torch.testing.assert_close(flat @ flat.mT, wanted @ wanted.mT, rtol=1e-12, atol=1e-12)
