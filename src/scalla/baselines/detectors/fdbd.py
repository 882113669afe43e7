"""fDBD (Liu and Qin 2024): distance of the features to the decision boundaries."""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scalla.baselines.detectors.features import Head, Penultimate, first_inputs
from scalla.types import Inputs, Loader, NotFittedError


@final
class FDBD:
    """−mean over c ≠ ĉ of [(f_ĉ − f_c) / ‖w_ĉ − w_c‖] / ‖φ − μ‖, μ the mean of the training features."""

    def __init__(self, model: nn.Module) -> None:
        self._penultimate = Penultimate(model)
        self._head: Head | None = None

    def fit(self, train_loader: Loader, *, context: Loader | None = None, progress_bar: bool = False) -> FDBD:
        """μ from one pass."""
        head = self._penultimate.head(first_inputs(train_loader))
        total, count = torch.zeros_like(head.weight[0]), 0
        for features, _, _ in self._penultimate.labelled(train_loader):
            total, count = total + features.sum(0), count + len(features)
        self._mean = total / count
        self._head = head
        return self

    def score(self, x: Inputs) -> Float[Tensor, " B"]:
        if self._head is None:
            raise NotFittedError("FDBD has no mean feature yet; call fit(train_loader) first")
        features, logits = self._penultimate(x)
        gaps = torch.cdist(self._head.weight, self._head.weight)
        largest, predicted = logits.max(-1)
        others = torch.ones_like(logits, dtype=torch.bool).scatter_(-1, predicted[:, None], False)
        tiny = torch.finfo(logits.dtype).tiny
        distances = (largest[:, None] - logits) / gaps[predicted].clamp_min(tiny)
        mean_distance = torch.where(others, distances, 0.0).sum(-1) / (logits.shape[-1] - 1)
        return -mean_distance / (features - self._mean).norm(dim=-1).clamp_min(tiny)
