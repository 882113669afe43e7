"""MAP: the trained network itself, p(y | x) = softmax f(x). No posterior, hence no Gaussian score."""

from __future__ import annotations

from typing import final

import torch
from torch import nn

from scalla.baselines.minibatch import check_settings
from scalla.functional import FrozenNetwork
from scalla.predictive import Prediction
from scalla.types import Inputs, Likelihood, Loader


@final
class MAP:
    """The point estimate: Σ(x) = 0, so `probs` is the plain softmax of the logits.

    Its factor has no columns (R = 0): `var` is zero and `gaussian_entropy` says nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood = "classification",
        *,
        sigma_noise: float = 1.0,
        seed: int = 0,
    ) -> None:
        check_settings(likelihood, sigma_noise=sigma_noise)
        self.network = FrozenNetwork(model)
        self.likelihood: Likelihood = likelihood
        self.sigma_noise = sigma_noise
        self.seed = seed

    def fit(self, train_loader: Loader, *, context: Loader | None = None, progress_bar: bool = False) -> MAP:
        """Nothing to fit: the network is trained."""
        return self

    def predict(self, x: Inputs, *, n_samples: int = 100, generator: torch.Generator | None = None) -> Prediction:
        """f(x) with no variance; every function sample is f itself."""
        self.network.sync()
        mean = self.network(x)
        return Prediction(
            mean,
            mean.new_zeros(*mean.shape, 0),
            self.likelihood,
            link="probit",
            noise=mean.new_zeros(0, 1),
            noise_var=mean.new_tensor([self.sigma_noise**2]) if self.likelihood == "regression" else None,
        )
