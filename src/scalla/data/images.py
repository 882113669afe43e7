"""FashionMNIST, MNIST and KMNIST as tensors, from wherever they are on this machine.

Looked for in this order, the first place that holds both files of the split wins:

1. `root`, laid out as torchvision does it: `root/NAME/raw/train-images-idx3-ubyte[.gz]`
2. the folder in the environment variable SCALLA_DATA, laid out the same
3. the system's package (Debian: dataset-fashion-mnist)
4. the cache: SCALLA_CACHE, else XDG_CACHE_HOME/scalla, else ~/.cache/scalla
5. a download into the cache, unless SCALLA_OFFLINE=1 or `download=False`
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor
from torch.utils.data import TensorDataset

from scalla.data.download import SOURCES, RemoteFile, download_file, file_digest
from scalla.data.idx import read_idx
from scalla.types import FileFormatError, InputError

Split: TypeAlias = Literal["train", "test"]

#: images in each split of each of the three sets
NUM_IMAGES: dict[str, int] = {"train": 60_000, "test": 10_000}
NUM_CLASSES = 10
IMAGE_SIZE = (28, 28)
SYSTEM_FOLDERS: dict[str, Path] = {"FashionMNIST": Path("/usr/share/datasets/fashion-mnist")}


@dataclass(frozen=True)
class SourceFile:
    """A file that was read, and its checksums as it lies on the disk (a re-compressed copy has its own)."""

    path: Path
    md5: str
    sha256: str


@dataclass(frozen=True, eq=False)
class ImageData:
    """Grey images, values in [0, 1] (or 0 … 255 as uint8), and their labels."""

    images: Float32[Tensor, "N 1 height width"] | UInt8[Tensor, "N 1 height width"]
    labels: Int64[Tensor, " N"]
    name: str
    split: str
    files: tuple[SourceFile, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def dataset(self) -> TensorDataset:
        """(image, label) pairs, for a DataLoader."""
        return TensorDataset(self.images, self.labels)


def load(
    name: str,
    split: str = "train",
    root: str | Path | None = None,
    *,
    as_uint8: bool = False,
    download: bool = True,
    allow_subset: bool = False,
    progress_bar: bool = True,
) -> ImageData:
    """One split of "FashionMNIST", "MNIST" or "KMNIST"; see the top of this file for where it is looked for.

    A file with fewer images than the official one is an error unless `allow_subset`.
    """
    if name not in SOURCES:
        raise InputError(f"got name={name!r}; wanted one of {', '.join(SOURCES)}")
    if split not in get_args(Split):
        raise InputError(f"got split={split!r}; wanted 'train' or 'test'")
    tried: list[str] = []
    for place, folder in _folders(name, root):
        pair = _find_pair(name, split, folder)
        if pair is not None:
            return _read(name, split, *pair, as_uint8=as_uint8, allow_subset=allow_subset)
        tried.append(_what_is_missing(name, split, place, folder))
    if os.environ.get("SCALLA_OFFLINE", "") not in ("", "0"):
        tried.append("download: switched off by SCALLA_OFFLINE")
    elif not download:
        tried.append("download: switched off by download=False")
    else:
        folder = cache_folder() / name / "raw"
        try:
            pair = _download_pair(name, split, folder, progress_bar)
        except InputError as error:
            tried.append(f"download: {error}")
        else:
            return _read(name, split, *pair, as_uint8=as_uint8, allow_subset=allow_subset)
    images, labels = (file.name for file in _files(name, split))
    raise InputError(
        f"the {split} split of {name} was not found:\n  - "
        + "\n  - ".join(tried)
        + f"\nTo provide it, put {images} and {labels} (with or without .gz) into <folder>/{name}/raw/ and "
        "set the environment variable SCALLA_DATA=<folder>, or pass root=<folder>."
    )


def cache_folder() -> Path:
    """Where downloads go."""
    if own := os.environ.get("SCALLA_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache").expanduser() / "scalla"


def _folders(name: str, root: str | Path | None) -> Iterator[tuple[str, Path]]:
    """Every folder that may hold the files, with the name that an error calls it by."""
    for place, given in (("root", root), ("SCALLA_DATA", os.environ.get("SCALLA_DATA") or None)):
        if given is None:
            continue
        base = Path(given).expanduser()
        if not base.is_dir():
            raise InputError(
                f"got {place}={str(given)!r}, which is not a folder; wanted the folder that holds {name}/raw/"
            )
        yield place, base / name / "raw"
        yield place, base / name
    if name in SYSTEM_FOLDERS:
        yield "system package", SYSTEM_FOLDERS[name]
    yield "cache", cache_folder() / name / "raw"


def _files(name: str, split: str) -> tuple[RemoteFile, RemoteFile]:
    return SOURCES[name].train if split == "train" else SOURCES[name].test


def _find(folder: Path, gz_name: str) -> Path | None:
    """The unpacked file if it is there, else the packed one."""
    candidates = (folder / gz_name.removesuffix(".gz"), folder / gz_name)
    return next((path for path in candidates if path.is_file()), None)


def _find_pair(name: str, split: str, folder: Path) -> tuple[Path, Path] | None:
    images, labels = (_find(folder, file.name) for file in _files(name, split))
    return (images, labels) if images and labels else None


def _what_is_missing(name: str, split: str, place: str, folder: Path) -> str:
    other = "test" if split == "train" else "train"
    if _find_pair(name, other, folder) is not None:
        return f"{place}: {folder} holds the {other} split of {name} only"
    missing = [file.name for file in _files(name, split) if _find(folder, file.name) is None]
    return f"{place}: {folder} has no {' and no '.join(missing)}"


def _download_pair(name: str, split: str, folder: Path, progress_bar: bool) -> tuple[Path, Path]:
    paths = [
        _find(folder, file.name)
        or download_file(f"{SOURCES[name].url}/{file.name}", folder / file.name, file.md5, progress_bar=progress_bar)
        for file in _files(name, split)
    ]
    return paths[0], paths[1]


def _read(
    name: str, split: str, images_path: Path, labels_path: Path, *, as_uint8: bool, allow_subset: bool
) -> ImageData:
    most = NUM_IMAGES[split]
    images = torch.from_numpy(read_idx(images_path, shape=(None, *IMAGE_SIZE), max_bytes=most * math.prod(IMAGE_SIZE)))
    labels = torch.from_numpy(read_idx(labels_path, shape=(None,), max_bytes=most))
    for path, values in ((images_path, images), (labels_path, labels)):
        if values.dtype != torch.uint8:
            raise FileFormatError(
                f"{path}: got values of type {values.dtype}, wanted unsigned bytes (type 08 of IDX): "
                f"this is no file of {name}"
            )
    if len(images) != len(labels):
        raise FileFormatError(
            f"got {len(images)} images in {images_path} and {len(labels)} labels in {labels_path}; "
            "wanted as many labels as images: the two are not of one set"
        )
    if len(images) != most and not (allow_subset and 0 < len(images) < most):
        raise FileFormatError(
            f"{images_path}: got {len(images)} images, wanted the {most} of the {split} split of {name}: "
            "fetch the whole file, or pass allow_subset=True if a part of it is what you mean"
        )
    if int(labels.max()) >= NUM_CLASSES:
        raise FileFormatError(
            f"{labels_path}: got label {int(labels.max())}, wanted 0 to {NUM_CLASSES - 1}: no file of {name}"
        )
    images = images[:, None]
    return ImageData(
        images if as_uint8 else images.float().div_(255),
        labels.long(),
        name,
        split,
        tuple(SourceFile(p, file_digest(p, "md5"), file_digest(p, "sha256")) for p in (images_path, labels_path)),
    )
