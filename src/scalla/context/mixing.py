"""ImageMix: two training images at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from scalla.context.base import ImageContext, uniform


@final
@dataclass(frozen=True, eq=False)
class ImageMix(ImageContext):
    """Of two unlike training images a and b, with equal chances:

    mixup    λ a + (1 − λ) b, λ ~ U(0.3, 0.7)
    cut      a on one side of a random line near the middle, b on the other
    inlay    b inside a rectangle of 0.4 to 0.7 of each side, a outside
    overlay  max(a, b) or min(a, b), pixel by pixel
    """

    def _draw_values(self, num: int, rng: torch.Generator) -> Float[Tensor, "num channels height width"]:
        a = self._some(num, rng)
        b = self._others(a, rng)
        lighter = torch.rand(num, 1, 1, 1, generator=rng) < 0.5
        height, width = self._side
        made = torch.stack(
            [
                torch.lerp(b, a, uniform((num, 1, 1, 1), 0.3, 0.7, rng, dtype=self._wide)),
                torch.where(half_planes(num, height, width, rng), a, b),
                torch.where(rectangles(num, height, width, rng, sides=(0.4, 0.7)), b, a),
                torch.where(lighter, torch.maximum(a, b), torch.minimum(a, b)),
            ]
        )
        return made[torch.randint(len(made), (num,), generator=rng), torch.arange(num)]


def half_planes(num: int, height: int, width: int, rng: torch.Generator) -> Tensor:
    """(num, 1, height, width): true on one side of a line at most a fifth of the side away from the middle."""
    angle = uniform((num, 1, 1, 1), 0, 2 * math.pi, rng)
    offset = uniform((num, 1, 1, 1), -0.2, 0.2, rng)
    y, x = torch.linspace(-0.5, 0.5, height)[:, None], torch.linspace(-0.5, 0.5, width)
    return angle.sin() * y + angle.cos() * x > offset


def rectangles(num: int, height: int, width: int, rng: torch.Generator, *, sides: tuple[float, float]) -> Tensor:
    """(num, 1, height, width): true inside a rectangle whose sides are a share U(*sides) of the image's."""
    inside = torch.ones(num, 1, height, width, dtype=torch.bool)
    for dim, length in ((2, height), (3, width)):
        share = uniform((num, 1, 1, 1), *sides, rng)
        start = uniform((num, 1, 1, 1), 0, 1, rng) * (1 - share)
        shape = [1, 1, 1, 1]
        shape[dim] = length
        place = ((torch.arange(length) + 0.5) / length).view(shape)
        inside = inside & (place >= start) & (place < start + share)
    return inside
