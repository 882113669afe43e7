"""Strokes: something written, in no script."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from scalla.context.base import ImageContext, uniform

MOST_CURVES, POINTS = 4, 48


@final
@dataclass(frozen=True, eq=False)
class Strokes(ImageContext):
    """One to four smooth curves of random width in one colour on a background, the colour at a training image's corner.

    A curve has a heading θ(s) = θ₀ + κ s + Σ_k a_k sin(π k s + φ_k), k = 1, 2, 3, sometimes with a corner, and the
    shade ½ + β (I(p) − ½), clamped to [0, 1], with I(p) = ∫ exp(−‖p − c(s)‖²/2w²) ds / √(2π) w, the line integral that
    is exp(−d²/2w²) at a distance d from a straight line. Nothing is taken from any writing.
    """

    def _draw_values(self, num: int, rng: torch.Generator) -> Float[Tensor, "num channels height width"]:
        shade = strokes(num, *self._side, rng)[:, None].to(self._wide)
        paper = self._paper(num, rng)
        return torch.lerp(paper, self._ink(paper, rng), shade)


def strokes(num: int, height: int, width: int, rng: torch.Generator) -> Float32[Tensor, "num height width"]:
    """Shades from 0, the background, to 1."""
    count = torch.randint(1, MOST_CURVES + 1, (num, 1), generator=rng)
    points, lengths = curves(num, rng)
    # √2 σ √log 2 is where a Gaussian falls to ½: the half width of the line.
    half_width = uniform((num, 1, 1), math.log(0.02), math.log(0.07), rng).exp()
    spread = half_width / math.sqrt(2 * math.log(2))
    there = torch.arange(MOST_CURVES) < count
    weight = lengths * there / (POINTS * math.sqrt(2 * math.pi) * spread[..., 0])
    pixel = 1 / min(height, width)
    bumps = []
    for axis, length in enumerate((height, width)):
        place = (torch.arange(length) + 0.5) / length
        at = points[..., axis].flatten(1)[..., None]
        bumps.append(torch.exp(-0.5 * ((place - at) / spread).square()))
    weights = weight[..., None].expand(num, MOST_CURVES, POINTS).reshape(num, -1, 1)
    total = torch.einsum("nph,npw->nhw", bumps[0] * weights, bumps[1])
    # Edges that are about a pixel wide: the slope of exp(−d²/2w²) at its half is 0.59/w.
    slope = spread / (0.59 * pixel) * uniform((num, 1, 1), 0.5, 2, rng)
    shade = (0.5 + slope.clamp_min(1) * (total - 0.5)).clamp(0, 1)
    return shade / shade.amax((1, 2), keepdim=True).clamp_min(1e-6)


def curves(
    num: int, rng: torch.Generator
) -> tuple[Float32[Tensor, "num curves points 2"], Float32[Tensor, "num curves"]]:
    """Points at equal distances along each curve, on the unit square, and the curves' lengths."""
    shape = (num, MOST_CURVES, 1)
    s = torch.linspace(0, 1, POINTS)
    heading = uniform(shape, 0, 2 * math.pi, rng) + uniform(shape, -1.5 * math.pi, 1.5 * math.pi, rng) * s
    for k in (1, 2, 3):
        heading = heading + torch.randn(shape, generator=rng) / k * torch.sin(
            math.pi * k * s + uniform(shape, 0, 2 * math.pi, rng)
        )
    corner = (torch.rand(shape, generator=rng) < 0.3) * uniform(shape, math.pi / 3, math.pi, rng)
    heading = heading + corner * (s > uniform(shape, 0.2, 0.8, rng))
    lengths = uniform((num, MOST_CURVES), 0.3, 1.4, rng)
    steps = torch.stack([heading.sin(), heading.cos()], -1) * lengths[..., None, None] / POINTS
    path = steps.cumsum(2)
    low, high = path.amin(2, keepdim=True), path.amax(2, keepdim=True)
    # Anywhere in the image, 0.1 from its edges; a curve that is larger than that goes over them in equal parts.
    free = 0.8 - (high - low)
    start = torch.where(free > 0, 0.1 + free * torch.rand(num, MOST_CURVES, 1, 2, generator=rng), 0.1 + free / 2)
    return path - low + start, lengths
