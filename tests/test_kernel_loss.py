"""The Gram identity against the pairwise definition, and its gradient against that of the exact kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import mlp, normal
from oracles import dense_jacobian, pairwise_matching_loss
from scalla.functional import FrozenNetwork, select_parameters
from scalla.jvp import JacobianProduct
from scalla.kernel_error import blocks_of
from scalla.kernel_loss import GramSums, gram_sums, matching_loss, reduce_sums
from scalla.probes import Probe, draw_probe

#: sizes of the blocks, their groups, C, S
LAYOUTS = {
    "one group": ([4], [0], 3, 1),
    "one output": ([5], [0], 1, 1),
    "several probes": ([4], [0], 2, 6),
    "two blocks, no bias": ([3, 4], [0, 0], 2, 2),
    "two groups of unequal size": ([2, 5], [0, 1], 3, 1),
    "three groups, several probes": ([3, 1, 4], [0, 1, 2], 2, 3),
    "a group in two blocks": ([3, 2, 2], [0, 1, 0], 2, 2),
    "one output in two groups": ([3, 4], [0, 1], 1, 2),
    "one input": ([1], [0], 1, 1),
}


def blocks_of_layout(name: str, m: int = 5) -> tuple[list[Tensor], list[Tensor], list[int]]:
    sizes, groups, num_outputs, num_probes = LAYOUTS[name]
    features = [normal(b, num_outputs, m, seed=i, dtype=torch.float64) for i, b in enumerate(sizes)]
    targets = [normal(b, num_outputs, num_probes, seed=50 + i, dtype=torch.float64) for i, b in enumerate(sizes)]
    return [g.requires_grad_() for g in features], targets, groups


def gram_loss(features: list[Tensor], targets: list[Tensor], groups: list[int]) -> Tensor:
    return matching_loss(gram_sums(list(zip(features, targets, groups, strict=True))))


@pytest.mark.parametrize("name", LAYOUTS)
def test_value_and_gradient_equal_the_pairwise_definition(name: str) -> None:
    features, targets, groups = blocks_of_layout(name)
    expected = pairwise_matching_loss(features, targets, groups)
    found = gram_loss(features, targets, groups)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for left, right in zip(torch.autograd.grad(found, features), torch.autograd.grad(expected, features), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-13)


def test_the_loss_is_zero_where_the_features_are_the_targets() -> None:
    z = normal(4, 3, 2, dtype=torch.float64)
    assert float(gram_loss([z / 2**0.5], [z], [0])) == pytest.approx(0, abs=1e-14)


def test_without_bias_blocks_are_one_batch() -> None:
    features, targets, _ = blocks_of_layout("two blocks, no bias")
    together = gram_loss([torch.cat(features)], [torch.cat(targets)], [0])
    torch.testing.assert_close(matching_loss(gram_sums(blocks_of(features, targets, bias=False))), together)


def test_with_bias_each_source_is_a_group_and_the_cross_kernel_is_pulled_to_zero() -> None:
    features, targets, groups = blocks_of_layout("two groups of unequal size")
    found = matching_loss(gram_sums(blocks_of(features, targets, bias=True)))
    torch.testing.assert_close(found, pairwise_matching_loss(features, targets, groups), rtol=1e-12, atol=0)
    unbiased = matching_loss(gram_sums(blocks_of(features, targets, bias=False)))
    flat = [t.flatten(0, 1) for t in (*features, *targets)]
    cross_kernel, cross_target = flat[0] @ flat[1].mT, flat[2] @ flat[3].mT
    wanted = 2 * (cross_kernel.square() - (cross_kernel - cross_target).square()).sum() / (7 * 3) ** 2
    torch.testing.assert_close(found - unbiased, wanted, rtol=1e-10, atol=1e-14)


def test_the_order_of_inputs_does_not_matter() -> None:
    features, targets, groups = blocks_of_layout("three groups, several probes")
    order = [2, 0, 1]
    shuffled = [[seq[i] for i in order] for seq in (features, targets, groups)]
    torch.testing.assert_close(gram_loss(*shuffled), gram_loss(features, targets, groups), rtol=1e-12, atol=0)


def test_large_batches_never_form_the_pairwise_matrix() -> None:
    """B·C = 200,000 rows: the pairwise matrix would take 320 GB."""
    g = torch.randn(2000, 100, 4, requires_grad=True)
    z = torch.randn(2000, 100, 1)
    sums = gram_sums([(g, z, 0)])
    assert max(t.numel() for t in (sums.features, *sums.cross.values(), *sums.targets.values())) == 16
    loss = matching_loss(sums)
    loss.backward()
    rows, targets = g.detach().double().flatten(0, 1), z.double().flatten(0, 1)
    # d/dG ‖GGᵀ − ZZᵀ‖² = 4 (G GᵀG − Z ZᵀG)
    wanted = 4 * (rows @ (rows.mT @ rows) - targets @ (targets.mT @ rows)) / len(rows) ** 2
    assert g.grad is not None
    torch.testing.assert_close(g.grad.double().flatten(0, 1), wanted, rtol=1e-3, atol=1e-6 * float(wanted.abs().max()))


# ---------------------------------------------------------------- several processes


def over_processes(parts: list[GramSums]) -> list[Callable[[Tensor], Tensor]]:
    """A fake all-reduce for each process: the n-th call of each gets the sum of all processes' n-th tensors."""

    def sent(sums: GramSums) -> list[Tensor]:
        recorded: list[Tensor] = []

        def record(t: Tensor) -> Tensor:
            recorded.append(t)
            return t

        reduce_sums(sums, record)
        return recorded

    totals = [torch.stack(tensors).sum(0) for tensors in zip(*map(sent, parts), strict=True)]

    def reducer() -> Callable[[Tensor], Tensor]:
        left = list(totals)
        return lambda t: left.pop(0).to(t)

    return [reducer() for _ in parts]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_reduced_sums_give_loss_and_gradient_of_the_global_batch(order: list[int]) -> None:
    """Two processes, each with a part of every group; their gradients add up to that of the global batch."""
    first, targets_of_first, groups = blocks_of_layout("three groups, several probes")
    second = [normal(b, 2, 5, seed=20 + i, dtype=torch.float64).requires_grad_() for i, b in enumerate((1, 4, 2))]
    targets_of_second = [normal(b, 2, 3, seed=70 + i, dtype=torch.float64) for i, b in enumerate((1, 4, 2))]
    expected = pairwise_matching_loss(first + second, targets_of_first + targets_of_second, groups * 2)
    wanted = torch.autograd.grad(expected, first + second)

    parts = [
        gram_sums(list(zip(first, targets_of_first, groups, strict=True))),
        # a process may meet the groups in another order: what is added up must still belong together
        gram_sums([(second[i], targets_of_second[i], groups[i]) for i in order]),
    ]
    for sums, reducer, leaves, gradients in zip(
        parts, over_processes(parts), (first, second), (wanted[:3], wanted[3:]), strict=True
    ):
        reduced = reduce_sums(sums, reducer)
        assert reduced.num_rows == 2 * (8 + 7)
        loss = matching_loss(reduced)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        for found, gradient in zip(torch.autograd.grad(loss, leaves), gradients, strict=True):
            torch.testing.assert_close(found, gradient, rtol=1e-11, atol=1e-14)


