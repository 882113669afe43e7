"""What the baselines that train by stochastic gradients share: batches without end, and −log p(y | f)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from scalla.baselines.protocol import split_batch
from scalla.functional import batch_size
from scalla.types import InputError, Inputs, Likelihood, Loader


def check_likelihood(likelihood: str) -> None:
    if likelihood not in ("classification", "regression"):
        raise InputError(f"got likelihood={likelihood!r}; wanted 'classification' or 'regression'")


def one_pass(loader: Loader) -> Iterator[tuple[Inputs, Tensor]]:
    """Every batch of the loader as a pair (x, y); a loader without a batch is an error."""
    empty = True
    for batch in loader:
        empty = False
        yield split_batch(batch)
    if empty:
        raise InputError(
            "the loader gave no batch; wanted one that yields (x, y) each time it is iterated over "
            "(a DataLoader or a list; a generator is used up after one pass)"
        )


def endless(loader: Loader) -> Iterator[tuple[Inputs, Tensor]]:
    """The loader's own batches, pass after pass."""
    while True:
        yield from one_pass(loader)


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
