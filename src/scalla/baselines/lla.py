"""LLA (Immer et al. 2021): the linearized Laplace approximation, by laplace-torch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal, TypeAlias, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scalla.baselines.kron_covariance import kron_covariance
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
from scalla.baselines.layer_factors import layer_factors
from scalla.baselines.minibatch import check_settings
from scalla.baselines.protocol import function_noise
from scalla.functional import FrozenNetwork
from scalla.predictive import Prediction
from scalla.types import InputError, Inputs, Likelihood, Loader, NotFittedError

Subset: TypeAlias = Literal["last_layer", "all"]
Structure: TypeAlias = Literal["kron", "full", "diag"]


@final
class LLA:
    """f(x) ~ N(f_θ*(x), J(x) (H/T + δI)⁻¹ J(x)ᵀ), H ≈ Σ_n J(x_n)ᵀ Λ_n J(x_n) the GGN over the training data.

    `subset`: J over the last layer's weights, or over all. `structure`: H in full, its Kronecker factors a
    layer, or its diagonal. `prior_precision`: δ, or "marglik" for the scalar that maximises the evidence
    log p(D|θ*) − ½ [log det(I + H/δ) + δ ‖θ*‖²].
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood = "classification",
        *,
        subset: Subset = "last_layer",
        structure: Structure = "kron",
        prior_precision: float | Literal["marglik"] = 1.0,
        sigma_noise: float = 1.0,
        temperature: float = 1.0,
        max_jacobian_elements: int = MAX_JACOBIAN_ELEMENTS,
        seed: int = 0,
    ) -> None:
        prior = {} if prior_precision == "marglik" else {"prior_precision": prior_precision}
        check_settings(likelihood, sigma_noise=sigma_noise, temperature=temperature, **prior)
        if subset not in ("last_layer", "all"):
            raise InputError(f"got subset={subset!r}; choose 'last_layer' or 'all'")
        if structure not in ("kron", "full", "diag"):
            raise InputError(f"got structure={structure!r}; choose 'kron', 'full' or 'diag'")
        self.model = model
        self.likelihood: Likelihood = likelihood
        self.subset: Subset = subset
        self.structure: Structure = structure
        self.prior_precision: float | Literal["marglik"] = prior_precision
        self.sigma_noise = sigma_noise
        self.temperature = temperature
        self.max_jacobian_elements = max_jacobian_elements
        self.seed = seed
        self._laplace: Any = None

    def fit(self, train_loader: Loader, *, context: Loader | None = None, progress_bar: bool = False) -> LLA:
        """One pass over the training data for H; context points have no likelihood and stay out."""
        laplace = import_laplace()
        network = own_copy(self.model)
        with quiet(self.seed):
            loader = as_dataloader(train_loader)
            num_outputs = count_outputs(network, loader, self.likelihood)
        # In Kronecker factors no Jacobian is formed; elsewhere a batch's Jacobians must fit into memory.
        if self.subset == "all" and self.structure != "kron":
            per_input = num_outputs * sum(p.numel() for p in network.parameters())
            loader = as_dataloader(loader, batch_size=max(1, self.max_jacobian_elements // per_input))
        posterior = laplace.Laplace(
            network,
            self.likelihood,
            subset_of_weights=self.subset,
            hessian_structure=self.structure,
            prior_precision=1.0 if self.prior_precision == "marglik" else self.prior_precision,
            sigma_noise=self.sigma_noise,
            temperature=self.temperature,
            backend=per_example_backend(),
        )
        with quiet(self.seed):
            posterior.fit(loader, progress_bar=progress_bar)
        self._laplace = posterior
        if self.prior_precision == "marglik":
            self.optimize_prior_precision()
        return self

    def optimize_prior_precision(self, *, num_steps: int = 100, lr: float = 0.1, start: float = 1.0) -> float:
        """The scalar δ of largest evidence, by Adam in log δ; the posterior is set to it."""
        posterior = self._fitted()
        if self.structure == "full":
            posterior.prior_precision = best_prior_precision(posterior, num_steps=num_steps, lr=lr, start=start)
            return self.fitted_prior_precision
        with quiet():
            posterior.optimize_prior_precision(
                pred_type="glm",
                method="marglik",
                n_steps=num_steps,
                lr=lr,
                init_prior_prec=start,
                prior_structure="scalar",
            )
        return self.fitted_prior_precision

    @property
    def fitted_prior_precision(self) -> float:
        """The prior precision in force."""
        return float(self._fitted().prior_precision)

    def log_marginal_likelihood(self) -> float:
        """The evidence at the prior precision in force."""
        return float(self._fitted().log_marginal_likelihood())

    def predict(self, x: Inputs, *, n_samples: int = 100, generator: torch.Generator | None = None) -> Prediction:
        """The GLM predictive: moments of f under the linearization, in batches bounded in memory."""
        posterior = self._fitted()
        inputs = tensor_inputs(x, posterior.model)
        chunk = max(1, self.max_jacobian_elements // (posterior.n_outputs * posterior.n_params))
        with torch.no_grad(), quiet():
            moments = [self._moments(rows) for rows in inputs.split(chunk)]
        mean, cov = (torch.cat(parts) for parts in zip(*moments, strict=True))
        noise = function_noise(mean.shape[-1], n_samples, seed=self.seed, generator=generator, like=mean)
        prediction = Prediction.from_gaussian(mean, cov, noise=noise, likelihood=self.likelihood)
        noise_var = mean.new_tensor([self.sigma_noise**2]) if self.likelihood == "regression" else None
        return replace(prediction, noise_var=noise_var)

    def _moments(self, x: Tensor) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B C C"]]:
        """laplace-torch's own, or the same in less arithmetic for Kronecker factors over all of a plain network."""
        posterior = self._fitted()
        if self.subset == "all" and self.structure == "kron":
            network = FrozenNetwork(posterior.model)
            params = {k: p.detach() for k, p in posterior.model.named_parameters()}
            factors = layer_factors(network, params, x)
            cov = None if factors is None else kron_covariance(posterior.posterior_precision, params, factors)
            if cov is not None:
                return network(x), cov
        return posterior._glm_predictive_distribution(x)

    def _fitted(self) -> Any:
        if self._laplace is None:
            raise NotFittedError("LLA has no posterior yet; call fit(train_loader) first")
        return self._laplace


def best_prior_precision(posterior: Any, *, num_steps: int, lr: float, start: float) -> float:
    """laplace-torch's ascent in log δ for a full H, by the eigenvalues λ of H/T: −½ [Σ log(1 + λ/δ) + δ ‖θ*‖²].

    One decomposition in place of a determinant a step.
    """
    eigenvalues = torch.linalg.eigvalsh(posterior.H.double() * posterior._H_factor).clamp_min(0)
    sq_norm = posterior.mean.double().square().sum()
    log_precision = torch.tensor(math.log(start), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([log_precision], lr=lr)
    for _ in range(num_steps):
        precision = log_precision.exp()
        loss = 0.5 * (torch.log1p(eigenvalues / precision).sum() + precision * sq_norm)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return math.exp(float(log_precision.detach()))
