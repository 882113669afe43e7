"""Small image data that come inside scikit-learn: 8x8 digits, and patches of its two photographs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from scalla.data.bundled import frozen_rng, sklearn_datasets
from scalla.data.images import ImageData
from scalla.types import InputError

NUM_TEST, NUM_VAL = 400, 200
PHOTOS = {"context": "china.jpg", "ood": "flower.jpg"}
#: a patch whose grey values (0 … 1) span less is sky or blur: stretched to [0, 1] it would be noise
LEAST_CONTRAST = 0.1


@dataclass(frozen=True, eq=False)
class Digits:
    """Scikit-learn's 1,797 handwritten digits of 8x8 pixels."""

    train: ImageData
    val: ImageData
    test: ImageData


def digits(*, seed: int = 0) -> Digits:
    """The digits as float32 (N, 1, 8, 8) in [0, 1], split at random into 1,197 / 200 / 400."""
    bunch = sklearn_datasets().load_digits()
    images = torch.from_numpy(bunch.images).float()[:, None] / 16
    labels = torch.from_numpy(bunch.target).long()
    order = torch.from_numpy(frozen_rng(seed).permutation(len(labels)))

    def part(split: str, chosen: Tensor) -> ImageData:
        return ImageData(images[chosen], labels[chosen], "digits", split)

    test, val, train = order[:NUM_TEST], order[NUM_TEST : NUM_TEST + NUM_VAL], order[NUM_TEST + NUM_VAL :]
    return Digits(part("train", train), part("val", val), part("test", test))


def photo_patches(which: str, num: int, seed: int = 0, size: int = 8) -> Float32[Tensor, "num 1 size size"]:
    """Grey patches of a photograph, stretched to [0, 1]: "context" from china.jpg, "ood" from flower.jpg.

    Places and scales (1, 2, 4 or 8 pixels to one, as far as the photograph goes) are drawn at random.
    """
    if which not in PHOTOS:
        raise InputError(f"got which={which!r}; wanted 'context' (china.jpg) or 'ood' (flower.jpg)")
    if num < 1:
        raise InputError(f"got num={num}; wanted at least 1 patch")
    levels = _pyramid(_grey_photo(PHOTOS[which]), size)
    rng = frozen_rng(seed)
    kept: list[Tensor] = []
    num_kept = 0
    while num_kept < num:
        patches = _draw(levels, num, size, rng)
        low, high = patches.amin((1, 2), keepdim=True), patches.amax((1, 2), keepdim=True)
        useful = (high - low)[:, 0, 0] >= LEAST_CONTRAST
        kept.append(((patches - low) / (high - low).clamp_min(LEAST_CONTRAST))[useful])
        num_kept += int(useful.sum())
    return torch.cat(kept)[:num, None].contiguous()


def _pyramid(photo: Float32[Tensor, "height width"], size: int) -> list[Tensor]:
    """The photograph at 1, 1/2, 1/4 and 1/8 of its resolution, while a patch is at most half of its side."""
    levels = [
        torch.nn.functional.avg_pool2d(photo[None, None], scale)[0, 0]
        for scale in (1, 2, 4, 8)
        if min(photo.shape) // scale >= 2 * size
    ]
    if size < 2 or not levels:
        raise InputError(f"got size={size}; wanted 2 to {min(photo.shape) // 2}")
    return levels


def _draw(levels: list[Tensor], num: int, size: int, rng: np.random.RandomState) -> Float32[Tensor, "num size size"]:
    level = rng.randint(len(levels), size=num)
    place = rng.random_sample((num, 2))
    patches = torch.empty(num, size, size)
    for i, photo in enumerate(levels):
        chosen = np.flatnonzero(level == i)
        windows = photo.unfold(0, size, 1).unfold(1, size, 1)  # a view: every place of a patch
        corner = (place[chosen] * windows.shape[:2]).astype(np.int64)
        patches[chosen] = windows[corner[:, 0], corner[:, 1]]
    return patches


def _grey_photo(file_name: str) -> Float32[Tensor, "height width"]:
    """A photograph of scikit-learn's in grey (ITU-R 601 luma), 0 … 1."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("photo_patches needs Pillow to read a photograph: pip install pillow") from error
    folder = Path(sklearn_datasets().__file__).parent / "images"
    with Image.open(folder / file_name) as image:
        rgb = np.array(image.convert("RGB"), dtype=np.float64)
    return torch.from_numpy(rgb @ [0.299, 0.587, 0.114] / 255).float().clamp(0, 1)
