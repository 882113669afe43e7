"""Methods whose predictions are given, for tests of what is measured of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scalla.baselines.protocol import function_noise
from scalla.predictive import Prediction

CLASSES = 10


class GaussianMethod:
    """Logits and covariance factor as functions of the inputs' mean brightness: N(mean, A Aᵀ), A of full rank."""

    def __init__(self, rank: int = CLASSES, *, spoil: Callable[[Tensor], Tensor] | None = None) -> None:
        generator = torch.Generator().manual_seed(3)
        self.weight = torch.randn(784, CLASSES, generator=generator, dtype=torch.float64) / 10
        self.shape = torch.randn(CLASSES, rank, generator=generator, dtype=torch.float64) / 2
        self.spoil = spoil
        self.calls: list[int] = []

    def fit(self, train_loader: Any, *, context: Any = None, progress_bar: bool = False) -> GaussianMethod:
        return self

    def predict(self, x: Tensor, *, n_samples: int = 100, generator: Any = None) -> Prediction:
        self.calls.append(len(x))
        flat = x.double().flatten(1)
        mean = flat @ self.weight
        factor = self.shape * (0.5 + flat.mean(1))[:, None, None]
        if self.spoil is not None:
            mean = self.spoil(mean)
        rank = factor.shape[-1]
        noise = function_noise(rank, n_samples, seed=0, generator=generator, like=mean) if rank and n_samples else None
        if not rank:  # MAP: one sample is as good as many
            noise = mean.new_zeros(0, max(n_samples, 1))
        return Prediction(mean, factor, "classification", "mc", noise=noise)


class SamplingMethod(GaussianMethod):
    """A method that can only sample."""

    def predict(self, x: Tensor, *, n_samples: int = 100, generator: Any = None) -> Prediction:
        mean = x.double().flatten(1) @ self.weight
        noise = function_noise(CLASSES, max(n_samples, 2), seed=0, generator=generator, like=mean)
        return Prediction.from_samples(mean[None] + noise.mT[:, None])


class BrightnessDetector:
    """A detector whose score can be worked out by hand."""

    def fit(self, train_loader: Any, *, context: Any = None, progress_bar: bool = False) -> BrightnessDetector:
        return self

    def score(self, x: Tensor) -> Tensor:
        return x.double().flatten(1).mean(1)
