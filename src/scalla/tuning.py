"""Prior precision, observation noise and temperature: by the evidence, on a grid, or by gradient on held-out data.

All of it happens in the eigenbasis of H: with G U for the held-out features, the variance of output c under
(δ, T) is Σ_k (GU)²_{ck} / (λ_k/T + δ), so a trial value costs no network pass.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from scalla.posterior import Posterior
from scalla.predictive import Prediction
from scalla.types import InputError, Link

#: the range in which the evidence is searched
LOG10_DELTA_RANGE = (-12.0, 12.0)


#: of a prediction and its labels, one number for each input; or a torchmetrics metric (update, compute, reset)
Loss: TypeAlias = Callable[[Prediction, Tensor], Tensor] | Any

METHODS = ("marglik", "gridsearch", "gradient")


@dataclass(frozen=True)
class TunedValues:
    """What was chosen; what was not tuned is as it was. `loss` is the held-out loss, or minus the evidence."""

    prior_precision: float
    temperature: float
    sigma_noise: Tensor
    loss: float


def by_evidence(posterior: Posterior, *, tune: Sequence[str], num_steps: int) -> TunedValues:
    """The maximum of the evidence in δ, or in δ and σ together."""
    _check_names(tune, ("prior_precision", "sigma_noise"), "the evidence")
    delta, sigma = evidence_prior_precision(posterior), posterior.sigma_noise
    if "sigma_noise" in tune:
        delta, sigma = evidence_prior_and_noise(posterior, num_steps=max(num_steps, 1))
    loss = -posterior.log_marginal_likelihood(
        torch.tensor(delta, dtype=torch.float64), sigma if "sigma_noise" in tune else None
    )
    return TunedValues(delta, posterior.temperature, sigma, float(loss))


def by_grid(
    posterior: Posterior,
    held_out: Sequence[HeldOut],
    grid: Sequence[float],
    *,
    link: Link,
    noise: Float[Tensor, "m S"],
    loss: Loss,
) -> TunedValues:
    """The δ of the grid with the least held-out loss."""
    delta, losses = grid_prior_precision(posterior, held_out, grid, link=link, noise=noise, loss=loss)
    return TunedValues(delta, posterior.temperature, posterior.sigma_noise, min(losses))


def _check_names(tune: Sequence[str], allowed: Sequence[str], by: str) -> None:
    if not tune or any(name not in allowed for name in tune):
        raise InputError(f"got tune={tuple(tune)!r}; {by} can choose from {', '.join(allowed)}")


@dataclass(frozen=True)
class HeldOut:
    """A held-out batch, passed once through network and surrogate."""

    outputs: Float[Tensor, "B C"]
    features: Float[Tensor, "B C m"]
    labels: Tensor


def evidence_prior_precision(posterior: Posterior) -> float:
    """The δ that maximises the evidence: the one root of Σ λ/(λ + Tδ) = δ ‖θ* − μ0‖², by bisection.

    The left side (the effective number of parameters) falls with δ, the right side rises.
    """
    values = posterior.eigenvalues / posterior.temperature
    low, high = LOG10_DELTA_RANGE
    for _ in range(200):
        middle = (low + high) / 2
        delta = 10.0**middle
        if float((values / (values + delta)).sum()) > delta * posterior.weights_sq_norm:
            low = middle
        else:
            high = middle
    return 10.0 ** ((low + high) / 2)


def evidence_prior_and_noise(posterior: Posterior, *, num_steps: int = 200) -> tuple[float, Tensor]:
    """δ and σ (one, or one for each output, as the posterior has) that maximise the evidence together."""
    if posterior.likelihood != "regression":
        raise InputError("got a classification, which has no observation noise; tune the prior precision alone")
    log_delta = posterior.delta.log().clone().requires_grad_()
    log_sigma = posterior.sigma_noise.detach().double().log().clone().requires_grad_()
    optimizer = torch.optim.LBFGS([log_delta, log_sigma], max_iter=num_steps, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -posterior.log_marginal_likelihood(log_delta.exp(), log_sigma.exp()) / posterior.num_data
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    return float(log_delta.detach().exp()), log_sigma.detach().exp()


def held_out_nll(prediction: Prediction, labels: Tensor) -> Float[Tensor, " B"]:
    """−log p(y | x) of each input under the predictive, noise included for regression."""
    return -prediction.log_prob(labels)


def grid_prior_precision(
    posterior: Posterior,
    held_out: Sequence[HeldOut],
    grid: Sequence[float],
    *,
    link: Link,
    noise: Float[Tensor, "m S"],
    loss: Loss = held_out_nll,
) -> tuple[float, list[float]]:
    """The δ of the grid with the least mean held-out loss, and the loss of each; an edge is a warning."""
    losses: list[float] = []
    values, vectors = posterior.eigenvalues, posterior.eigenvectors
    for delta in grid:
        scale = vectors * (values / posterior.temperature + delta).rsqrt()
        total, count = 0.0, 0
        metric = _MetricLoss(loss) if hasattr(loss, "update") and hasattr(loss, "compute") else None
        for batch in held_out:
            factor = batch.features @ scale.to(batch.features)
            prediction = Prediction(
                batch.outputs,
                factor,
                posterior.likelihood,
                link,
                noise=noise.to(factor),
                noise_var=_noise_var(posterior),
            )
            if metric is not None:
                metric.update(prediction, batch.labels)
                continue
            total += float(loss(prediction, batch.labels).double().sum())
            count += len(batch.outputs)
        losses.append(metric.value() if metric is not None else total / count)
    finite = [value if math.isfinite(value) else math.inf for value in losses]
    best = min(range(len(grid)), key=finite.__getitem__)
    if not math.isfinite(finite[best]):
        raise InputError("the held-out loss is infinite or NaN for every prior precision of the grid; check val_loader")
    if len(grid) > 1 and best in (0, len(grid) - 1):
        warnings.warn(
            f"the best prior precision, {grid[best]:.3g}, lies on the edge of the grid ({grid[0]:.3g} to "
            f"{grid[-1]:.3g}): widen log_prior_prec_min and log_prior_prec_max",
            UserWarning,
            stacklevel=3,
        )
    return float(grid[best]), losses


class _MetricLoss:
    """A torchmetrics metric, fed as laplace-torch feeds it: probabilities, or (mean, covariance) if it takes both."""

    def __init__(self, metric: Any) -> None:
        self.metric = metric
        metric.reset()

    def update(self, prediction: Prediction, labels: Tensor) -> None:
        if prediction.likelihood == "classification":
            self.metric.update(prediction.probs, labels)
        elif len(inspect.signature(self.metric.update).parameters) > 2:
            self.metric.update(prediction.mean, prediction.cov, labels)
        else:
            self.metric.update(prediction.mean, labels)

    def value(self) -> float:
        return float(self.metric.compute().sum())


def by_gradient(
    posterior: Posterior, held_out: Sequence[HeldOut], *, tune: Sequence[str], num_steps: int = 100
) -> TunedValues:
    """Minimise the mean held-out NLL (probit, or Gaussian with noise) in log δ, log T and log σ by L-BFGS."""
    allowed = ("prior_precision", "temperature", "sigma_noise")
    _check_names(tune, allowed, "the gradient")
    if "sigma_noise" in tune and posterior.likelihood != "regression":
        raise InputError("got tune with sigma_noise for a classification, which has no observation noise")
    start = {
        "prior_precision": posterior.delta,
        "temperature": torch.tensor(float(posterior.temperature), dtype=torch.float64),
        "sigma_noise": posterior.sigma_noise.detach().double(),
    }
    logs = {k: v.log().clone().requires_grad_(k in tune) for k, v in start.items()}
    squares = _squares_in_eigenbasis(posterior, held_out, per_output_noise="sigma_noise" in tune)
    optimizer = torch.optim.LBFGS(
        [logs[k] for k in tune], max_iter=num_steps, line_search_fn="strong_wolfe", tolerance_change=1e-10
    )

    def objective() -> Tensor:
        delta, temperature, sigma = (logs[k].exp() for k in allowed)
        shrink = posterior.sigma_noise.to(sigma).square() / sigma.square() if "sigma_noise" in tune else 1.0
        values = posterior.eigenvalues.to(delta) * shrink
        weights = (values / temperature + delta).reciprocal()
        total: Tensor = delta.new_zeros(())
        for batch, square in zip(held_out, squares, strict=True):
            var = square @ weights.to(square)
            total = total + _nll(batch, var, posterior.likelihood, sigma)
        # A faint pull to the start keeps values that the data do not inform where they were.
        stay = torch.stack([(logs[k] - start[k].log()).square().sum() for k in tune]).sum()
        return total / sum(len(b.outputs) for b in held_out) + 1e-6 * stay

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = objective()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
        nll = float(objective().detach())
    delta, temperature, sigma = (logs[k].detach().exp() for k in allowed)
    return TunedValues(float(delta), float(temperature), sigma, nll)


def _squares_in_eigenbasis(
    posterior: Posterior, held_out: Sequence[HeldOut], *, per_output_noise: bool
) -> list[Float[Tensor, "B C m"]]:
    if per_output_noise and posterior.sigma_noise.numel() > 1:
        raise InputError(
            "the gradient method tunes one sigma_noise; for one noise for each output use "
            "optimize_prior_precision(method='marglik', tune=('prior_precision', 'sigma_noise'))"
        )
    vectors = posterior.eigenvectors
    return [(b.features.double() @ vectors.to(b.features.device)).square() for b in held_out]


def _nll(batch: HeldOut, var: Tensor, likelihood: str, sigma: Tensor) -> Tensor:
    outputs = batch.outputs.to(var)
    if likelihood == "regression":
        var = var + sigma.to(var).square()
        residual = batch.labels.to(var) - outputs
        return 0.5 * (residual.square() / var + var.log() + math.log(2 * math.pi)).sum()
    scaled = outputs / (1 + math.pi / 8 * var).sqrt()
    if scaled.shape[-1] == 1:
        return torch.nn.functional.binary_cross_entropy_with_logits(
            scaled[:, 0], batch.labels.to(scaled), reduction="sum"
        )
    return torch.nn.functional.cross_entropy(scaled, batch.labels, reduction="sum")


def _noise_var(posterior: Posterior) -> Tensor | None:
    if posterior.likelihood != "regression":
        return None
    return posterior.sigma_noise.detach().reshape(-1).square()
