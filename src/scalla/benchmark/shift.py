"""Clothes that grow unfamiliar in steps: turned round, and under noise. A good method grows unsure with them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float32
from torch import Tensor
from torch.nn import functional as F

#: images of each severity
NUM_SHIFTED = 500
ROTATIONS = (15.0, 30.0, 45.0, 60.0, 90.0)
NOISE_STDS = (0.05, 0.1, 0.2, 0.3, 0.5)


def rotated(images: Float32[Tensor, "N 1 H W"], degrees: float) -> Float32[Tensor, "N 1 H W"]:
    """About the middle, bilinear, black outside."""
    angle = math.radians(degrees)
    turn = torch.tensor([[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]])
    grid = F.affine_grid(turn.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False).clamp(0, 1)


def noisy(images: Float32[Tensor, "N 1 H W"], std: float) -> Float32[Tensor, "N 1 H W"]:
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return (images + std * noise).clamp(0, 1)


#: kind → severities, and the function (images, severity) → images
SHIFTS: dict[str, tuple[tuple[float, ...], Callable[[Tensor, float], Tensor]]] = {
    "rotation": (ROTATIONS, rotated),
    "noise": (NOISE_STDS, noisy),
}
