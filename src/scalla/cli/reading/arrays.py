"""Arrays of inputs and labels: .npz, and pairs of IDX files."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from scalla.data.idx import read_idx
from scalla.types import FileFormatError, InputError

#: names that arrays of an .npz may have
INPUT_NAMES = ("x", "X", "inputs", "images", "data")
LABEL_NAMES = ("y", "Y", "labels", "targets", "target")


def read_npz(path: Path) -> tuple[Tensor, Tensor | None]:
    """Arrays x and, if there are any, y; nothing is unpickled."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            names = stored.files
            found = [next((n for n in wanted if n in names), None) for wanted in (INPUT_NAMES, LABEL_NAMES)]
            arrays = [None if name is None else stored[name] for name in found]
    except (ValueError, zipfile.BadZipFile, EOFError, OSError, AttributeError) as error:
        raise FileFormatError(f"{path} is no .npz of plain arrays: {error}") from error
    if arrays[0] is None:
        raise InputError(
            f"{path} holds {', '.join(names) or 'nothing'}; wanted inputs under one of {', '.join(INPUT_NAMES)}"
        )
    return _tensor(arrays[0], path), None if arrays[1] is None else _tensor(arrays[1], path)


def read_idx_files(path: Path, labels: Path | None) -> tuple[Tensor, Tensor | None]:
    """Images (N, height, width) with a channel axis, and labels: the file given, or the one that goes by the name."""
    values = torch.from_numpy(read_idx(path).copy())
    images = values[:, None] if values.ndim == 3 else values
    if labels is None:
        own = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1"))
        labels = own if own != path and own.is_file() else None
    return images, None if labels is None else torch.from_numpy(read_idx(labels, shape=(None,)).copy())


def _tensor(array: np.ndarray, path: Path) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise InputError(f"{path} holds an array of type {array.dtype}; wanted numbers")
    if array.ndim == 0:
        raise InputError(f"{path} holds a single number; wanted arrays of N inputs")
    if array.dtype.kind == "u" and array.dtype != np.uint8:
        array = array.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False)))
