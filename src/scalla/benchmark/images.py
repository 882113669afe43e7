"""The images of the experiment: FashionMNIST in distribution, KMNIST and MNIST out of it, MNIST as context.

fit         FashionMNIST train; in the `tuned` protocol without its last tenth
validation  that last tenth: the only data on which a hyper-parameter is chosen
test        FashionMNIST test
context     MNIST test; in the `tuned` protocol without its last fifth, on which OOD choices are made
OOD         KMNIST test, the last 10,000 of MNIST's *training* images, which nothing else ever sees, and those of
            `out_sets`
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from scalla.benchmark.out_sets import NUM_IMAGES, more_out_sets
from scalla.data import ImageData, load

NUM_OOD_MNIST = 10_000
SPLITS = (
    ("FashionMNIST", "train"),
    ("FashionMNIST", "test"),
    ("KMNIST", "test"),
    ("MNIST", "test"),
    ("MNIST", "train"),
)


@dataclass(frozen=True)
class Sizes:
    """How many of each; None is all. `quick` takes a few."""

    train: int | None = None
    test: int | None = None
    context: int | None = None
    validation_share: float = 0.0
    context_held_out_share: float = 0.0


def sizes_of(protocol: str, *, quick: bool) -> Sizes:
    tuned = protocol == "tuned"
    shares = (0.1, 0.2) if tuned else (0.0, 0.0)
    return Sizes(2000, 200, 500, *shares) if quick else Sizes(None, None, None, *shares)


@dataclass(frozen=True, eq=False)
class Images:
    """Float images in [0, 1] (N, 1, 28, 28) and labels."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor] | None
    test: tuple[Tensor, Tensor]
    context: Tensor
    context_held_out: Tensor | None
    out: dict[str, Tensor]


def load_images(sizes: Sizes, root: Path | None = None, *, allow_subset: bool = False) -> Images:
    sets = {key: _load(*key, root, allow_subset) for key in SPLITS}
    x, y = _first(sets["FashionMNIST", "train"], sizes.train)
    num_held = round(len(x) * sizes.validation_share)
    num_fit = len(x) - num_held
    context = _first(sets["MNIST", "test"], sizes.context)[0]
    num_context = len(context) - round(len(context) * sizes.context_held_out_share)
    num_out = sizes.test or NUM_OOD_MNIST
    mnist = sets["MNIST", "train"].images[-num_out:]
    return Images(
        train=(x[:num_fit], y[:num_fit]),
        validation=(x[num_fit:], y[num_fit:]) if num_held else None,
        test=_first(sets["FashionMNIST", "test"], sizes.test),
        context=context[:num_context],
        context_held_out=context[num_context:] if num_context < len(context) else None,
        out={
            "KMNIST": _first(sets["KMNIST", "test"], sizes.test)[0],
            "MNIST": as_float(mnist),
            **more_out_sets(min(NUM_IMAGES, num_out)),
        },
    )


def checksums(root: Path | None = None, *, allow_subset: bool = False) -> dict[str, str]:
    """SHA-256 of the unpacked images and labels of each split, the same for every way of packing them."""
    found = {}
    for name, split in SPLITS:
        data = _load(name, split, root, allow_subset)
        found[f"{name}/{split}"] = digest(data.images, data.labels)
    return found


def digest(*tensors: Tensor) -> str:
    sha = hashlib.sha256()
    for t in tensors:
        sha.update(f"{tuple(t.shape)}{t.dtype}".encode())
        sha.update(t.contiguous().numpy().tobytes())
    return sha.hexdigest()


def as_float(images: Tensor) -> Tensor:
    return images.float().div_(255)


def as_bytes(images: Tensor) -> Tensor:
    return (images * 255).round().to(torch.uint8)


def _load(name: str, split: str, root: Path | None, allow_subset: bool) -> ImageData:
    return load(name, split, root, as_uint8=True, allow_subset=allow_subset)


def _first(data: ImageData, count: int | None) -> tuple[Tensor, Tensor]:
    return as_float(data.images[:count]), data.labels[:count]
