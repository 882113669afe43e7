"""Gaussian predictions against observed values: RMSE, NLL, CRPS, coverage.

`mean`, `var` and `y` have one shape, (B,) or (B, C), and every output of every input counts the same.
`var` is the variance of an *observation*: `Prediction.var_with_noise`, not `Prediction.var`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scalla.metrics.inputs import Array, as_finite, same_shape
from scalla.types import InputError


def rmse(mean: Array, y: Array) -> float:
    """√ mean (y − mean)².

    >>> rmse([0.0, 0.0], [3.0, -3.0])
    3.0
    """
    predicted, observed = as_finite("mean", mean), as_finite("y", y)
    same_shape(mean=predicted, y=observed)
    return float((observed - predicted).square().mean().sqrt())


def gaussian_nll(mean: Array, var: Array, y: Array) -> float:
    """−mean log N(y | mean, var), in nats, constant included.

    >>> round(gaussian_nll([0.0], [1.0], [0.0]), 4)
    0.9189
    """
    predicted, variance, observed = _checked(mean, var, y)
    if bool((variance == 0).any()):
        raise InputError(
            f"got var with {int((variance == 0).sum())} zeros, where the density is infinite; wanted > 0: "
            "add the observation noise (Prediction.var_with_noise)"
        )
    log_density = -0.5 * ((2 * math.pi * variance).log() + (observed - predicted).square() / variance)
    return float(-log_density.mean())


def crps_gaussian(mean: Array, var: Array, y: Array) -> float:
    """Mean continuous ranked probability score, in the unit of y; the absolute error where var = 0.

    With z = (y − μ)/σ: σ (z (2Φ(z) − 1) + 2φ(z) − 1/√π), and 2Φ(z) − 1 = erf(z/√2).

    >>> round(crps_gaussian([0.0], [1.0], [0.0]), 4)
    0.2337
    """
    predicted, variance, observed = _checked(mean, var, y)
    error, std = observed - predicted, variance.sqrt()
    z = error / std.clamp_min(torch.finfo(torch.float64).tiny)
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return float((error * torch.erf(z / math.sqrt(2)) + std * (2 * density - 1 / math.sqrt(math.pi))).mean())


def interval_coverage(mean: Array, var: Array, y: Array, level: float = 0.95) -> float:
    """Share of y inside the central interval that should hold `level` of them: |y − μ| ≤ √2 erf⁻¹(level) σ.

    >>> interval_coverage([0.0, 0.0], [1.0, 1.0], [1.9, 2.0])
    0.5
    """
    if not 0 < level < 1:
        raise InputError(f"got level={level}; wanted a share strictly between 0 and 1, such as 0.95")
    predicted, variance, observed = _checked(mean, var, y)
    half_width = math.sqrt(2) * torch.erfinv(torch.tensor(level, dtype=torch.float64)) * variance.sqrt()
    return float(((observed - predicted).abs() <= half_width).double().mean())


def _checked(mean: Array, var: Array, y: Array) -> tuple[Tensor, Tensor, Tensor]:
    predicted, variance, observed = as_finite("mean", mean), as_finite("var", var), as_finite("y", y)
    same_shape(mean=predicted, var=variance, y=observed)
    if bool((variance < 0).any()):
        raise InputError(
            f"got var with {int((variance < 0).sum())} negative values (least {float(variance.min()):.4g}); "
            "wanted variances: if these are log-variances pass var.exp()"
        )
    return predicted, variance, observed
