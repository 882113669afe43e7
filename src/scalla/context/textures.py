"""Textures: patterns without an object."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from scalla.context.base import ImageContext, uniform
from scalla.context.fields import blob_masks, cut, noise_fields, to_unit


@final
@dataclass(frozen=True, eq=False)
class Textures(ImageContext):
    """Patterns in two random colours, half of them inside a random silhouette; with equal chances:

    noise      1/fᵃ, a ~ U(0.5, 2.5), stretched to the range
    grating    ½ + ½ sin(2π f·p + φ), or two of them multiplied, up to a square wave; 1 to side/4 cycles a side
    blobs      one to six Gaussians, soft or sharp
    threshold  1/fᵃ noise above one of its quantiles
    """

    def _draw_values(self, num: int, rng: torch.Generator) -> Float[Tensor, "num channels height width"]:
        height, width = self._side
        exponents = uniform((num,), 0.5, 2.5, rng)
        noise = noise_fields(exponents, height, width, rng)
        shades = torch.stack(
            [
                to_unit(noise),
                gratings(num, height, width, rng),
                blobs(num, height, width, rng),
                cut(noise, uniform((num,), 0.1, 0.9, rng), slope=5.0),
            ]
        )[torch.randint(4, (num,), generator=rng), torch.arange(num)]
        masked = torch.rand(num, 1, 1, generator=rng) < 0.5
        mask = torch.where(masked, blob_masks(num, height, width, rng), torch.ones(()))
        paper = self._paper(num, rng)
        ink = self._ink(paper, rng)
        # The darker of the two colours of a pattern is anywhere between the background and the ink.
        second = torch.lerp(paper, ink, uniform((num, 1, 1, 1), 0, 0.5, rng, dtype=self._wide))
        pattern = torch.lerp(second, ink, shades[:, None].to(self._wide))
        return torch.lerp(paper.expand_as(pattern), pattern, mask[:, None].to(self._wide))


def gratings(num: int, height: int, width: int, rng: torch.Generator) -> Float32[Tensor, "num height width"]:
    """Sine waves of random direction, frequency and phase; half are products of two; between soft and square."""
    most = max(1.0, min(height, width) / 4)
    y, x = torch.linspace(0, 1, height)[:, None], torch.linspace(0, 1, width)
    waves = []
    for _ in range(2):
        cycles = uniform((num, 1, 1), 0, math.log(most), rng).exp()
        angle = uniform((num, 1, 1), 0, 2 * math.pi, rng)
        phase = uniform((num, 1, 1), 0, 2 * math.pi, rng)
        waves.append(torch.sin(2 * math.pi * cycles * (angle.sin() * y + angle.cos() * x) + phase))
    double = torch.rand(num, 1, 1, generator=rng) < 0.5
    wave = torch.where(double, waves[0] * waves[1], waves[0])
    return (0.5 + 0.5 * wave * uniform((num, 1, 1), 0, math.log(8), rng).exp()).clamp(0, 1)


def blobs(num: int, height: int, width: int, rng: torch.Generator) -> Float32[Tensor, "num height width"]:
    """Σ_k exp(−(y − y_k)²/2s_k² − (x − x_k)²/2t_k²) of one to six, through a soft or a sharp step."""
    most = 6
    count = torch.randint(1, most + 1, (num, 1, 1), generator=rng)
    bumps = []
    for length in (height, width):
        place = torch.linspace(0, 1, length)
        middle, spread = uniform((num, most, 1), 0.1, 0.9, rng), uniform((num, most, 1), 0.05, 0.25, rng)
        bumps.append(torch.exp(-0.5 * ((place - middle) / spread).square()))
    there = torch.arange(most)[:, None] < count
    total = torch.einsum("nkh,nkw->nhw", bumps[0] * there, bumps[1])
    sharp = torch.rand(num, 1, 1, generator=rng) < 0.5
    return torch.where(sharp, (0.5 + 5 * (total - 0.5)).clamp(0, 1), total.clamp(0, 1))
