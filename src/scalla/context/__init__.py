"""Context inputs made of nothing but the training inputs, for `ScaLLA.fit(context=...)`.

    default        what suits the kind of the inputs

    PatchShuffle   images: patches permuted            ColumnShuffle  rows: columns permuted
    StrongAugment  turned, zoomed, warped, erased      WideGaussian   a Gaussian wider than the data
    ImageMix       two images at once                  TokenShuffle   tokens in another order
    PhaseScramble  the same spectrum, other phases     TokenReplace   other tokens
    Textures       noise, gratings, blobs              Extrapolation  images and rows: beyond the segment of two
    Strokes        smooth random curves                FeatureExtrapolation  the same in the network's features

`a + b` is a mixture in equal shares; a list [a, b] makes a group of each.
"""

from scalla.context.augment import StrongAugment
from scalla.context.base import Context, ImageContext, Mixture, ValueContext
from scalla.context.choice import default
from scalla.context.extrapolate import Extrapolation, FeatureExtrapolation
from scalla.context.inputs import TrainingInputs, read_inputs
from scalla.context.mixing import ImageMix
from scalla.context.patches import PatchShuffle
from scalla.context.rows import ColumnShuffle, WideGaussian
from scalla.context.spectrum import PhaseScramble
from scalla.context.strokes import Strokes
from scalla.context.textures import Textures
from scalla.context.tokens import TokenContext, TokenReplace, TokenShuffle

__all__ = [
    "ColumnShuffle",
    "Context",
    "Extrapolation",
    "FeatureExtrapolation",
    "ImageContext",
    "ImageMix",
    "Mixture",
    "PatchShuffle",
    "PhaseScramble",
    "Strokes",
    "StrongAugment",
    "Textures",
    "TokenContext",
    "TokenReplace",
    "TokenShuffle",
    "TrainingInputs",
    "ValueContext",
    "WideGaussian",
    "default",
    "read_inputs",
]
