"""What the published code would print for the same Gaussian predictive: the difference is measured, not guessed.

It samples logits with the transposed Cholesky factor of Σ = LLᵀ, so that they have covariance LᵀL, and takes the
entropy of a softmax of probabilities for its AUC. Nothing else in the benchmark uses either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scalla.baselines.protocol import function_noise
from scalla.metrics import accuracy, auroc, nll, reliability
from scalla.predictive import Prediction, psd_cholesky


def as_published(
    probs: Float[Tensor, "N C"], y: Int[Tensor, " N"], outside: Mapping[str, Float[Tensor, "M C"]]
) -> dict[str, Any]:
    """Accuracy, NLL, ECE and AUC of probabilities sampled that way, at the test images and at others."""
    inside = double_softmax_entropy(probs)
    return {
        "accuracy": accuracy(probs, y),
        "nll": nll(probs, y),
        "ece": reliability(probs, y).ece,
        "auc": {name: auroc(inside, double_softmax_entropy(values)) for name, values in outside.items()},
    }


def has_gaussian(prediction: Prediction) -> bool:
    """Whether there is a factor to transpose: not for samples alone, nor for MAP."""
    return prediction.samples is None and prediction.factor.shape[-1] > 0


def transposed_probs(prediction: Prediction, *, num_samples: int) -> Float[Tensor, "B C"]:
    """Mean softmax of f + Lᵀε."""
    factor = prediction.factor.double()
    turned = psd_cholesky(factor @ factor.mT).mT.to(prediction.mean)
    noise = function_noise(turned.shape[-1], num_samples, seed=0, generator=None, like=turned)
    return Prediction(prediction.mean, turned, link="mc", noise=noise).probs


def double_softmax_entropy(probs: Float[Tensor, "B C"]) -> Float[Tensor, " B"]:
    """Entropy of the softmax of probabilities."""
    return torch.special.entr(probs.softmax(-1)).sum(-1)
