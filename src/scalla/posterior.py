"""The Gaussian over the m feature weights: precision H/T + δI, and the evidence.

Everything is in float64. H is diagonalised once, H = U diag(λ) Uᵀ; λ below the rounding of H is zero, so
that directions without data carry the prior variance 1/δ exactly, for any δ > 0, and nothing can fail to be
positive definite.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scalla.ggn import GGNSums
from scalla.types import InputError, Likelihood


class Posterior(nn.Module):
    """N(0, (H/T + δI)⁻¹) over w ∈ R^m, in which the network's output is f(x) + g(x) w."""

    ggn: Float[Tensor, "R m m"]
    loss: Float[Tensor, " R"]

    def __init__(
        self,
        sums: GGNSums,
        likelihood: Likelihood,
        *,
        num_outputs: int,
        prior_precision: Tensor,
        sigma_noise: Tensor,
        temperature: float,
        weights_sq_norm: float,
        num_params: int,
    ) -> None:
        super().__init__()
        self.register_buffer("ggn", sums.ggn)
        self.register_buffer("loss", sums.loss)
        self.likelihood: Likelihood = likelihood
        self.num_data, self.num_outputs, self.num_params = sums.num_data, num_outputs, num_params
        self.prior_precision, self.sigma_noise, self.temperature = prior_precision, sigma_noise, temperature
        #: ‖θ* − μ0‖² over all P weights of the kernel
        self.weights_sq_norm = weights_sq_norm
        self._diagonalise()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Posterior:
        """Moves with the module, stays in float64 (`.to(dtype)` and `.half()` are for the networks)."""
        device = fn(torch.empty(0, device=self.ggn.device)).device
        self.ggn, self.loss = self.ggn.to(device), self.loss.to(device)
        self._diagonalise()
        return self

    # -- precision and covariance --

    def configure(
        self,
        *,
        prior_precision: Tensor | None = None,
        sigma_noise: Tensor | None = None,
        temperature: float | None = None,
    ) -> None:
        """Set δ, σ or T; what follows from them is computed here, so that predictions only read."""
        self.prior_precision = self.prior_precision if prior_precision is None else prior_precision
        self.temperature = self.temperature if temperature is None else temperature
        if sigma_noise is not None:
            self.sigma_noise = sigma_noise
            self._diagonalise()
        self._scale()

    def _diagonalise(self) -> None:
        total = torch.einsum("r,rij->ij", self._noise_precision(self.sigma_noise.detach()), self.ggn)
        values, self.eigenvectors = torch.linalg.eigh((total + total.mT) / 2)
        #: eigenvalues of Σ_r H_r/σ_r²
        self.eigenvalues = self._above_rounding(values)
        self._scale()

    def _scale(self) -> None:
        #: R with R Rᵀ = (H/T + δI)⁻¹; w = R ε for standard normal ε
        self.factor = self.eigenvectors * (self.eigenvalues / self.temperature + self.delta).rsqrt()

    def _noise_precision(self, sigma_noise: Tensor) -> Float[Tensor, " R"]:
        """1/σ² of each noise level; 1 for classification."""
        if self.likelihood != "regression":
            return torch.ones_like(self.loss)
        return sigma_noise.to(self.loss).reshape(-1).expand(len(self.loss)).square().reciprocal()

    def _above_rounding(self, values: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
        """λ with what rounding made of zero eigenvalues set to zero.

        The factorisation errs by m units of rounding, a sum of n = NC terms by about √n (twice that is allowed).
        """
        units = len(values) + 2 * math.sqrt(self.num_data * self.num_outputs)
        threshold = units * torch.finfo(values.dtype).eps * values.detach().abs().amax()
        return torch.where(values > threshold, values, torch.zeros_like(values))

    @property
    def delta(self) -> Float[Tensor, ""]:
        return self.prior_precision.detach().to(self.eigenvalues).reshape(())

    @property
    def precision(self) -> Float[Tensor, "m m"]:
        return (self.eigenvectors * (self.eigenvalues / self.temperature + self.delta)) @ self.eigenvectors.mT

    @property
    def covariance(self) -> Float[Tensor, "m m"]:
        return self.factor @ self.factor.mT

    # -- evidence --

    def log_likelihood(self, sigma_noise: Tensor | None = None) -> Float[Tensor, ""]:
        """log p(D | θ*), tempered as H is."""
        if self.likelihood != "regression":
            return -self.loss.sum() / self.temperature
        sigma = (self.sigma_noise if sigma_noise is None else sigma_noise).to(self.loss).reshape(-1)
        sigma = sigma.expand(len(self.loss))
        fit = -0.5 * (self.loss / sigma.square()).sum() / self.temperature
        return fit - self.num_data * (sigma.log() + 0.5 * math.log(2 * math.pi)).sum()

    def log_det_ratio(
        self, prior_precision: Tensor | None = None, sigma_noise: Tensor | None = None
    ) -> Float[Tensor, ""]:
        """log det(I + H/(Tδ)), which is also log det P/det P0 in the P weights that the features stand for."""
        delta = (self.prior_precision if prior_precision is None else prior_precision).to(self.ggn).reshape(())
        if sigma_noise is None:
            values = self.eigenvalues
        else:
            total = torch.einsum("r,rij->ij", self._noise_precision(sigma_noise), self.ggn)
            values = self._above_rounding(torch.linalg.eigvalsh((total + total.mT) / 2))
        return torch.log1p(values / (self.temperature * delta)).sum()

    def scatter(self, prior_precision: Tensor | None = None) -> Float[Tensor, ""]:
        """δ ‖θ* − μ0‖² over all P weights."""
        delta = (self.prior_precision if prior_precision is None else prior_precision).to(self.ggn).reshape(())
        return delta * self.weights_sq_norm

    def log_marginal_likelihood(
        self, prior_precision: Tensor | None = None, sigma_noise: Tensor | None = None
    ) -> Float[Tensor, ""]:
        """log p(D|θ*) − ½ [log det(I + H/δ) + δ‖θ* − μ0‖²]."""
        complexity = self.log_det_ratio(prior_precision, sigma_noise) + self.scatter(prior_precision)
        return self.log_likelihood(sigma_noise) - 0.5 * complexity

    # -- exact addition and removal of data --

    def plus(self, sums: GGNSums, sign: int) -> None:
        """H ± the sums of other data; taking away what was never there is refused."""
        ggn, loss = self.ggn + sign * sums.ggn, self.loss + sign * sums.loss
        num_data = self.num_data + sign * sums.num_data
        if sign < 0:
            smallest = torch.linalg.eigvalsh(ggn)[:, 0]
            size = torch.linalg.matrix_norm(self.ggn, 2)
            if num_data < 0 or bool((smallest < -1e-8 * size).any()):
                raise InputError(
                    f"asked to forget {sums.num_data} inputs, but the posterior of {self.num_data} inputs does not "
                    "hold them: taking them away leaves a negative precision. Forget only what was given to fit or "
                    "update"
                )
            if num_data == 0:
                ggn, loss = torch.zeros_like(ggn), torch.zeros_like(loss)
        self.ggn, self.loss, self.num_data = ggn, loss, num_data
        self._diagonalise()
