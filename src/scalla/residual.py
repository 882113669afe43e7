"""The variance that a kernel of rank m leaves out, brought back where an input is unfamiliar.

N(κ f(x), κ² g(x) (H/T + δI)⁻¹ g(x)ᵀ + v(x) diag(s))                a posterior with a residual
v(x) = v₀ + exp(α + p z(x))                                          κ, v₀, α, p: four numbers, from held-out data
z(x) = √ mean over layers l of max(0, z_l(x))²,   z_l = (log d_l(x) − median) / (99 % quantile − median)

d_l(x) is the distance of what layer l is given from the training data (`density`), median and quantile those of
log d_l over held-out data: z_l is 0 for an ordinary input, 1 for one in a hundred. Below 0 it does not count, so that
a layer that saturates cannot make up for one that finds x unfamiliar. s is 1 for classification, and the mean squared
error of each output for regression. κ is the inverse of a temperature of the logits, and 1 for regression: without it
v would have to soften familiar inputs, too, for a network that is overconfident everywhere.

As features, √(v(x) s_c) are C further columns of g whose weights keep their prior: data do not inform them, as in
the residual diagonal of a sparse Gaussian process (FITC). So m, H and the evidence stay what they are, a draw of
all weights is still one function of x, and no leak of the training data can crush the variance elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scalla.density import ClassGaussians
from scalla.predictive import log_mean_softmax
from scalla.types import InputError, Likelihood

#: draws of the logits when v is calibrated, and numbers that these may be
NUM_DRAWS, MAX_NUMBERS = 32, 2**23
#: an input of the context with a smaller z is as familiar as held-out data: whatever v is there, they share it
UNFAMILIAR = 1.0
#: exp(α + p z) stays between these, far beyond any logit
LOG_BOUNDS = (-40.0, 20.0)


class Residual(nn.Module):
    """What the chosen layers are given → κ, and v(x) s, one variance for each output."""

    centre: Float[Tensor, " L"]
    width: Float[Tensor, " L"]
    #: κ, v₀, α, p
    shape: Float[Tensor, " 4"]
    scale: Float[Tensor, " C"]

    def __init__(self, layers: Sequence[str], densities: Sequence[ClassGaussians], scale: Float[Tensor, " C"]) -> None:
        super().__init__()
        self.layers = list(layers)
        self.densities = nn.ModuleList(densities)
        self.sizes = [[*density.means.shape, len(density.whitening)] for density in densities]
        self.register_buffer("centre", scale.new_zeros(len(self.layers)))
        self.register_buffer("width", scale.new_ones(len(self.layers)))
        self.register_buffer("shape", scale.new_tensor([1.0, 0.0, 0.0, 0.0]))
        self.register_buffer("scale", scale)

    def log_distances(self, hidden: Mapping[str, Tensor]) -> Float[Tensor, "B L"]:
        like = self.scale
        distances = [density(hidden[name].to(like)) for name, density in zip(self.layers, self.densities, strict=True)]
        return torch.stack(distances, -1).clamp_min(torch.finfo(like.dtype).tiny).log()

    def unfamiliarity(self, hidden: Mapping[str, Tensor]) -> Float[Tensor, " B"]:
        """z(x)."""
        z = ((self.log_distances(hidden) - self.centre) / self.width).clamp_min(0)
        return (z.square().mean(-1) + torch.finfo(z.dtype).eps ** 2).sqrt()  # with a derivative at 0

    def forward(self, hidden: Mapping[str, Tensor]) -> Float[Tensor, "B C"]:
        return variance(self.unfamiliarity(hidden), *self.shape[1:])[:, None] * self.scale

    def beside(
        self, outputs: Float[Tensor, "B C"], factor: Float[Tensor, "B C R"], hidden: Mapping[str, Tensor]
    ) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B C R+C"]]:
        """κ f and [κ A, diag(√(v s))], of κ² Σ(x) + v(x) diag(s), where Σ = A Aᵀ."""
        added = torch.diag_embed(self(hidden).sqrt().to(factor))
        outputs_scale, factor_scale = (self.shape[0].to(t) for t in (outputs, factor))
        return outputs_scale * outputs, torch.cat([factor_scale * factor, added], -1)


def variance(z: Float[Tensor, " B"], base: Tensor, log_size: Tensor, power: Tensor) -> Float[Tensor, " B"]:
    """v₀ + exp(α + p z)."""
    return base + (log_size + power * z).clamp(*LOG_BOUNDS).exp()


@dataclass(frozen=True, eq=False)
class Outcome:
    """Held-out inputs (or a context, which has no labels): what v(x) is calibrated on."""

    mean: Float[Tensor, "B C"]
    #: f(x) + g(x) w for draws of w (classification), or the variance with noise (regression)
    spread: Tensor
    z: Float[Tensor, " B"]
    labels: Tensor | None

    def beyond(self, smallest: float) -> Outcome | None:
        """Inputs of a context that are at least so unfamiliar; None where there are none."""
        kept = self.z >= smallest
        if not bool(kept.any()):
            return None
        return Outcome(self.mean[kept], self.spread[..., kept, :], self.z[kept], None)


def calibrated(
    likelihood: Likelihood,
    held_out: Outcome,
    context: Outcome | None,
    *,
    weight: float,
    scale: Float[Tensor, " C"],
    tempered: bool,
) -> Float[Tensor, " 4"]:
    """κ, v₀, α, p of the greatest mean log p(y | x) over held-out data, plus `weight` times that of uniform labels
    over the context, and a normal prior of variance 1 on their logarithms (and α), which decides what the data leave
    open. κ = 1 unless `tempered`."""
    start = torch.tensor([0.0, -3.0, -1.0, math.log(2.0)], dtype=torch.float64)
    parameters = start.clone().requires_grad_(True)
    optimizer = torch.optim.LBFGS([parameters], max_iter=60, line_search_fn="strong_wolfe", tolerance_change=1e-7)
    noise = _noise(held_out.mean.shape[-1], held_out.mean)

    def loss() -> Tensor:
        optimizer.zero_grad()
        shape = _shape(parameters, tempered)
        value = -_log_likelihood(likelihood, held_out, shape, scale, noise).mean()
        if context is not None:
            value = value - weight * _log_likelihood(likelihood, context, shape, scale, noise).mean()
        value = value + 0.5 * (parameters - start).square().sum() / len(held_out.z)
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    found = _shape(parameters.detach(), tempered)
    if not bool(torch.isfinite(found).all()):
        raise InputError("v(x) could not be calibrated on these held-out data; are its outputs and labels in order?")
    return found


def _shape(parameters: Float[Tensor, " 4"], tempered: bool) -> Float[Tensor, " 4"]:
    log_scale, log_base, log_size, log_power = parameters
    outputs_scale = log_scale.exp() if tempered else torch.ones_like(log_scale)
    return torch.stack([outputs_scale, log_base.exp(), log_size, log_power.exp()])


def _noise(num_outputs: int, like: Tensor) -> Float[Tensor, "S 1 C"]:
    rng = torch.Generator().manual_seed(0)
    return torch.randn(NUM_DRAWS, 1, num_outputs, generator=rng, dtype=torch.float64).to(like)


def _log_likelihood(
    likelihood: Likelihood, data: Outcome, shape: Tensor, scale: Tensor, noise: Tensor
) -> Float[Tensor, " B"]:
    """log p(y | x); without labels the mean over all classes."""
    outputs_scale, *rest = shape.to(data.z)
    added = variance(data.z, *rest)[:, None] * scale
    if likelihood == "regression":
        assert data.labels is not None
        var = data.spread + added
        return -0.5 * ((data.labels - data.mean).square() / var + var.log() + math.log(2 * math.pi)).sum(-1)
    logits = outputs_scale * data.spread + added.sqrt() * noise
    if logits.shape[-1] == 1:
        logits = torch.cat([-logits, logits], -1) / 2
    log_probs = log_mean_softmax([logits])
    return log_probs.mean(-1) if data.labels is None else log_probs.gather(-1, data.labels[:, None])[:, 0]


def at_least_single(t: Tensor) -> Tensor:
    """Half precision is too coarse for squared distances."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def described(residual: Residual | None) -> dict[str, Any] | None:
    """What the tensors of a residual do not say, in JSON."""
    if residual is None:
        return None
    return {"layers": residual.layers, "sizes": residual.sizes}


def blank(described: Mapping[str, Any], scale: Float[Tensor, " C"]) -> Residual:
    """A residual of these sizes, its numbers still to be set."""
    densities = [ClassGaussians(k, d, shared=groups == 1 and k > 1, like=scale) for k, d, groups in described["sizes"]]
    return Residual(described["layers"], densities, torch.ones_like(scale))
