"""Random smooth fields: noise whose amplitude falls as 1/fᵃ."""

from __future__ import annotations

import torch
from jaxtyping import Float32
from torch import Tensor


def noise_fields(
    exponents: Float32[Tensor, " num"], height: int, width: int, rng: torch.Generator
) -> Float32[Tensor, "num height width"]:
    """White noise with its spectrum times f^−a, a zero mean and a unit standard deviation over each field."""
    white = torch.randn(len(exponents), height, width, generator=rng)
    down, right = torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None]
    frequency = (down.square() + right.square()).sqrt()
    frequency[0, 0] = 1.0  # the mean goes in the next line but one
    spectrum = torch.fft.rfft2(white) * frequency.pow(-exponents[:, None, None])
    fields = torch.fft.irfft2(spectrum, s=(height, width))
    fields = fields - fields.mean((1, 2), keepdim=True)
    return fields / fields.square().mean((1, 2), keepdim=True).sqrt().clamp_min(1e-12)


def to_unit(fields: Float32[Tensor, "num height width"]) -> Float32[Tensor, "num height width"]:
    """Stretched to [0, 1], each by itself."""
    low = fields.amin((1, 2), keepdim=True)
    return (fields - low) / (fields.amax((1, 2), keepdim=True) - low).clamp_min(1e-12)


def blob_masks(num: int, height: int, width: int, rng: torch.Generator) -> Float32[Tensor, "num height width"]:
    """Smooth random silhouettes of 0 and 1 that cover a third to two thirds, their edges soft over a pixel or so."""
    fields = noise_fields(torch.full((num,), 3.0), height, width, rng)
    shares = 1 / 3 + torch.rand(num, generator=rng) / 3
    return cut(fields, shares, slope=2.0)


def cut(
    fields: Float32[Tensor, "num height width"], shares: Float32[Tensor, " num"], *, slope: float
) -> Float32[Tensor, "num height width"]:
    """½ + slope · (field − its quantile), clamped to [0, 1]: 1 over about the `shares` where it is largest, else 0."""
    values = fields.flatten(1).sort(1).values
    rows = ((1 - shares) * (values.shape[1] - 1)).long()
    levels = values.gather(1, rows[:, None])[..., None]
    return (0.5 + slope * (fields - levels)).clamp(0, 1)
