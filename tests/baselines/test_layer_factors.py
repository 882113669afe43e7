"""Jacobians in the factors of their layers: against a plain backward loop, and refused where they are not all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from scalla.baselines.ella import ELLA
from scalla.baselines.jacobians import exact_jacobians, factored_jacobians, factored_selection
from scalla.baselines.laplace_torch import quiet
from scalla.baselines.layer_factors import kernel_between, kernel_within, layer_factors, products_with
from scalla.functional import FrozenNetwork, Params


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, (2, 1), stride=(1, 2)),
        nn.Tanh(), nn.Flatten(), nn.Linear(4 * 2 * 2, 5), nn.ReLU(), nn.Linear(5, 3),
    )  # fmt: skip


def same_padding() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, (3, 5), padding="same", dilation=(1, 2)), nn.Tanh(), nn.Conv2d(3, 2, 3, padding="valid"),
        nn.Flatten(), nn.Linear(2 * 5 * 5, 3, bias=False),
    )  # fmt: skip


class Branches(nn.Module):
    """Layers that are not one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(98, 4), nn.Linear(98, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.head(torch.tanh(self.first(x)) * self.second(x))


class Twice(Branches):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x.flatten(1))) + self.head(self.second(x.flatten(1)))


class Outside(Branches):
    """The head's weights serve a second time, outside the layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.head.weight.square().sum()


class Sequence(Branches):
    """Linear layers on (B, 2, D) inputs."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([x.flatten(1), x.flatten(1).flip(1)], 1)
        return self.head(torch.tanh(self.first(x)) * self.second(x)).mean(1)


class Normalised(Branches):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(98)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x.flatten(1)))


def in_place() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(98, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))


def grouped() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(100, 3))


FACTORED = (convolutions, same_padding, Branches)
NOT_FACTORED = (Twice, Outside, Sequence, Normalised, in_place, grouped)


def made(make) -> tuple[FrozenNetwork, Params, Tensor]:
    torch.manual_seed(0)
    network = FrozenNetwork(make().double())
    return network, {k: p.detach() for k, p in network.twin.named_parameters()}, torch.randn(4, 2, 7, 7).double()


def backward_loop(network: FrozenNetwork, params: Params, x: Tensor) -> Tensor:
    """(B, C, P) by one backward pass for each input and output."""
    weights = {k: p.clone().requires_grad_(True) for k, p in params.items()}
    rows = []
    for single in x:
        outputs = network.at(single[None])(weights)[0]
        grads = [torch.autograd.grad(f, [*weights.values()], retain_graph=True) for f in outputs]
        rows.append(torch.stack([torch.cat([g.flatten() for g in parts]) for parts in grads]))
    return torch.stack(rows)


@pytest.mark.parametrize("make", FACTORED)
def test_blocks_are_the_jacobian(make) -> None:
    network, params, x = made(make)
    factors = layer_factors(network, params, x)
    assert factors is not None
    blocks = {f.weight: f.weight_block() for f in factors} | {f.bias: f.bias_block() for f in factors if f.bias}
    found = torch.cat([blocks[name] for name in params], -1)
    torch.testing.assert_close(found, backward_loop(network, params, x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("make", NOT_FACTORED)
def test_networks_that_are_more_than_their_layers_are_left_to_the_general_way(make) -> None:
    network, params, x = made(make)
    assert layer_factors(network, params, x) is None
    (dense,) = factored_jacobians(network, params, x)
    torch.testing.assert_close(dense.left[..., 0], backward_loop(network, params, x), rtol=1e-9, atol=1e-11)


def test_weights_of_the_last_layer_alone() -> None:
    network, params, x = made(convolutions)
    chosen = {k: p for k, p in params.items() if k.startswith("8.")}
    factors = layer_factors(network, chosen, x)
    assert factors is not None
    expected = exact_jacobians(network, chosen, x)
    torch.testing.assert_close(torch.cat([factors[0].weight_block(), factors[0].bias_block()], -1), expected)
    assert layer_factors(network, {"8.weight": params["8.weight"]}, x) is None  # without its bias


@pytest.mark.parametrize("make", [*FACTORED, Sequence])
def test_products_equal_those_of_the_jacobian(make) -> None:
    network, params, x = made(make)
    z, outputs = torch.randn(5, 2, 7, 7).double(), torch.tensor([0, 2, 1, 1, 0])
    factors, rows = factored_jacobians(network, params, x), factored_selection(network, params, z, outputs)
    jacobians = backward_loop(network, params, x)
    selected = backward_loop(network, params, z)[torch.arange(5), outputs]
    between = torch.einsum("bcp,mp->bcm", jacobians, selected)
    torch.testing.assert_close(kernel_between(factors, rows)[..., 0], between, rtol=1e-9, atol=1e-11)
    within = torch.einsum("bcp,bdp->bcd", jacobians, jacobians)
    torch.testing.assert_close(kernel_within(factors), within, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("make", FACTORED)
def test_products_with_directions(make) -> None:
    network, params, x = made(make)
    directions = {name: torch.randn(p.numel(), 6, dtype=torch.float64) for name, p in params.items()}
    factors = layer_factors(network, params, x)
    assert factors is not None
    expected = backward_loop(network, params, x) @ torch.cat([*directions.values()])
    torch.testing.assert_close(products_with(factors, directions), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("make", FACTORED)
def test_features_of_ella_are_laplace_torchs(make) -> None:
    network, _, x = made(make)
    inputs = torch.randn(12, *x.shape[1:], dtype=torch.float64)
    loader = DataLoader(TensorDataset(inputs, torch.arange(12) % 3), batch_size=6)
    method = ELLA(network.twin, num_points=10, num_features=4).fit(loader)
    posterior = method._laplace
    found, mean = posterior._features(x)
    with quiet():
        expected, expected_mean = type(posterior)._features(posterior, x)
    torch.testing.assert_close(mean, expected_mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("make", [convolutions, Sequence])
def test_gradient_in_the_inputs(make) -> None:
    """Of the kernel in z, by finite differences."""
    network, params, x = made(make)
    z, outputs = torch.randn(2, 2, 7, 7).double(), torch.tensor([2, 0])
    factors = factored_jacobians(network, params, x)

    def value(at: Tensor) -> Tensor:
        return kernel_between(factors, factored_selection(network, params, at, outputs)).square().sum()

    (gradient,) = torch.autograd.grad(value(z.requires_grad_(True)), z)
    direction = torch.randn_like(z)
    step = 1e-6
    slope = (value(z.detach() + step * direction) - value(z.detach() - step * direction)) / (2 * step)
    assert float((gradient * direction).sum()) == pytest.approx(float(slope), rel=1e-6)


def test_nothing_is_left_on_the_network() -> None:
    network, params, x = made(convolutions)
    layer_factors(network, params, x)
    assert all(not module._forward_hooks for module in network.twin.modules())
    assert all(p.grad is None for p in network.twin.parameters())
    assert all(not f.left.requires_grad and not f.right.requires_grad for f in factored_jacobians(network, params, x))
