"""What the baselines share: checked settings, batches whose order the seed decides, and −log p(y | f)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from scalla.baselines.protocol import split_batch
from scalla.batches import EndlessBatches
from scalla.functional import batch_size
from scalla.types import InputError, Inputs, Likelihood, Loader


def check_settings(likelihood: str, **positive: float) -> None:
    if likelihood not in ("classification", "regression"):
        raise InputError(f"got likelihood={likelihood!r}; choose 'classification' or 'regression'")
    for name, value in positive.items():
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise InputError(f"got {name}={value!r}; wanted a positive number")


def one_pass(loader: Loader, *, seed: int = 0) -> Iterator[tuple[Inputs, Tensor]]:
    """Every batch of the loader once, as a pair (x, y); the order of one that shuffles is a function of the seed."""
    return map(split_batch, EndlessBatches(loader, seed=seed).one_epoch())


def endless(loader: Loader, *, seed: int) -> Iterator[tuple[Inputs, Tensor]]:
    """The loader's own batches, pass after pass."""
    batches = EndlessBatches(loader, seed=seed)
    while True:
        yield split_batch(batches.next())


def count_inputs(loader: Loader) -> int:
    """N, by one pass: a loader of an IterableDataset has no length."""
    return sum(batch_size(x) for x, _ in one_pass(loader))


def pointwise_nll(
    outputs: Float[Tensor, "B C"], y: Tensor, likelihood: Likelihood, noise_var: Tensor | float = 1.0
) -> Float[Tensor, " B"]:
    """−log p(y | f) of each input: softmax (a sigmoid where C = 1), or Gaussian, summed over the outputs."""
    y = y.to(outputs.device)
    if likelihood == "regression":
        if y.numel() != outputs.numel():
            raise InputError(f"got targets of shape {tuple(y.shape)} for outputs {tuple(outputs.shape)}")
        noise_var = torch.as_tensor(noise_var, dtype=outputs.dtype, device=outputs.device)
        squared = (y.to(outputs).reshape(outputs.shape) - outputs).square()
        return 0.5 * (squared / noise_var + (2 * torch.pi * noise_var).log()).sum(-1)
    if outputs.shape[-1] == 1:
        return F.binary_cross_entropy_with_logits(outputs[:, 0], y.reshape(-1).to(outputs), reduction="none")
    return F.cross_entropy(outputs, y.reshape(-1).long(), reduction="none")
