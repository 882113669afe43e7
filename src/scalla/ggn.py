"""H = Σ_n g(x_n)ᵀ Λ_n g(x_n) over the training data, streamed: one pass of network and surrogate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from scalla.batches import inputs_of, labels_of
from scalla.functional import batch_size, check_outputs, tensors_of
from scalla.likelihoods import check_labels, hessian_factor, loss_sums
from scalla.types import InputError, Inputs, Likelihood

#: x → (outputs (B, C), features (B, C, m)), in one go
OutputsAndFeatures = Callable[[Inputs], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class GGNSums:
    """Sums over the training data, never means. R is 1 for classification, C for regression (σ left out)."""

    ggn: Float[Tensor, "R m m"]
    loss: Float[Tensor, " R"]  # Σ −log p(y|f), or Σ (y − f)² of each output
    num_data: int
    num_batches: int = 0


def empty_sums(likelihood: Likelihood, num_outputs: int, num_features: int, device: torch.device) -> GGNSums:
    levels = num_outputs if likelihood == "regression" else 1
    zeros = torch.zeros(levels, num_features, num_features, dtype=torch.float64, device=device)
    return GGNSums(zeros, zeros.new_zeros(levels), 0)


@torch.no_grad()
def accumulate_ggn(
    sums: GGNSums,
    batches: Iterable[Any],
    outputs_and_features: OutputsAndFeatures,
    likelihood: Likelihood,
    *,
    dict_key_y: str = "labels",
    after_batch: Callable[[GGNSums], None] | None = None,
) -> GGNSums:
    """`sums` plus those of `batches`; `after_batch` sees every intermediate state (progress, checkpoints)."""
    for batch in batches:
        x = inputs_of(batch)
        check_inputs(x, f"batch {sums.num_batches}")
        outputs, features = outputs_and_features(x)
        check_outputs(outputs, batch_size(x))
        check_finite(outputs, "outputs of the network")
        check_finite(features, "features")
        y = check_labels(likelihood, outputs, labels_of(batch, dict_key_y))
        a = hessian_factor(likelihood, outputs, features)
        sums = replace(
            sums,
            ggn=sums.ggn + a.mT @ a,
            loss=sums.loss + loss_sums(likelihood, outputs, y),
            num_data=sums.num_data + len(outputs),
            num_batches=sums.num_batches + 1,
        )
        if after_batch is not None:
            after_batch(sums)
    return sums


def check_inputs(x: Inputs, where: str) -> None:
    """Every floating-point tensor in x is finite."""
    for part in tensors_of(x):
        if part.is_floating_point() and not bool(torch.isfinite(part).all()):
            rows = (~torch.isfinite(part)).reshape(len(part) if part.ndim else 1, -1).any(1)
            raise InputError(
                f"got NaN or infinite values in the inputs of {where} ({int(rows.sum())} of {len(rows)} inputs); "
                "remove or impute them"
            )


def check_finite(t: Tensor, what: str) -> None:
    if not bool(torch.isfinite(t).all()):
        raise InputError(
            f"the {what} are NaN or infinite for finite inputs; check the network's weights, or run it in a wider dtype"
        )
