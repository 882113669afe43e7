"""What every kind of source is read into, and how its inputs become those of the network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from scalla.types import InputError


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """What is done with images before the network sees them, and which columns of a CSV are what."""

    #: height and width that images of a folder are resized to
    size: tuple[int, int] | None = None
    grey: bool = False
    #: (x − mean) / std, one number or one for each channel
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    #: of a CSV: the columns to predict, and those to predict from (the others where none are given)
    targets: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.size is not None and min(self.size) < 1:
            raise InputError(f"got the size {self.size}; wanted at least 1 x 1")
        if not all(0 < s < math.inf for s in self.std) or not all(map(math.isfinite, self.mean)):
            raise InputError(f"got mean {self.mean} and std {self.std}; wanted finite numbers, std positive")

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> InputOptions:
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}
        return InputOptions(**values)

    def normalised(self, x: Tensor) -> Tensor:
        """Inputs (N, channels, …) or one (channels, height, width), in the scale of the network."""
        if self.mean == (0.0,) and self.std == (1.0,):
            return x
        channels = x.shape[-3] if x.ndim >= 3 else 1
        moments = []
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, channels):
                raise InputError(f"got {len(values)} numbers as {name} for inputs of {channels} channels")
            moments.append(torch.tensor(values, dtype=x.dtype)[:, None, None] if x.ndim >= 3 else values[0])
        return (x - moments[0]) / moments[1]


@dataclass(frozen=True, eq=False)
class Data:
    """Inputs, with labels or without: the dataset holds (x, y) or (x,)."""

    dataset: Dataset[Any]
    labelled: bool
    #: of each input, where they have any: paths below the folder
    names: Sequence[str] = ()
    #: of the folders; () where labels are numbers
    classes: tuple[str, ...] = ()
    #: of a CSV: the columns of the inputs
    columns: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def loader(self, batch_size: int, *, shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(self.dataset, batch_size, shuffle=shuffle)

    def first_input(self) -> Tensor:
        return self.dataset[0][0]


def in_memory(
    x: Tensor, y: Tensor | None, options: InputOptions, *, source: object, columns: tuple[str, ...] = ()
) -> Data:
    """Arrays as data; bytes are pixels, 0 … 255 → 0 … 1."""
    if len(x) == 0:
        raise InputError(f"{source} holds no inputs; wanted at least one")
    if y is not None and len(x) != len(y):
        raise InputError(f"{source} holds {len(x)} inputs and {len(y)} labels; wanted as many of each")
    x = x.float() / 255 if x.dtype == torch.uint8 else x.float() if x.is_floating_point() else x
    x = options.normalised(x) if x.is_floating_point() else x
    return Data(TensorDataset(x) if y is None else TensorDataset(x, y), y is not None, columns=columns)


def as_labels(y: Tensor, likelihood: str, source: object) -> Tensor:
    """Class indices as int64; targets of a regression as float32 (N, C)."""
    if likelihood == "regression":
        return (y[:, None] if y.ndim == 1 else y).float()
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or not bool((y == y.round()).all()):
        raise InputError(
            f"{source}: got labels of shape {tuple(y.shape)} and type {y.dtype}; wanted one class index, 0, 1, …, for "
            "each input (for numbers to predict give --likelihood regression)"
        )
    return y.long()
