"""Mahalanobis (Lee et al. 2018) and relative Mahalanobis (Ren et al. 2021) on penultimate features."""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scalla.baselines.detectors.features import Penultimate, class_moments, whitening
from scalla.types import Inputs, Loader, NotFittedError


@final
class Mahalanobis:
    """min_c (φ − μ_c)ᵀ S⁺ (φ − μ_c), S the covariance about the class means, shared by all classes.

    `relative` subtracts the distance (φ − μ)ᵀ S_0⁺ (φ − μ) to one Gaussian over all the classes.
    """

    def __init__(self, model: nn.Module, *, relative: bool = False) -> None:
        self._penultimate = Penultimate(model)
        self.relative = relative
        self._fitted = False

    def fit(self, train_loader: Loader, *, context: Loader | None = None, progress_bar: bool = False) -> Mahalanobis:
        """Means and covariances, in two passes."""
        moments = class_moments(self._penultimate, train_loader)
        self._whiten = whitening(moments.within_cov)
        self._centres = moments.means @ self._whiten
        self._whiten_all = whitening(moments.total_cov)
        self._mean = moments.mean
        self._fitted = True
        return self

    def score(self, x: Inputs) -> Float[Tensor, " B"]:
        if not self._fitted:
            raise NotFittedError("Mahalanobis has no class means yet; call fit(train_loader) first")
        features, _ = self._penultimate(x)
        distances = (features @ self._whiten)[:, None] - self._centres
        score = distances.square().sum(-1).amin(-1)
        if self.relative:
            score = score - ((features - self._mean) @ self._whiten_all).square().sum(-1)
        return score


@final
class GaussianMixture:
    """−log Σ_c π_c N(φ; μ_c, S_c): a Gaussian of its own for each class (Mukhoti et al. 2023).

    `ridge` times the mean feature variance is added to each S_c, which few points leave singular.
    """

    def __init__(self, model: nn.Module, *, ridge: float = 1e-3) -> None:
        self._penultimate = Penultimate(model)
        self.ridge = ridge
        self._fitted = False

    def fit(
        self, train_loader: Loader, *, context: Loader | None = None, progress_bar: bool = False
    ) -> GaussianMixture:
        """Weights, means and covariances, in two passes."""
        moments = class_moments(self._penultimate, train_loader)
        covs = moments.scatters / moments.counts[:, None, None]
        size = moments.within_cov.diagonal().mean().clamp_min(torch.finfo(covs.dtype).tiny)
        eye = torch.eye(covs.shape[-1], dtype=covs.dtype, device=covs.device)
        self._components = torch.distributions.MultivariateNormal(
            moments.means, scale_tril=torch.linalg.cholesky(covs + self.ridge * size * eye)
        )
        self._log_weights = (moments.counts / moments.counts.sum()).log()
        self._fitted = True
        return self

    def score(self, x: Inputs) -> Float[Tensor, " B"]:
        if not self._fitted:
            raise NotFittedError("GaussianMixture has no components yet; call fit(train_loader) first")
        features, _ = self._penultimate(x)
        return -torch.logsumexp(self._components.log_prob(features[:, None]) + self._log_weights, -1)
