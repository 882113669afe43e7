"""StrongAugment: training images, changed too much to be one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from scalla.context.base import ImageContext, uniform
from scalla.context.fields import noise_fields
from scalla.context.mixing import rectangles

OPERATIONS = ("turn", "zoom", "warp", "recolour", "erase")


@final
@dataclass(frozen=True, eq=False)
class StrongAugment(ImageContext):
    """Training images under two to five of these operations (each with a chance of ½, at least two):

    turn      x(R p), by 45° to 315°
    zoom      x(p/z + c), z in (0.3, 0.6) or (1.6, 3), other in height than in width; c within what z leaves
    warp      x(p + d(p)), d a smooth random field of 0.1 to 0.25 of the side
    recolour  some channels inverted, above a threshold or altogether: x → low + high − x
    erase     a rectangle of 0.4 to 0.7 of each side in the colour of a background, or of its opposite
    """

    def _draw_values(self, num: int, rng: torch.Generator) -> Float[Tensor, "num channels height width"]:
        images = self._some(num, rng)
        turned, zoomed, warped, recoloured, erased = choose_at_least_two(num, len(OPERATIONS), rng).unbind(1)
        grid = self._grid(num, turned, zoomed, warped, rng).to(images.dtype)
        images = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
        images = torch.where(recoloured[:, None, None, None], self._inverted(images, rng), images)
        return torch.where(erased[:, None, None, None], self._erased(images, rng), images)

    def _grid(
        self, num: int, turned: Tensor, zoomed: Tensor, warped: Tensor, rng: torch.Generator
    ) -> Float[Tensor, "num height width 2"]:
        """Where each pixel is taken from, on [−1, 1]²."""
        height, width = self._side
        angle = turned * uniform((num,), math.pi / 4, 7 * math.pi / 4, rng)
        sin, cos = angle.sin(), angle.cos()
        turn = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
        zoom = torch.where(
            torch.rand(num, generator=rng) < 0.5, uniform((num,), 0.3, 0.6, rng), uniform((num,), 1.6, 3, rng)
        )
        stretch = uniform((num,), -0.3, 0.3, rng).exp()
        zooms = torch.where(zoomed[:, None], torch.stack([zoom * stretch, zoom / stretch], -1), torch.ones(num, 2))
        shift = uniform((num, 2), -1, 1, rng) * (1 - 1 / zooms).abs()
        identity = torch.eye(2, 3).expand(num, 2, 3)
        grid = F.affine_grid(identity, [num, 1, height, width], align_corners=False)
        grid = torch.einsum("nij,nhwj->nhwi", turn, grid / zooms[:, None, None] + shift[:, None, None])
        fields = noise_fields(torch.full((2 * num,), 3.0), height, width, rng).unflatten(0, (num, 2)).movedim(1, -1)
        # The side is 2 long here.
        return grid + fields * (warped * uniform((num,), 0.2, 0.5, rng))[:, None, None, None]

    def _inverted(self, images: Tensor, rng: torch.Generator) -> Float[Tensor, "num channels height width"]:
        low, high = self._range
        num, channels = images.shape[:2]
        chosen = torch.rand(num, channels, 1, 1, generator=rng) < 0.5
        chosen[torch.arange(num), torch.randint(channels, (num,), generator=rng)] = True
        threshold = uniform((num, 1, 1, 1), 0.2, 0.7, rng, dtype=images.dtype)
        whole = torch.rand(num, 1, 1, 1, generator=rng) < 0.5
        where = chosen & (whole | (images > low + threshold * (high - low)))
        return torch.where(where, low + high - images, images)

    def _erased(self, images: Tensor, rng: torch.Generator) -> Float[Tensor, "num channels height width"]:
        paper = self._paper(len(images), rng)
        colour = torch.where(
            torch.rand(len(images), 1, 1, 1, generator=rng) < 0.5, paper, self._ink(paper, rng, least=0.3)
        )
        return torch.where(rectangles(len(images), *self._side, rng, sides=(0.4, 0.7)), colour, images)


def choose_at_least_two(num: int, count: int, rng: torch.Generator) -> Bool[Tensor, "num count"]:
    """Each of `count` with a chance of ½, and two of them at random in any case."""
    rank = torch.rand(num, count, generator=rng).argsort(1).argsort(1)
    return (rank < 2) | (torch.rand(num, count, generator=rng) < 0.5)
