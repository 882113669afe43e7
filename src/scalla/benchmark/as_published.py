"""What the published code would print for the same Gaussian predictive: the difference is measured, not guessed.

It samples logits with the transposed Cholesky factor of Σ = LLᵀ, so that they have covariance LᵀL, and takes the
entropy of a softmax of probabilities for its AUC. Nothing else in the benchmark uses either.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from scalla.baselines.protocol import function_noise
from scalla.benchmark.images import Images
from scalla.metrics import accuracy, auroc, nll, reliability
from scalla.predictive import mean_softmax, psd_cholesky

CHUNK = 500
#: samples whose logits are in memory at once
BLOCK = 64


@torch.no_grad()
def as_published(method: Any, images: Images, *, num_samples: int) -> dict[str, Any] | None:
    """Accuracy, NLL, ECE and AUC that way; None for a method without a Gaussian over its outputs."""
    first = method.predict(images.test[0][:2], n_samples=2)
    if first.samples is not None or not first.factor.shape[-1]:
        return None
    x, y = images.test
    probs = transposed_probs(method, x, num_samples=num_samples)
    inside = double_softmax_entropy(probs)
    outside = {
        name: double_softmax_entropy(transposed_probs(method, x_out, num_samples=num_samples))
        for name, x_out in images.out.items()
    }
    return {
        "accuracy": accuracy(probs, y),
        "nll": nll(probs, y),
        "ece": reliability(probs, y).ece,
        "auc": {name: auroc(inside, scores) for name, scores in outside.items()},
    }


def transposed_probs(method: Any, x: Tensor, *, num_samples: int) -> Float[Tensor, "B C"]:
    """Mean softmax of f + Lᵀε."""
    found = []
    for part in x.split(CHUNK):
        prediction = method.predict(part, n_samples=1)
        factor = prediction.factor.double()
        turned = psd_cholesky(factor @ factor.mT).mT.to(prediction.mean)
        noise = function_noise(turned.shape[-1], num_samples, seed=0, generator=None, like=turned)
        blocks = (prediction.mean + torch.einsum("bcr,rs->sbc", turned, eps) for eps in noise.split(BLOCK, 1))
        found.append(mean_softmax(blocks)[0])
    return torch.cat(found)


def double_softmax_entropy(probs: Float[Tensor, "B C"]) -> Float[Tensor, " B"]:
    """Entropy of the softmax of probabilities."""
    return torch.special.entr(probs.softmax(-1)).sum(-1)
