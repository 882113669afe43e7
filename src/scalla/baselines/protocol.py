"""What every compared method can do, and the two conventions that make their numbers comparable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from scalla.predictive import Prediction
from scalla.types import InputError, Inputs, Loader


@runtime_checkable
class Method(Protocol):
    """A method of the benchmark: built as `Method(model, likelihood="classification", *, seed=0, ...)`.

    The model it is given is never modified: weights, buffers, modes, gradients and `requires_grad` stay.
    """

    def fit(self, train_loader: Loader, *, context: Loader | None = None, progress_bar: bool = False) -> Method:
        """Fit on batches (x, y) and return self; a method with no use for `context` leaves it alone."""
        ...

    def predict(self, x: Inputs, *, n_samples: int = 100, generator: torch.Generator | None = None) -> Prediction:
        """The prediction at x. The same seed gives every batch the same function samples."""
        ...


@runtime_checkable
class Detector(Protocol):
    """An out-of-distribution score that is no predictive distribution: built as `Detector(model, *, ...)`."""

    def fit(self, train_loader: Loader, *, context: Loader | None = None, progress_bar: bool = False) -> Detector:
        """Fit on batches (x, y) and return self."""
        ...

    def score(self, x: Inputs) -> Float[Tensor, " B"]:
        """One number for each input, in float64; larger = more out of distribution."""
        ...


def split_batch(batch: Any) -> tuple[Any, Tensor]:
    """Inputs and targets of a batch: (x, y, …), or a mapping with its targets under "labels"."""
    if isinstance(batch, Mapping):
        if "labels" not in batch:
            raise InputError(f'got a batch with keys {list(batch)}; its targets must stand under "labels"')
        return {key: value for key, value in batch.items() if key != "labels"}, batch["labels"]
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise InputError(f"got a batch of type {type(batch).__name__}; wanted (x, y) or a mapping")
    return batch[0], batch[1]


def function_noise(
    rank: int, n_samples: int, *, seed: int, generator: torch.Generator | None, like: Tensor
) -> Float[Tensor, "R S"]:
    """Standard normal draws, one column a function sample, in the dtype and on the device of `like`.

    Drawn on the CPU in float64 from `seed` unless a generator is given, so that they depend neither on
    the batch nor on its size, dtype or device.
    """
    if generator is None:
        generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(rank, n_samples, generator=generator, device=generator.device, dtype=torch.float64)
    return noise.to(like)
