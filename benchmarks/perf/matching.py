"""The matching loss alone, forward and backward: the Gram identity ÷ all pairs, in seconds and in numbers held."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from timing import in_turns, median_ratio
from torch import Tensor

from scalla.kernel_loss import gram_sums, matching_loss


def measure(batch: int, num_classes: int, num_features: int, *, num_probes: int = 1, repeats: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(batch, num_classes, num_features, generator=generator, requires_grad=True)
    z = torch.randn(batch, num_classes, num_probes, generator=generator)

    def gram() -> Tensor:
        return matching_loss(gram_sums([(g, z, 0)]))

    def pairwise() -> Tensor:
        a, b = g.flatten(0, 1), z.flatten(0, 1)
        return (a @ a.mT - b @ b.mT / num_probes).square().mean()

    def backward(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            g.grad = None
            loss().backward()

        return run

    assert torch.allclose(gram(), pairwise(), rtol=1e-3)
    found = in_turns({"gram": backward(gram), "pairwise": backward(pairwise)}, repeats=repeats)
    rows = batch * num_classes
    return {
        "batch": batch,
        "classes": num_classes,
        "num_features": num_features,
        "gram_seconds": statistics.median(found["gram"]),
        "pairwise_seconds": statistics.median(found["pairwise"]),
        "ratio": median_ratio(found["gram"], found["pairwise"]),
        # What each keeps for its backward pass beside features and probes.
        "gram_numbers": num_features**2 + num_features * num_probes + num_probes**2,
        "pairwise_numbers": 2 * rows**2,
    }
