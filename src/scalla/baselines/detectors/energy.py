"""Energy (Liu et al. 2020), and energy after ReAct (Sun et al. 2021)."""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scalla.baselines.detectors.features import Head, Penultimate, first_inputs
from scalla.functional import FrozenNetwork
from scalla.types import Inputs, Loader, NotFittedError


@final
class Energy:
    """−T log Σ_c exp(f_c(x) / T)."""

    def __init__(self, model: nn.Module, *, temperature: float = 1.0) -> None:
        self._network = FrozenNetwork(model)
        self.temperature = temperature

    def fit(self, train_loader: Loader, *, context: Loader | None = None, progress_bar: bool = False) -> Energy:
        """Nothing to fit."""
        return self

    def score(self, x: Inputs) -> Float[Tensor, " B"]:
        return -self.temperature * torch.logsumexp(self._network(x).double() / self.temperature, -1)


@final
class ReAct:
    """Energy of the logits W min(φ, c) + b, with c the `percentile` of all training features."""

    def __init__(self, model: nn.Module, *, percentile: float = 90.0) -> None:
        self._penultimate = Penultimate(model)
        self.percentile = percentile
        self._head: Head | None = None

    def fit(self, train_loader: Loader, *, context: Loader | None = None, progress_bar: bool = False) -> ReAct:
        """c from one pass."""
        head = self._penultimate.head(first_inputs(train_loader))
        values = self._penultimate.collect(train_loader)[0].flatten()
        rank = min(max(round(self.percentile / 100 * len(values)), 1), len(values))
        self._limit = values.kthvalue(rank).values
        self._head = head
        return self

    def score(self, x: Inputs) -> Float[Tensor, " B"]:
        if self._head is None:
            raise NotFittedError("ReAct has no clipping value yet; call fit(train_loader) first")
        features, _ = self._penultimate(x)
        logits = torch.minimum(features, self._limit) @ self._head.weight.mT + self._head.bias
        return -torch.logsumexp(logits, -1)
