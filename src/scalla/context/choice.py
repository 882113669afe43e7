"""What suits the kind of the inputs."""

from __future__ import annotations

from typing import Any

from scalla.context.base import Mixture
from scalla.context.extrapolate import Extrapolation
from scalla.context.inputs import read_inputs
from scalla.context.mixing import ImageMix
from scalla.context.patches import PatchShuffle
from scalla.context.rows import ColumnShuffle, WideGaussian
from scalla.context.spectrum import PhaseScramble
from scalla.context.strokes import Strokes
from scalla.context.textures import Textures
from scalla.context.tokens import TokenReplace, TokenShuffle

#: the parts of the default; docs/context.md has the measurements behind that of images
DEFAULTS = {
    "images": (PatchShuffle, ImageMix, PhaseScramble, Textures, Strokes),
    "rows": (ColumnShuffle, WideGaussian, Extrapolation),
    "tokens": (TokenShuffle, TokenReplace),
}


def default(inputs: Any, *, seed: int = 0, size: int | None = None) -> Mixture:
    """A context for these training inputs, by their kind: images, rows of real numbers, or token ids.

    >>> import torch
    >>> from scalla import context
    >>> context.default(torch.rand(50, 1, 12, 12)).generate(7).shape
    torch.Size([7, 1, 12, 12])
    >>> context.default(torch.randint(20, (50, 9)))
    TokenShuffle(seed=0, size=None, keep=()) + TokenReplace(seed=0, size=None, keep=(), shares=(0.5, 1.0))
    """
    source = read_inputs(inputs)
    return Mixture(tuple(part(source, seed=seed) for part in DEFAULTS[source.kind]), seed=seed, size=size)
