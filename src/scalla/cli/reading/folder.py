"""A folder of images: a folder for each class, in the order of their names; without such, images without labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from scalla.cli.reading.data import Data, InputOptions
from scalla.types import FileFormatError, InputError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")


class ImageFiles(Dataset[Any]):
    """Images read when they are asked for, as float32 (channels, height, width) in 0 … 1, then normalised."""

    def __init__(self, paths: list[Path], labels: list[int] | None, options: InputOptions) -> None:
        self.paths, self.labels, self.options = paths, labels, options
        self.shape: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        x = self._read(self.paths[index])
        if self.shape is None:
            self.shape = tuple(x.shape)
        if tuple(x.shape) != self.shape:
            raise InputError(
                f"{self.paths[index]} is of shape {tuple(x.shape)}, images before it of {self.shape}; give --size "
                "HEIGHT,WIDTH to resize them all"
            )
        return (x,) if self.labels is None else (x, self.labels[index])

    def _read(self, path: Path) -> Tensor:
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(path) as file:
                image = file.convert("L" if self.options.grey else "RGB")
        except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
            raise FileFormatError(f"{path} cannot be read as an image: {error}") from error
        if self.options.size is not None:
            height, width = self.options.size
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(image)).float() / 255
        return self.options.normalised(pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous())


def read_folder(folder: Path, options: InputOptions, likelihood: str) -> Data:
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise InputError(f"to read images, {folder} needs Pillow: pip install pillow") from error
    classes = sorted(d.name for d in folder.iterdir() if d.is_dir() and not d.name.startswith("."))
    found = [(path, i) for i, name in enumerate(classes) for path in _images_below(folder / name)]
    if found and likelihood == "regression":
        raise InputError(f"{folder} holds a folder for each class, and a regression has no classes")
    if found:
        paths, labels = [p for p, _ in found], [i for _, i in found]
    else:
        paths, labels, classes = _images_below(folder), None, []
    if not paths:
        raise InputError(f"found no image below {folder}; wanted a folder for each class, with {', '.join(SUFFIXES)}")
    names = [str(path.relative_to(folder)) for path in paths]
    return Data(ImageFiles(paths, labels, options), labels is not None, names, tuple(classes))


def _images_below(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
