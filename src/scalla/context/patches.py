"""PatchShuffle: what is in the image, somewhere else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from scalla.context.base import ImageContext
from scalla.types import InputError


@final
@dataclass(frozen=True, eq=False)
class PatchShuffle(ImageContext):
    """Training images whose p × p patches are permuted, from a grid at a random offset (round the edges).

    Every pixel keeps its value, so that all statistics of single pixels are those of the training data, and those
    of neighbours nearly. `sizes`: the values of p, drawn with equal chances; by default 1/7, 1/4 and 1/2 of the
    shorter side.
    """

    sizes: tuple[int, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        shorter = min(self._side)
        if shorter < 2:
            raise InputError(f"got images of {self._side[0]}×{self._side[1]} pixels; wanted at least 2×2")
        if self.sizes is None:
            object.__setattr__(self, "sizes", tuple(sorted({max(1, shorter // parts) for parts in (7, 4, 2)})))
        assert self.sizes is not None
        if not self.sizes or min(self.sizes) < 1 or max(self.sizes) > shorter // 2:
            raise InputError(f"got sizes={self.sizes}; wanted patches of 1 to {shorter // 2} pixels in a row")

    def _draw_values(self, num: int, rng: torch.Generator) -> Float[Tensor, "num channels height width"]:
        assert self.sizes is not None
        images = self._some(num, rng)
        height, width = self._side
        down = (torch.arange(height) + torch.randint(height, (num, 1), generator=rng)) % height
        right = (torch.arange(width) + torch.randint(width, (num, 1), generator=rng)) % width
        which = torch.randint(len(self.sizes), (num,), generator=rng)
        rows = torch.arange(num)[:, None, None]
        shuffled = images.clone()
        for i, size in enumerate(self.sizes):
            chosen = (which == i).nonzero()[:, 0]
            if len(chosen):
                # Index arrays (n, H, 1) and (n, 1, W) pick a rolled image; the channels come last.
                place = rows[: len(chosen)], slice(None), down[chosen][:, :, None], right[chosen][:, None, :]
                shuffled_here = images[chosen]
                rolled = shuffled_here[place].movedim(-1, 1)
                shuffled_here[place] = permute_patches(rolled, size, rng).movedim(1, -1)
                shuffled[chosen] = shuffled_here
        return shuffled


def permute_patches(
    images: Float[Tensor, "num channels height width"], size: int, rng: torch.Generator
) -> Float[Tensor, "num channels height width"]:
    """Permute the size × size patches from the upper left corner on, never by the identity; what is left over stays."""
    num, channels, height, width = images.shape
    rows, columns = height // size, width // size
    order = torch.rand(num, rows * columns, generator=rng).argsort(1)
    same = (order == torch.arange(rows * columns)).all(1)
    order[same] = order[same].roll(1, 1)
    tiled = images[:, :, : rows * size, : columns * size]
    patches = tiled.reshape(num, channels, rows, size, columns, size).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    patches = patches[torch.arange(num)[:, None], order].unflatten(1, (rows, columns)).permute(0, 3, 1, 4, 2, 5)
    permuted = images.clone()
    permuted[:, :, : rows * size, : columns * size] = patches.reshape(tiled.shape)
    return permuted
