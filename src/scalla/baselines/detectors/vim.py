"""ViM (Wang et al. 2022): a virtual logit from the part of the features that training data do not span."""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scalla.baselines.detectors.features import Head, Penultimate, first_inputs
from scalla.types import InputError, Inputs, Loader, NotFittedError


@final
class ViM:
    """α ‖R (φ − o)‖ − log Σ_c exp f_c(x), with o = −W⁺ b the origin at which all logits vanish.

    R projects off the `num_principal` leading directions of E[(φ − o)(φ − o)ᵀ]; α makes the virtual logit
    as large as the largest logit, on average over the training data.
    """

    def __init__(self, model: nn.Module, *, num_principal: int | None = None) -> None:
        """`num_principal`: 1000 of 2048 features and more, 512 of 768 and more, half of fewer."""
        self._penultimate = Penultimate(model)
        self.num_principal = num_principal
        self._head: Head | None = None

    def fit(self, train_loader: Loader, *, context: Loader | None = None, progress_bar: bool = False) -> ViM:
        """Directions and α, in two passes."""
        head = self._penultimate.head(first_inputs(train_loader))
        dims = head.weight.shape[1]
        num_principal = self.num_principal
        if num_principal is None:
            num_principal = 1000 if dims >= 2048 else 512 if dims >= 768 else dims // 2
        if not 0 <= num_principal < dims:
            raise InputError(f"got num_principal={num_principal} of {dims} features; wanted 0 ≤ it < {dims}")
        self._origin = -torch.linalg.pinv(head.weight) @ head.bias
        second = torch.zeros(dims, dims, dtype=torch.float64, device=head.weight.device)
        for features, _, _ in self._penultimate.labelled(train_loader):
            second += (features - self._origin).mT @ (features - self._origin)
        self._residual = torch.linalg.eigh(second).eigenvectors[:, : dims - num_principal]
        largest = norms = torch.zeros((), dtype=torch.float64, device=second.device)
        for features, logits, _ in self._penultimate.labelled(train_loader):
            largest = largest + logits.amax(-1).sum()
            norms = norms + self._norm(features).sum()
        self._alpha = largest / norms.clamp_min(torch.finfo(norms.dtype).tiny)
        self._head = head
        return self

    def score(self, x: Inputs) -> Float[Tensor, " B"]:
        if self._head is None:
            raise NotFittedError("ViM has no directions yet; call fit(train_loader) first")
        features, logits = self._penultimate(x)
        return self._alpha * self._norm(features) - torch.logsumexp(logits, -1)

    def _norm(self, features: Float[Tensor, "B D"]) -> Float[Tensor, " B"]:
        return ((features - self._origin) @ self._residual).norm(dim=-1)
