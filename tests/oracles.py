"""Independent float64 references, written for clarity: loops, dense matrices, no call into scalla."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def outputs_of(model: nn.Module, x: Any) -> Tensor:
    """(B, C) logits, however the network wants its inputs and names its outputs."""
    if isinstance(x, dict):
        try:
            out = model(**x)
        except TypeError:
            out = model(x)
    else:
        out = model(x)
    return out if isinstance(out, Tensor) else out.logits


def dense_jacobian(model: nn.Module, x: Any, names: Sequence[str] | None = None) -> Tensor:
    """J of shape (B, C, P) by one backward pass for each output of each input; a copy is differentiated."""
    model = copy.deepcopy(model).double().eval()
    weights = [p.requires_grad_(True) for n, p in model.named_parameters() if names is None or n in names]
    if isinstance(x, dict):
        x = {k: v.double() if v.is_floating_point() else v for k, v in x.items()}
    elif x.is_floating_point():
        x = x.double()
    outputs = outputs_of(model, x)
    rows = []
    for output in outputs.flatten():
        grads = torch.autograd.grad(output, weights, retain_graph=True, allow_unused=True)
        parts = [torch.zeros_like(w) if g is None else g for g, w in zip(grads, weights, strict=True)]
        rows.append(torch.cat([g.flatten() for g in parts]))
    return torch.stack(rows).view(*outputs.shape, -1)


def likelihood_hessian(outputs: Tensor, likelihood: str, sigma: Tensor | float = 1.0) -> Tensor:
    """Λ of shape (B, C, C): diag(p) − ppᵀ, p(1 − p) of a single logit, or diag(1/σ²)."""
    num_inputs, num_outputs = outputs.shape
    if likelihood == "regression":
        noise = torch.as_tensor(sigma, dtype=torch.float64).reshape(-1).expand(num_outputs)
        return torch.diag(1 / noise**2).expand(num_inputs, -1, -1)
    if num_outputs == 1:
        p = torch.sigmoid(outputs)
        return (p * (1 - p))[:, :, None]
    p = outputs.softmax(-1)
    return torch.stack([torch.diag(row) - torch.outer(row, row) for row in p])


def dense_ggn(features: Tensor, outputs: Tensor, likelihood: str, sigma: Tensor | float = 1.0) -> Tensor:
    """Σ_n g_nᵀ Λ_n g_n, one input after the other."""
    total = torch.zeros(features.shape[-1], features.shape[-1], dtype=torch.float64)
    for g, hessian in zip(features.double(), likelihood_hessian(outputs.double(), likelihood, sigma), strict=True):
        total = total + g.T @ hessian @ g
    return total


class DenseLLA:
    """The linearized Laplace approximation with all matrices formed and inverted."""

    def __init__(
        self,
        features: Tensor,
        outputs: Tensor,
        labels: Tensor,
        likelihood: str,
        *,
        delta: float = 1.0,
        sigma: Tensor | float = 1.0,
        temperature: float = 1.0,
        weights_sq_norm: float = 0.0,
    ) -> None:
        self.likelihood, self.delta, self.sigma, self.temperature = likelihood, delta, sigma, temperature
        self.outputs, self.labels, self.weights_sq_norm = outputs.double(), labels, weights_sq_norm
        self.ggn = dense_ggn(features, outputs, likelihood, sigma)
        eye = torch.eye(len(self.ggn), dtype=torch.float64)
        self.precision = self.ggn / temperature + delta * eye
        self.covariance = torch.linalg.inv(self.precision)

    def variance(self, features: Tensor) -> Tensor:
        """(B, C, C)."""
        return torch.stack([g @ self.covariance @ g.T for g in features.double()])

    def joint(self, features: Tensor) -> Tensor:
        flat = features.double().flatten(0, 1)
        return flat @ self.covariance @ flat.T

    def log_likelihood(self) -> Tensor:
        if self.likelihood == "regression":
            noise = torch.as_tensor(self.sigma, dtype=torch.float64).reshape(-1).expand(self.outputs.shape[-1])
            fit = -0.5 * (((self.labels - self.outputs) / noise) ** 2).sum() / self.temperature
            return fit - len(self.outputs) * (noise.log() + 0.5 * math.log(2 * math.pi)).sum()
        if self.outputs.shape[-1] == 1:
            p = torch.sigmoid(self.outputs[:, 0])
            return torch.where(self.labels == 1, p, 1 - p).log().sum() / self.temperature
        logp = self.outputs.log_softmax(-1)
        return sum(logp[i, int(c)] for i, c in enumerate(self.labels)) / self.temperature

    def evidence(self) -> Tensor:
        eye = torch.eye(len(self.ggn), dtype=torch.float64)
        log_det = torch.linalg.slogdet(eye + self.ggn / (self.temperature * self.delta))[1]
        return self.log_likelihood() - 0.5 * (log_det + self.delta * self.weights_sq_norm)


def probit_probs(mean: Tensor, variance: Tensor) -> Tensor:
    """softmax(f / √(1 + π/8 · diag Σ))."""
    scaled = torch.stack(
        [f / torch.sqrt(1 + math.pi / 8 * torch.diagonal(s)) for f, s in zip(mean, variance, strict=True)]
    )
    return scaled.softmax(-1)


def pairwise_matching_loss(features: Sequence[Tensor], targets: Sequence[Tensor], groups: Sequence[int]) -> Tensor:
    """mean over (i, a), (j, b) of (g_ia · g_jb − K)², K the mean over probes of z_ia z_jb, zero across groups."""
    rows = [(g, z, label) for gs, zs, label in zip(features, targets, groups, strict=True) for i in range(len(gs))
            for g, z in zip(gs[i], zs[i], strict=True)]  # fmt: skip
    total = torch.zeros((), dtype=torch.float64)
    for g, z, label in rows:
        for g2, z2, label2 in rows:
            kernel = (z * z2).mean() if label == label2 else 0.0
            total = total + ((g * g2).sum() - kernel) ** 2
    return total / len(rows) ** 2


def rank_floor(kernel: Tensor, rank: int) -> float:
    """Relative Frobenius error of the truncated SVD."""
    left, values, right = torch.linalg.svd(kernel)
    truncated = left[:, :rank] @ torch.diag(values[:rank]) @ right[:rank]
    return float((truncated - kernel).norm() / kernel.norm())


class JacobianFeatures(nn.Module):
    """x → J(x) of shape (B, C, P): with it in the surrogate's place, ScaLLA is LLA exactly."""

    def __init__(self, model: nn.Module, names: Sequence[str] | None = None) -> None:
        super().__init__()
        self._reference = [model]  # kept from state_dict and .to()
        self.names = names

    def forward(self, x: Any) -> Tensor:
        with torch.enable_grad():
            return dense_jacobian(self._reference[0], x, self.names)
