"""Arrays of inputs and labels: .npz, and pairs of IDX files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from scalla.data.idx import read_idx
from scalla.data.npz import read_npz
from scalla.types import InputError

#: names that arrays of an .npz may have
INPUT_NAMES = ("x", "X", "inputs", "images", "data")
LABEL_NAMES = ("y", "Y", "labels", "targets", "target")


def read_arrays(path: Path) -> tuple[Tensor, Tensor | None]:
    """Arrays x and, if there are any, y of an .npz; nothing is unpickled."""
    stored = read_npz(path, names=(*INPUT_NAMES, *LABEL_NAMES))
    x, y = (next((stored[n] for n in names if n in stored), None) for names in (INPUT_NAMES, LABEL_NAMES))
    if x is None:
        raise InputError(f"{path} holds {', '.join(stored)}; wanted inputs under one of {', '.join(INPUT_NAMES)}")
    return _tensor(x, path), None if y is None else _tensor(y, path)


def read_idx_files(path: Path, labels: Path | None) -> tuple[Tensor, Tensor | None]:
    """Images (N, height, width) with a channel axis, and labels: the file given, or the one that goes by the name."""
    values = torch.from_numpy(read_idx(path).copy())
    images = values[:, None] if values.ndim == 3 else values
    if labels is None:
        own = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1"))
        labels = own if own != path and own.is_file() else None
    return images, None if labels is None else torch.from_numpy(read_idx(labels, shape=(None,)).copy())


def _tensor(array: np.ndarray, path: Path) -> Tensor:
    if array.ndim == 0:
        raise InputError(f"{path} holds a single number; wanted arrays of N inputs")
    if array.dtype.kind == "u" and array.dtype != np.uint8:
        array = array.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(array))
