"""Batches without end, of the training data and of each context, with a random state of their own.

The order of the data is a function of the seed: the global random state and any generator of the user's
loader are put back as they were, and a fit that stopped goes on at the very batch where it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from scalla.functional import batch_size
from scalla.probes import mix_seed
from scalla.types import InputError, Inputs, Loader


def inputs_of(batch: Any) -> Inputs:
    """x of a batch (x, y, …), of a mapping, or of a bare tensor."""
    if isinstance(batch, Tensor | Mapping):
        return batch
    if isinstance(batch, tuple | list) and batch:
        return batch[0]
    raise InputError(f"got a batch of type {type(batch).__name__}; wanted (x, y), a mapping or a tensor")


def labels_of(batch: Any, dict_key_y: str) -> Any:
    """y of a batch (x, y, …) or of a mapping."""
    if isinstance(batch, Mapping):
        if dict_key_y not in batch:
            raise InputError(
                f"got a batch with keys {sorted(map(str, batch))}; wanted labels under {dict_key_y!r} (set dict_key_y)"
            )
        return batch[dict_key_y]
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        return batch[1]
    raise InputError(f"got a batch of type {type(batch).__name__} without labels; wanted (x, y) or a mapping")


class EndlessBatches:
    """Batch after batch of a loader, epoch after epoch; (epoch, index) says where it is."""

    def __init__(self, loader: Loader, *, seed: int, name: str = "train_loader") -> None:
        if not hasattr(loader, "__iter__"):
            raise InputError(f"got {name} of type {type(loader).__name__}; wanted a DataLoader or a list of batches")
        if isinstance(loader, Iterator):
            raise InputError(
                f"{name} is an iterator, which can be gone through once only; give a DataLoader or a list of batches"
            )
        self.loader, self.name, self._seed = loader, name, seed
        self.epoch, self.index = 0, 0
        self._iterator: Iterator[Any] | None = None
        self._states: list[Tensor] = []

    def next(self) -> Any:
        if self._iterator is None:
            self._open()
        assert self._iterator is not None
        with self._own_random_state():
            batch = next(self._iterator, _END)
        if batch is _END:
            if self.index == 0:
                raise InputError(f"{self.name} is empty; wanted at least one batch")
            self.epoch, self.index, self._iterator = self.epoch + 1, 0, None
            return self.next()
        self.index += 1
        return batch

    def move_to(self, epoch: int, index: int) -> None:
        """Go to a place in the sequence, by going through that epoch's earlier batches again."""
        self.epoch, self.index, self._iterator = epoch, 0, None
        for _ in range(index):
            self.next()

    def one_epoch(self, *, skip: int = 0) -> Iterator[Any]:
        """The batches of the first epoch, once, from batch `skip` on."""
        self.move_to(0, skip)
        while True:
            batch = self.next()
            if self.epoch > 0:
                return
            yield batch

    def _open(self) -> None:
        seed = mix_seed(self._seed, self.epoch)
        self._states = [torch.Generator().manual_seed(seed).get_state() for _ in range(1 + len(self._generators()))]
        with self._own_random_state():
            self._iterator = iter(self.loader)

    def _generators(self) -> list[torch.Generator]:
        """Generators that the user gave to the loader or its samplers."""
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        owners = [
            self.loader,
            getattr(self.loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
        ]
        found = [g for o in owners if isinstance(g := getattr(o, "generator", None), torch.Generator)]
        return list({id(g): g for g in found}.values())

    @contextlib.contextmanager
    def _own_random_state(self) -> Iterator[None]:
        generators = [torch.default_generator, *self._generators()]
        theirs = [g.get_state() for g in generators]
        for generator, state in zip(generators, self._states, strict=True):
            generator.set_state(state)
        try:
            yield
        finally:
            self._states = [g.get_state() for g in generators]
            for generator, state in zip(generators, theirs, strict=True):
                generator.set_state(state)


def context_loaders(context: Any, *, context_batch_size: int) -> list[Loader]:
    """A loader for each context group: of a loader, a dataset, a tensor, or a list of such."""
    if context is None:
        return []
    if isinstance(context, list | tuple) and context and all(_is_source(c) for c in context):
        return [_as_loader(c, context_batch_size) for c in context]
    return [_as_loader(context, context_batch_size)]


def _is_source(item: Any) -> bool:
    return isinstance(item, Dataset | DataLoader) or (isinstance(item, Tensor) and item.ndim > 1)


def _as_loader(source: Any, size: int) -> Loader:
    if isinstance(source, Tensor):
        if len(source) == 0:
            raise InputError("got an empty context tensor; wanted at least one input")
        source = _Rows(source)
    if isinstance(source, IterableDataset):
        return DataLoader(source, batch_size=size)
    if isinstance(source, Dataset):
        if len(source) == 0:  # type: ignore[arg-type]
            raise InputError("got an empty context dataset; wanted at least one input")
        return DataLoader(source, batch_size=size, shuffle=True)
    return source


class _Rows(Dataset[Tensor]):
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        return list(self.rows[torch.as_tensor(indices)])


class GroupedBatches:
    """Each step's inputs: a batch of the training data (group 0) and one of every context (1, 2, …)."""

    def __init__(self, train: EndlessBatches, contexts: Sequence[EndlessBatches]) -> None:
        self.sources = [train, *contexts]

    def next(self) -> list[Inputs]:
        batches = [inputs_of(source.next()) for source in self.sources]
        for source, x in zip(self.sources, batches, strict=True):
            if batch_size(x) == 0:
                raise InputError(f"{source.name} yielded an empty batch; wanted at least one input in each")
        check_same_shape(batches[0], batches[1:])
        return batches

    @property
    def position(self) -> list[tuple[int, int]]:
        return [(s.epoch, s.index) for s in self.sources]

    def move_to(self, position: Sequence[Sequence[int]]) -> None:
        for source, (epoch, index) in zip(self.sources, position, strict=True):
            source.move_to(epoch, index)


def check_same_shape(train: Inputs, contexts: Sequence[Inputs]) -> None:
    for x in contexts:
        if type(x) is not type(train) and not (isinstance(x, Mapping) and isinstance(train, Mapping)):
            raise InputError(
                f"got context inputs of type {type(x).__name__} beside training inputs of type {type(train).__name__}; "
                "wanted the same kind"
            )
        if isinstance(x, Tensor) and isinstance(train, Tensor) and x.shape[1:] != train.shape[1:]:
            raise InputError(
                f"got context inputs of shape {tuple(x.shape[1:])} beside training inputs of shape "
                f"{tuple(train.shape[1:])}; wanted the same shape: resize or crop the context"
            )


_END = object()
