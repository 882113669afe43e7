"""kNN (Sun et al. 2022): distance to the k-th nearest training feature on the unit sphere."""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scalla.baselines.detectors.features import Penultimate
from scalla.types import InputError, Inputs, Loader, NotFittedError


@final
class KNN:
    """‖φ/‖φ‖ − φ_(k)/‖φ_(k)‖‖, φ_(k) the k-th nearest of the training features, all of which are kept."""

    def __init__(self, model: nn.Module, *, num_neighbours: int = 50, max_elements: int = 2**24) -> None:
        if num_neighbours < 1:
            raise InputError(f"got num_neighbours={num_neighbours}; wanted at least 1")
        self._penultimate = Penultimate(model)
        self.num_neighbours = num_neighbours
        self.max_elements = max_elements
        self._bank: Tensor | None = None

    def fit(self, train_loader: Loader, *, context: Loader | None = None, progress_bar: bool = False) -> KNN:
        """Keep the features of all the training data: N·D numbers."""
        bank = nn.functional.normalize(self._penultimate.collect(train_loader)[0], dim=-1)
        if len(bank) < self.num_neighbours:
            raise InputError(
                f"got {len(bank)} training points and num_neighbours={self.num_neighbours}; "
                "set num_neighbours to at most the number of training points"
            )
        self._bank = bank
        return self

    def score(self, x: Inputs) -> Float[Tensor, " B"]:
        if self._bank is None:
            raise NotFittedError("KNN has no training features yet; call fit(train_loader) first")
        features = nn.functional.normalize(self._penultimate(x)[0], dim=-1)
        chunk = max(1, self.max_elements // len(self._bank))
        # On the unit sphere ‖a − b‖² = 2 − 2 a·b: one product a chunk, and no B×N×D differences.
        similar = [
            (rows @ self._bank.mT).topk(self.num_neighbours, dim=-1).values[:, -1] for rows in features.split(chunk)
        ]
        return (2 - 2 * torch.cat(similar)).clamp_min(0).sqrt()
