"""ELLA (Deng et al. 2022): LLA on Nyström features of the neural tangent kernel, by laplace-torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scalla.baselines.laplace_torch import (
    MAX_JACOBIAN_ELEMENTS,
    as_dataloader,
    count_outputs,
    import_laplace,
    own_copy,
    per_example_backend,
    quiet,
    tensor_inputs,
)
from scalla.baselines.layer_factors import layer_factors, products_with
from scalla.baselines.minibatch import check_settings
from scalla.baselines.protocol import function_noise
from scalla.functional import FrozenNetwork
from scalla.predictive import Prediction
from scalla.types import InputError, Inputs, Likelihood, Loader, NotFittedError


@final
class ELLA:
    """f(x) ~ N(f_θ*(x), ψ(x) (Σ_n ψ(x_n)ᵀ Λ_n ψ(x_n) + δI)⁻¹ ψ(x)ᵀ), with K features ψ(x) = J(x) V.

    M training points, one random class each, give M rows J of the Jacobian; with the K largest eigenpairs
    of their Gram matrix, J Jᵀ = U Λ Uᵀ, the directions are V = Jᵀ U_K Λ_K^{-1/2} ∈ R^{P×K}.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood = "classification",
        *,
        num_points: int = 1024,
        num_features: int = 50,
        balanced: bool = False,
        prior_precision: float = 1.0,
        sigma_noise: float = 1.0,
        temperature: float = 1.0,
        max_jacobian_elements: int = MAX_JACOBIAN_ELEMENTS,
        seed: int = 0,
    ) -> None:
        check_settings(likelihood, prior_precision=prior_precision, sigma_noise=sigma_noise, temperature=temperature)
        if not 0 < num_features <= num_points:
            raise InputError(
                f"got num_features={num_features} of num_points={num_points}; wanted 1 ≤ num_features ≤ num_points"
            )
        self.model = model
        self.likelihood: Likelihood = likelihood
        self.num_points = num_points
        self.num_features = num_features
        self.balanced = balanced
        self.prior_precision = prior_precision
        self.sigma_noise = sigma_noise
        self.temperature = temperature
        self.max_jacobian_elements = max_jacobian_elements
        self.seed = seed
        self._laplace: Any = None

    def fit(self, train_loader: Loader, *, context: Loader | None = None, progress_bar: bool = False) -> ELLA:
        """The directions from M points, then one pass over the training data with K JVPs an input."""
        laplace = import_laplace()
        network = own_copy(self.model)
        with quiet(self.seed):
            loader = as_dataloader(train_loader)
            num_outputs = count_outputs(network, loader, self.likelihood)
        if len(loader.dataset) < self.num_points:  # type: ignore[arg-type]
            raise InputError(
                f"got {len(loader.dataset)} training points and num_points={self.num_points}; "  # type: ignore[arg-type]
                "set num_points to at most the number of training points"
            )
        per_input = num_outputs * sum(p.numel() for p in network.parameters())
        loader = as_dataloader(loader, batch_size=max(1, self.max_jacobian_elements // per_input))
        posterior = laplace.ELLA(
            network,
            self.likelihood,
            subsample_size=self.num_points,
            n_eigenvalues=self.num_features,
            sigma_noise=self.sigma_noise,
            prior_precision=self.prior_precision,
            temperature=self.temperature,
            backend=per_example_backend(),
            seed=self.seed,
        )
        posterior._features = features_by_factors(posterior)
        with quiet(self.seed):
            posterior.fit(loader, balanced=self.balanced, progress_bar=progress_bar)
        self._laplace = posterior
        return self

    def predict(self, x: Inputs, *, n_samples: int = 100, generator: torch.Generator | None = None) -> Prediction:
        """The covariance factor is ψ(x) C⁻ᵀ, with C Cᵀ the posterior precision of the K weights."""
        if self._laplace is None:
            raise NotFittedError("ELLA has no posterior yet; call fit(train_loader) first")
        posterior = self._laplace
        inputs = tensor_inputs(x, posterior.model)
        means, factors = [], []
        with torch.no_grad(), quiet():
            for rows in inputs.split(256):
                features, mean = posterior._features(rows)
                # A = ψ C⁻ᵀ from the right: A Cᵀ = ψ.
                factor = torch.linalg.solve_triangular(posterior.chol_precision.mT, features, upper=True, left=False)
                means.append(mean)
                factors.append(factor)
        mean, factor = torch.cat(means), torch.cat(factors)
        return Prediction(
            mean,
            factor,
            self.likelihood,
            link="mc",
            noise=function_noise(factor.shape[-1], n_samples, seed=self.seed, generator=generator, like=mean),
            noise_var=mean.new_tensor([self.sigma_noise**2]) if self.likelihood == "regression" else None,
        )


def features_by_factors(posterior: Any) -> Callable[[Tensor], tuple[Float[Tensor, "B C K"], Float[Tensor, "B C"]]]:
    """ψ(x) and f(x) from the factors of the layers, where the network has them: C passes in place of K."""
    theirs = posterior._features
    network = FrozenNetwork(posterior.model)
    params = {name: p.detach() for name, p in posterior.model.named_parameters()}

    def features(x: Tensor) -> tuple[Float[Tensor, "B C K"], Float[Tensor, "B C"]]:
        factors = layer_factors(network, params, x)
        if factors is None:
            return theirs(x)
        blocks = posterior.dual_directions.split([p.numel() for p in params.values()])
        return products_with(factors, dict(zip(params, blocks, strict=True))), network(x)

    return features
