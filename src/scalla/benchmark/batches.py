"""Batches of tensors in memory: slices and index_select, no collating one example at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TensorBatches:
    """(x, y) in batches, each time it is iterated over; shuffled by torch's global random state if asked for."""

    x: Tensor
    y: Tensor
    batch_size: int
    shuffle: bool = False

    def __len__(self) -> int:
        return -(-len(self.x) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if not self.shuffle:
            yield from zip(self.x.split(self.batch_size), self.y.split(self.batch_size), strict=True)
            return
        for rows in torch.randperm(len(self.x)).split(self.batch_size):
            yield self.x.index_select(0, rows), self.y.index_select(0, rows)
