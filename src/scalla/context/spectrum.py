"""PhaseScramble: the same amplitude spectrum, other phases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from scalla.context.base import ImageContext


@final
@dataclass(frozen=True, eq=False)
class PhaseScramble(ImageContext):
    """F⁻¹[ |F x| e^{i(arg F x + ψ)} ] of training images x, with ψ the phases of white noise.

    The autocorrelation, the mean and what the channels have in common stay (ψ is one for all channels); edges and
    shapes, which live in the phases, go. What leaves the range of the training images is clamped.
    """

    def _draw_values(self, num: int, rng: torch.Generator) -> Float[Tensor, "num channels height width"]:
        images = self._some(num, rng)
        noise = torch.randn(num, 1, *self._side, generator=rng, dtype=self._wide)
        turn = torch.sgn(torch.fft.rfft2(noise))  # e^{iψ}, with the symmetry of a real image's spectrum
        turn[..., 0, 0] = 1.0  # the mean stays
        return torch.fft.irfft2(torch.fft.rfft2(images) * turn, s=self._side)