def test_reducing_over_one_process_changes_nothing() -> None:
    features, targets, groups = blocks_of_layout("two groups of unequal size")
    sums = gram_sums(list(zip(features, targets, groups, strict=True)))
    alone = matching_loss(reduce_sums(sums, lambda t: t))
    torch.testing.assert_close(alone, matching_loss(sums), rtol=1e-14, atol=0)


# ---------------------------------------------------------------- against the exact kernel


class TinyFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3 * 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)).unflatten(-1, (3, 4))


def gradient(loss: Tensor, module: nn.Module) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])


@pytest.mark.parametrize(("kind", "bias"), [("rademacher", False), ("rademacher", True), ("gaussian", False)])
def test_gradient_converges_to_that_of_the_exact_kernel_at_the_monte_carlo_rate(kind: Probe, bias: bool) -> None:
    model = mlp(width=3).double()
    blocks = [normal(4, 2, dtype=torch.float64), normal(3, 2, seed=6, dtype=torch.float64)]
    surrogate = TinyFeatures()
    features = [surrogate(x) for x in blocks]

    jacobians = [dense_jacobian(model, x).flatten(0, 1) for x in blocks]
    kernel = torch.cat(jacobians) @ torch.cat(jacobians).mT
    if bias:
        kernel[:12, 12:] = kernel[12:, :12] = 0
    flat = torch.cat(features).flatten(0, 1)
    exact = gradient((flat @ flat.mT - kernel).square().mean(), surrogate)

    network = FrozenNetwork(model)
    params = select_parameters(network, "all", blocks[0])
    product = JacobianProduct(network, params, blocks[0])
    num_draws = 4096
    directions = [draw_probe(params, kind=kind, seed=0, step=s) for s in range(num_draws)]
    targets = [product(x, directions) for x in blocks]

    def error(num_probes: int, first: int) -> float:
        some = [z[..., first : first + num_probes] for z in targets]
        loss = matching_loss(gram_sums(blocks_of([surrogate(x) for x in blocks], some, bias=bias)))
        return float((gradient(loss, surrogate) - exact).norm() / exact.norm())

    counts = [1, 4, 16, 64, 256]

    def standard_error(num_probes: int) -> float:
        """Root mean square over independent draws."""
        firsts = range(0, num_draws, num_probes)[:100]
        return math.sqrt(sum(error(num_probes, first) ** 2 for first in firsts) / len(firsts))

    errors = [standard_error(n) for n in counts]
    logs = torch.tensor([[math.log(n), 1.0] for n in counts], dtype=torch.float64)
    slope = float(torch.linalg.lstsq(logs, torch.tensor(errors, dtype=torch.float64).log()[:, None]).solution[0])
    assert -0.6 < slope < -0.4, errors
    assert error(num_draws, 0) < 0.1  # and it is this limit that it converges to


def test_the_mean_over_probes_is_of_outer_products_not_of_products() -> None:
    """K̂ of S probes has rank S: averaging J v first would leave rank one."""
    z: Any = normal(4, 3, 5, dtype=torch.float64)
    sums = gram_sums([(torch.zeros(4, 3, 2, dtype=torch.float64), z, 0)])
    flat = z.flatten(0, 1)
    torch.testing.assert_close(matching_loss(sums), (flat @ flat.mT / 5).square().mean(), rtol=1e-12, atol=0)
    assert torch.linalg.matrix_rank(sums.targets[0]) == 5
