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
    """The maximum of the evidence in δ, in σ, or in both together."""
    _check_names(tune, ("prior_precision", "sigma_noise"), "the evidence")
    if "sigma_noise" in tune:
        delta, sigma = evidence_noise(posterior, with_prior="prior_precision" in tune, num_steps=max(num_steps, 1))
        loss = -posterior.log_marginal_likelihood(torch.tensor(delta, dtype=torch.float64), sigma)
    else:
        delta, sigma = evidence_prior_precision(posterior), posterior.sigma_noise
        loss = -posterior.log_marginal_likelihood(torch.tensor(delta, dtype=torch.float64))
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
    return TunedValues(delta, posterior.temperature, posterior.sigma_noise, losses[list(grid).index(delta)])


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
    """The δ that maximises the evidence; where there is none, the end of the range, with a warning."""
    delta = _evidence_root(posterior.eigenvalues / posterior.temperature, posterior.weights_sq_norm)
    if abs(math.log10(delta)) > LOG10_DELTA_RANGE[1] - 1e-6:
        warnings.warn(
            f"the evidence has no maximum for prior precisions from 1e{LOG10_DELTA_RANGE[0]:.0f} to "
            f"1e{LOG10_DELTA_RANGE[1]:.0f}: it was set to {delta:.3g}. Either the data inform no weight, or the "
            "weights lie at the prior's mean; choose the prior precision by held-out data (method='gridsearch')",
            UserWarning,
            stacklevel=3,
        )
    return delta


def _evidence_root(values: Float[Tensor, " m"], weights_sq_norm: float) -> float:
    """The one root of Σ λ/(λ + δ) = δ ‖θ* − μ0‖², by bisection.

    The left side (the effective number of parameters) falls with δ, the right side rises.
    """
    low, high = LOG10_DELTA_RANGE
    for _ in range(200):
        middle = (low + high) / 2
        delta = 10.0**middle
        if float((values / (values + delta)).sum()) > delta * weights_sq_norm:
            low = middle
        else:
            high = middle
    return 10.0 ** ((low + high) / 2)


def evidence_noise(posterior: Posterior, *, with_prior: bool = True, num_steps: int = 100) -> tuple[float, Tensor]:
    """The σ (one, or one for each output, as the posterior has) of largest evidence, with or without δ.

    L-BFGS in their logarithms, from the residuals' own size: σ² = Σ (y − f)² / NT.
    """
    if posterior.likelihood != "regression":
        raise InputError("got a classification, which has no observation noise; tune the prior precision alone")
    squares = posterior.loss if posterior.sigma_noise.numel() > 1 else posterior.loss.mean()
    if posterior.num_data == 0 or not bool((squares > 0).all()):
        raise InputError(
            f"the network meets all {posterior.num_data} training targets exactly, so the evidence has no maximum in "
            "sigma_noise; tune it on held-out data (method='gradient')"
        )
    sigma = (squares / (posterior.num_data * posterior.temperature)).sqrt()
    delta = posterior.delta
    if with_prior:
        noise_precision = sigma.expand(len(posterior.loss)).square().reciprocal()
        values = torch.linalg.eigvalsh(torch.einsum("r,rij->ij", noise_precision, posterior.ggn)).clamp_min(0)
        delta = delta.new_tensor(_evidence_root(values / posterior.temperature, posterior.weights_sq_norm))
    log_delta, log_sigma = delta.log().requires_grad_(with_prior), sigma.log().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [log_delta, log_sigma] if with_prior else [log_sigma],
        max_iter=num_steps,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-10,
        tolerance_change=1e-14,
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -posterior.log_marginal_likelihood(log_delta.exp(), log_sigma.exp()) / posterior.num_data
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)
    found = log_delta.detach().exp() if with_prior else posterior.delta
    return float(found), log_sigma.detach().exp().reshape(posterior.sigma_noise.shape)


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
    if not grid:
        raise InputError("got an empty grid of prior precisions; wanted grid_size of at least 1")
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
            each = loss(prediction, batch.labels)
            if not isinstance(each, Tensor) or each.shape != batch.labels.shape[:1]:
                found = tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__
                raise InputError(
                    f"the loss gave {found} for {len(batch.labels)} inputs; wanted a function (Prediction, labels) -> "
                    "one number for each input, or a torchmetrics metric"
                )
            total += float(each.double().sum())
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
    posterior: Posterior,
    held_out: Sequence[HeldOut],
    *,
    tune: Sequence[str],
    num_steps: int = 100,
    init_prior_precision: Tensor | None = None,
) -> TunedValues:
    """Minimise the mean held-out NLL (probit, or Gaussian with noise) in log δ, log T and log σ by L-BFGS.

    δ is searched from `init_prior_precision` on, or from where it is.
    """
    allowed = ("prior_precision", "temperature", "sigma_noise")
    _check_names(tune, allowed, "the gradient")
    if "sigma_noise" in tune and posterior.likelihood != "regression":
        raise InputError("got tune with sigma_noise for a classification, which has no observation noise")
    start = {
        "prior_precision": posterior.delta,
        "temperature": torch.tensor(float(posterior.temperature), dtype=torch.float64),
        "sigma_noise": posterior.sigma_noise.detach().double(),
    }
    if init_prior_precision is not None and "prior_precision" in tune:
        start["prior_precision"] = init_prior_precision.detach().to(posterior.delta).reshape(())
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
