"""Rows of numbers: columns shuffled, wide Gaussians. `Extrapolation` is the third."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from scalla.context.base import ValueContext, uniform
from scalla.types import InputError


@final
@dataclass(frozen=True, eq=False)
class ColumnShuffle(ValueContext):
    """Each column from a training input of its own: the columns keep their distributions and lose their dependence."""

    kinds = ("rows",)

    def _draw_values(self, num: int, rng: torch.Generator) -> Float[Tensor, "num ..."]:
        values = self.source.values.flatten(1)
        rows = torch.randint(len(values), (num, values.shape[1]), generator=rng)
        return values.gather(0, rows).view(num, *self.source.values.shape[1:]).to(self._wide)


@final
@dataclass(frozen=True, eq=False)
class WideGaussian(ValueContext):
    """N(μ, (w σ)²) in each column, μ and σ those of the training inputs, w ~ U(*widths) for each input."""

    kinds = ("rows",)
    widths: tuple[float, float] = field(default=(2.0, 4.0), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.widths[0] <= self.widths[1]:
            raise InputError(f"got widths={self.widths}; wanted (least, most) with 0 < least ≤ most")

    def _draw_values(self, num: int, rng: torch.Generator) -> Float[Tensor, "num ..."]:
        mean, std = self._moments
        width = uniform((num, *[1] * mean.ndim), *self.widths, rng, dtype=self._wide)
        return mean + width * std * torch.randn(num, *mean.shape, generator=rng, dtype=self._wide)

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        values = self.source.values.double()
        return values.mean(0).to(self._wide), values.std(0, correction=0).to(self._wide)
