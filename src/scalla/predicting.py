"""Features and posterior → everything that can be asked of a fitted method at new inputs.

The output is f(x) + g(x) w with w ~ N(0, (H/T + δI)⁻¹): one draw of w is one function, whatever the batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scalla.features import FeatureMap
from scalla.hidden import recorded
from scalla.posterior import Posterior
from scalla.predictive import LINKS, Prediction, closed_form_probs, mean_softmax, ood_score
from scalla.probes import mix_seed
from scalla.residual import Residual
from scalla.types import InputError, Inputs, Likelihood, Link, NotFittedError


class LinearizedPredictive(nn.Module):
    """The predictive side of ScaLLA: reads a feature map and a posterior, changes nothing."""

    model: nn.Module
    likelihood: Likelihood
    num_features: int
    seed: int
    enable_backprop: bool
    feature_map: FeatureMap | None
    posterior: Posterior | None
    residual: Residual | None

    def features(self, x: Inputs) -> Float[Tensor, "B C m"]:
        """g(x), in the scale of the kernel: features(x) @ features(x').T ≈ K_NTK(x, x')."""
        return self._outputs_and_features(x)[1]

    def _outputs_and_features(self, x: Inputs) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B C m"]]:
        with torch.set_grad_enabled(self.enable_backprop and torch.is_grad_enabled()):
            return self._fitted_map(x)

    def _outputs_and_factor(self, x: Inputs) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B C R"]]:
        """f(x), and A with A Aᵀ = Σ(x): g(x) R; with a residual κ f(x), and √v(x) beside κ g(x) R for each output."""
        posterior = self._posterior
        with recorded() as hidden:
            outputs, features = self._outputs_and_features(x)
        # In float64: a small prior precision makes the factor large in directions that the data do not see.
        factor = (features.double() @ posterior.factor).to(features)
        if self.residual is None:
            return outputs, factor
        with torch.set_grad_enabled(self.enable_backprop and torch.is_grad_enabled()):
            return self.residual.beside(outputs, factor, hidden)

    def predict(
        self,
        x: Inputs,
        *,
        link_approx: Link = "probit",
        n_samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """Mean, variances, probabilities and scores at x; each is computed when it is read."""
        if link_approx not in LINKS:
            raise InputError(f"got link_approx={link_approx!r}; choose one of {', '.join(LINKS)}")
        outputs, factor = self._outputs_and_factor(x)
        noise = self._draw_noise(n_samples, generator).to(factor) if n_samples else None
        noise_var = (
            self._posterior.sigma_noise.reshape(-1).square().to(factor) if self.likelihood == "regression" else None
        )
        return Prediction(outputs, factor, self.likelihood, link_approx, noise=noise, noise_var=noise_var)

    def forward(
        self,
        x: Inputs,
        pred_type: str = "glm",
        joint: bool = False,
        link_approx: Link = "probit",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Probabilities (B, C); for regression (mean, variance) of f, observation noise left out.

        As laplace-torch's call: `joint=True` gives one covariance over all inputs and outputs (regression),
        `diagonal_output=True` variances instead of covariances (regression) or independent draws ("mc").
        """
        check_pred_type(pred_type)
        by_samples = self.likelihood == "classification" and link_approx == "mc"
        prediction = self.predict(
            x, link_approx=link_approx, n_samples=n_samples if by_samples else 0, generator=generator
        )
        if self.likelihood == "regression":
            if joint:
                flat = prediction.factor.flatten(0, 1)
                return prediction.mean.flatten(), flat @ flat.mT
            if diagonal_output:
                return prediction.mean, prediction.factor.square().sum(-1)
            return prediction.mean, prediction.factor @ prediction.factor.mT
        if not by_samples:
            probs = closed_form_probs(prediction.mean, prediction.factor, link_approx)
            return probs[:, 1:] if prediction.mean.shape[-1] == 1 else probs
        if diagonal_output:
            return _mean_probs(self._diagonal_samples(prediction, n_samples, generator))
        return prediction.probs

    def ood_score(self, x: Inputs, score: str = "gaussian_entropy", **options: Any) -> Float[Tensor, " B"]:
        """One number for each input, larger = more out of distribution."""
        return ood_score(self.predict(x, **options), score)

    def functional_variance(self, x: Inputs) -> Float[Tensor, "B C C"]:
        """Σ(x) = g(x) (H/T + δI)⁻¹ g(x)ᵀ."""
        return self.predict(x, n_samples=0).cov

    def functional_covariance(self, x: Inputs, other: Inputs | None = None) -> Float[Tensor, "BC DC"]:
        """Σ(x, x'), jointly over all inputs and outputs; x' = x where none is given."""
        left = self.predict(x, n_samples=0).factor.flatten(0, 1)
        right = left if other is None else self.predict(other, n_samples=0).factor.flatten(0, 1)
        return left @ right.mT

    def functional_samples(
        self,
        x: Inputs,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        *,
        pred_type: str = "glm",
        diagonal_output: bool = False,
    ) -> Float[Tensor, "S B C"]:
        """f(x) + g(x) w for draws w of the posterior.

        Without a generator the draws are a function of the seed: every call sees the same S functions, so that
        samples are coherent across batches. `function_sampler` gives coherent functions of a generator.
        """
        pred_type, n_samples, generator = _argument_order(pred_type, n_samples, generator)
        check_pred_type(pred_type)
        if diagonal_output:
            return self._diagonal_samples(self.predict(x, n_samples=0), n_samples, generator)
        return self.function_sampler(n_samples, generator)(x)

    def predictive_samples(
        self,
        x: Inputs,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        *,
        pred_type: str = "glm",
        diagonal_output: bool = False,
    ) -> Float[Tensor, "S B C"]:
        """Function samples through the link: class probabilities; for regression the samples themselves."""
        pred_type, n_samples, generator = _argument_order(pred_type, n_samples, generator)
        samples = self.functional_samples(x, n_samples, generator, pred_type=pred_type, diagonal_output=diagonal_output)
        if self.likelihood == "regression":
            return samples
        return torch.softmax(samples, -1) if samples.shape[-1] > 1 else torch.sigmoid(samples)

    def function_sampler(
        self, n_samples: int = 100, generator: torch.Generator | None = None
    ) -> Callable[[Inputs], Float[Tensor, "S B C"]]:
        """S functions drawn once, to be evaluated on any number of batches: x → (S, B, C)."""
        noise = self._draw_noise(n_samples, generator)

        def functions(x: Inputs) -> Tensor:
            outputs, factor = self._outputs_and_factor(x)
            return outputs + torch.einsum("bcr,rs->sbc", factor, noise.to(factor))

        return functions

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Float[Tensor, "S m"]:
        """Draws w ~ N(0, (H/T + δI)⁻¹) of the feature weights."""
        factor = self._posterior.factor
        return (factor @ self._draw(self.num_features, n_samples, generator).to(factor)).mT

    def _draw_noise(self, n_samples: int, generator: torch.Generator | None) -> Float[Tensor, "R S"]:
        """Standard normal, a row for each column of the factor; those of w are the same with and without a residual."""
        noise = self._draw(self.num_features, n_samples, generator)
        if self.residual is None:
            return noise
        return torch.cat([noise, self._draw(self.n_outputs, n_samples, generator, stream=106)])

    def _draw(
        self, rows: int, n_samples: int, generator: torch.Generator | None, *, stream: int = 104
    ) -> Float[Tensor, "R S"]:
        if not isinstance(n_samples, int) or n_samples < 0:
            raise InputError(f"got n_samples={n_samples!r}; wanted a whole number")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise InputError(f"got a generator of type {type(generator).__name__}; wanted a torch.Generator")
        if generator is None:
            generator = torch.Generator().manual_seed(mix_seed(self.seed, stream))
        # One row a sample: the first functions are the same however many are asked for. In whole blocks of 16, since
        # randn draws the last ones of any other number anew.
        size = -(-n_samples * rows // 16) * 16
        drawn = torch.randn(size, dtype=torch.float64, generator=generator, device=generator.device)
        return drawn[: n_samples * rows].view(n_samples, rows).mT

    def _diagonal_samples(
        self, prediction: Prediction, n_samples: int, generator: torch.Generator | None
    ) -> Float[Tensor, "S B C"]:
        noise = self._draw(prediction.mean.shape[-1], n_samples, generator).to(prediction.mean)
        return prediction.mean + prediction.var.sqrt() * noise.mT[:, None, :]

    # -- what was fitted --

    @property
    def _fitted_map(self) -> FeatureMap:
        if self.feature_map is None:
            raise NotFittedError("this ScaLLA has no features yet; call fit(train_loader) first")
        return self.feature_map

    @property
    def _posterior(self) -> Posterior:
        if self.posterior is None:
            raise NotFittedError("this ScaLLA has no posterior yet; call fit(train_loader) first")
        return self.posterior

    @property
    def n_data(self) -> int:
        """Training inputs in the posterior."""
        return self._posterior.num_data

    @property
    def n_outputs(self) -> int:
        """C."""
        return self._posterior.num_outputs

    @property
    def n_params(self) -> int:
        """P, the weights that the kernel is taken over."""
        return self._posterior.num_params

    @property
    def posterior_precision(self) -> Float[Tensor, "m m"]:
        """H/T + δI."""
        return self._posterior.precision

    @property
    def posterior_covariance(self) -> Float[Tensor, "m m"]:
        """(H/T + δI)⁻¹."""
        return self._posterior.covariance

    @property
    def log_likelihood(self) -> Float[Tensor, ""]:
        """log p(D | θ*)."""
        return self._posterior.log_likelihood()

    @property
    def scatter(self) -> Float[Tensor, ""]:
        """δ ‖θ* − μ0‖²."""
        return self._posterior.scatter()

    @property
    def log_det_ratio(self) -> Float[Tensor, ""]:
        """log det(I + H/(Tδ))."""
        return self._posterior.log_det_ratio()


def _mean_probs(samples: Float[Tensor, "S B C"]) -> Float[Tensor, "B C"]:
    """Mean probabilities of logit samples; of class 1 where there is a single logit."""
    if samples.shape[-1] > 1:
        return mean_softmax([samples])[0]
    return torch.sigmoid(samples).mean(0)


def _argument_order(pred_type: str, n_samples: Any, generator: Any) -> tuple[str, Any, Any]:
    """laplace-torch's order is (x, pred_type, n_samples): samples(x, "glm", 50) is understood, too."""
    if not isinstance(n_samples, str):
        return pred_type, n_samples, generator
    return n_samples, 100 if generator is None else generator, None


def check_pred_type(pred_type: str) -> None:
    if pred_type == "nn":
        raise InputError(
            "got pred_type='nn': the posterior is over m feature weights, not over the network's weights, so there are "
            "no networks to sample; use pred_type='glm'"
        )
    if pred_type != "glm":
        raise InputError(f"got pred_type={pred_type!r}; the only one here is 'glm'")
