"""The exact kernel, the error and its floor, and the estimate from probes, each against dense algebra."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from cases import CASES, loader, mlp, normal
from oracles import JacobianFeatures, dense_jacobian, rank_floor
from scalla import InputError, KernelError, NotFittedError, ScaLLA
from scalla.functional import FrozenNetwork, select_parameters
from scalla.jvp import JacobianProduct
from scalla.kernel_error import KernelScore, exact_kernel, kernel_error, without_cross_groups
from scalla.probes import draw_probe


def dense_kernel(model: nn.Module, x: object) -> Tensor:
    flat = dense_jacobian(model, x).flatten(0, 1)
    return flat @ flat.mT


@pytest.mark.parametrize("name", ["mlp", "one_logit", "cnn_batchnorm", "lstm", "transformer_encoder", "dict_keywords"])
@pytest.mark.parametrize(("chunk_size", "max_jacobian_bytes"), [(32, 4e9), (3, 4e9), (3, 0.0), (1, 0.0)])
def test_exact_kernel_whatever_the_chunks(name: str, chunk_size: int, max_jacobian_bytes: float) -> None:
    case = CASES[name]
    model, x = case.model(dtype=torch.float64), case.inputs(7)
    network = FrozenNetwork(model)
    params = select_parameters(network, "all", x)
    found = exact_kernel(network, params, x, chunk_size=chunk_size, max_jacobian_bytes=max_jacobian_bytes)
    torch.testing.assert_close(found, dense_kernel(model, x), rtol=1e-11, atol=1e-11)


def test_exact_kernel_of_a_float32_network_is_accumulated_in_float64() -> None:
    model, x = mlp(width=200), normal(7, 2)
    network = FrozenNetwork(model)
    found = exact_kernel(network, select_parameters(network, "all", x), x)
    assert found.dtype == torch.float64
    assert float((found - dense_kernel(model, x)).norm() / found.norm()) < 1e-7


def test_kernel_of_some_weights() -> None:
    model, x = mlp().double(), normal(5, 2)
    network = FrozenNetwork(model)
    found = exact_kernel(network, select_parameters(network, "last_layer", x), x)
    flat = dense_jacobian(model, x, ["2.weight", "2.bias"]).flatten(0, 1)
    torch.testing.assert_close(found, flat @ flat.mT, rtol=1e-12, atol=1e-12)


def random_kernel(rows: int, rank: int) -> Tensor:
    factor = normal(rows, rank, seed=2, dtype=torch.float64) * torch.logspace(0, -2, rank, dtype=torch.float64)
    return factor @ factor.mT


@pytest.mark.parametrize("num_features", [1, 4, 9, 12])
def test_error_and_floor(num_features: int) -> None:
    kernel = random_kernel(12, 9)
    features = normal(4, 3, num_features, dtype=torch.float64)
    found = kernel_error(features, kernel)
    flat = features.flatten(0, 1)
    assert found.error == pytest.approx(float((flat @ flat.mT - kernel).norm() / kernel.norm()), rel=1e-12)
    assert found.floor == pytest.approx(rank_floor(kernel, num_features), rel=1e-9, abs=1e-12)
    assert found.floor <= found.error


def test_the_best_features_of_rank_m_reach_the_floor() -> None:
    kernel = random_kernel(12, 9)
    values, vectors = torch.linalg.eigh(kernel)
    best = (vectors * values.clamp_min(0).sqrt())[:, -4:].reshape(4, 3, 4)
    found = kernel_error(best, kernel)
    assert found.error == pytest.approx(found.floor, rel=1e-9)
    assert 0 < found.floor < 1
    assert str(found) == f"kernel error {found.error:.3f} (rank floor {found.floor:.3f})"


def test_blocks_between_groups_are_zeroed() -> None:
    kernel = random_kernel(6, 4)
    found = without_cross_groups(kernel, [1, 3, 2])
    wanted = torch.block_diag(kernel[:1, :1], kernel[1:4, 1:4], kernel[4:, 4:])
    assert torch.equal(found, wanted)


# ---------------------------------------------------------------- through the method


def test_exact_jacobians_have_no_error() -> None:
    model = mlp().double()
    x, y = normal(20, 2, dtype=torch.float64), torch.arange(20) % 3
    la = ScaLLA(model, surrogate=JacobianFeatures(model), num_features=33).fit(loader(x, y), num_steps=0)
    found = la.kernel_error(x[:9])
    assert isinstance(found, KernelError)
    assert found.error < 1e-10
    assert found.floor < 1e-10


def test_with_context_the_target_is_the_biased_kernel() -> None:
    model = mlp().double()
    x, y = normal(20, 2, dtype=torch.float64), torch.arange(20) % 3
    la = ScaLLA(model, surrogate=JacobianFeatures(model), num_features=33).fit(loader(x, y), num_steps=0)
    inputs, context = x[:5], x[5:9] + 1
    kernel = dense_kernel(model, torch.cat([inputs, context]))
    biased = torch.block_diag(kernel[:15, :15], kernel[15:, 15:])
    found = la.kernel_error(inputs, context.float())
    assert found.error == pytest.approx(float((kernel - biased).norm() / biased.norm()), rel=1e-6)
    with pytest.raises(InputError, match="takes tensors"):
        la.kernel_error({"x": inputs}, context)


def test_before_a_fit_there_is_none() -> None:
    with pytest.raises(NotFittedError, match="call fit"):
        ScaLLA(mlp()).kernel_error(normal(4, 2))


# ---------------------------------------------------------------- from probes alone


@pytest.mark.parametrize("bias", [False, True])
def test_the_score_is_an_unbiased_estimate_of_the_squared_error(bias: bool) -> None:
    """Averaged over many sets of probes, ‖GGᵀ − K‖² and ‖K‖² are what the dense kernel gives."""
    model = mlp().double()
    blocks = [normal(5, 2, dtype=torch.float64), normal(4, 2, seed=8, dtype=torch.float64)]
    features = [0.5 * normal(len(x), 3, 4, seed=30 + i, dtype=torch.float64) for i, x in enumerate(blocks)]
    kernel = dense_kernel(model, torch.cat(blocks))
    if bias:
        kernel = torch.block_diag(kernel[:15, :15], kernel[15:, 15:])
    flat = torch.cat(features).flatten(0, 1)
    wanted = float((flat @ flat.mT - kernel).norm() / kernel.norm())

    network = FrozenNetwork(model)
    params = select_parameters(network, "all", blocks[0])
    product = JacobianProduct(network, params, blocks[0])
    directions = [draw_probe(params, kind="rademacher", seed=4, step=s) for s in range(4096)]
    targets = [product(x, directions) for x in blocks]

    def scored(part: slice) -> tuple[float, float]:
        some = [z[..., part] for z in targets]
        estimator = KernelScore(some if bias else [torch.cat(some)])
        error = estimator.relative_error(features if bias else [torch.cat(features)])
        return float(estimator.norm_sq), error

    norms, _ = zip(*(scored(slice(i, i + 64)) for i in range(0, 4096, 64)), strict=True)
    spread = float(torch.tensor(norms).std()) / 8
    assert sum(norms) / 64 == pytest.approx(float(kernel.square().sum()), abs=4 * spread)
    assert spread < 0.1 * float(kernel.square().sum())
    assert scored(slice(None))[1] == pytest.approx(wanted, rel=0.03)
    assert scored(slice(0, 64))[1] == pytest.approx(wanted, rel=0.3)


def test_perfect_features_score_near_zero() -> None:
    model, x = mlp().double(), normal(9, 2, dtype=torch.float64)
    network = FrozenNetwork(model)
    params = select_parameters(network, "all", x)
    directions = [draw_probe(params, kind="rademacher", seed=4, step=s) for s in range(2048)]
    score = KernelScore([JacobianProduct(network, params, x)(x, directions)])
    assert score.relative_error([dense_jacobian(model, x)]) < 0.1
    assert score.relative_error([torch.zeros(9, 3, 2, dtype=torch.float64)]) == pytest.approx(1)
    assert not math.isnan(score.relative_error([2 * dense_jacobian(model, x)]))
