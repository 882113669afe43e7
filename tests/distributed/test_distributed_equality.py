"""Two and three processes against one: the same loss, gradient, H and predictions."""

from __future__ import annotations

from typing import Any

import jobs
import pytest
import torch

from cases import normal
from children import ChildError, assert_same, on_ranks
from oracles import pairwise_matching_loss


def agreeing(count: int, function: Any, **options: Any) -> dict[str, Any]:
    """What the processes returned, which is the same in all of them to the bit."""
    results = on_ranks(count, function, **options)
    errors = [result for result in results if isinstance(result, ChildError)]
    if errors:
        raise next((error for error in errors if error.kind != "ProcessError"), errors[0])
    for result in results:
        assert_same(result, results[0])
    return results[0]


@pytest.mark.parametrize("count", [2, 3])
def test_loss_and_gradient_of_the_global_batch(count: int) -> None:
    found = agreeing(count, jobs.gradient)
    weight = normal(12, 2, seed=1, dtype=torch.float64).requires_grad_()
    bias = normal(12, seed=2, dtype=torch.float64).requires_grad_()
    features = [
        (normal(n, 2, seed=3 + i, dtype=torch.float64) @ weight.T + bias).unflatten(1, (3, 4))
        for i, n in enumerate((5, 2))
    ]
    targets = [normal(n, 3, 2, seed=6 + i, dtype=torch.float64) for i, n in enumerate((5, 2))]
    loss = pairwise_matching_loss(features, targets, [0, 1])
    loss.backward()
    assert_same(found, {"loss": loss, "weight": weight.grad, "bias": bias.grad}, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("count", "kind", "likelihood", "bias"),
    [
        (2, "alike", "classification", True),
        (3, "alike", "regression", False),
        (2, "sampler", "classification", False),
        (3, "sampler", "classification", True),
        (3, "shards", "classification", True),
    ],
)
def test_a_fit_is_that_of_one_process(count: int, kind: str, likelihood: str, bias: bool) -> None:
    options = {"kind": kind, "likelihood": likelihood, "bias": bias}
    alone = jobs.fit(**options)
    assert_same(agreeing(count, jobs.fit, **options), alone, rtol=1e-6, atol=1e-9)
    assert len(alone["losses"]) > 5


def test_inputs_that_fill_up_the_shares_are_counted_once() -> None:
    """26 inputs over 3 processes: DistributedSampler repeats one, and H must not see it twice."""
    options = {"num_steps": 0, "kind": "sampler", "num_data": 26}
    assert_same(agreeing(3, jobs.fit, **options), jobs.fit(**options), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["sampler", "shards"])
def test_data_added_and_taken_out(kind: str) -> None:
    assert_same(agreeing(3, jobs.updated, kind=kind), jobs.updated(kind), rtol=1e-9, atol=1e-12)


def test_probes_are_the_same_in_all_processes() -> None:
    assert_same(agreeing(3, jobs.probes), jobs.probes())
