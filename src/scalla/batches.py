"""Batches without end, of the training data and of each context, with a random state of their own.

The order of the data is a function of the seed: the global random state and any generator of the user's
loader are put back as they were, and a fit that stopped goes on at the very batch where it was.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from scalla.functional import batch_size, map_tensors
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
        self._random = RandomState(loader)
        self._next: Any = _NOTHING

    @property
    def num_batches(self) -> int | None:
        """Batches in an epoch, where the loader knows (that of an IterableDataset has a `__len__` that fails)."""
        try:
            return len(self.loader)  # type: ignore[arg-type]
        except TypeError:
            return None

    def peek(self) -> Any:
        """The batch that `next` will give, without going on."""
        if self._next is _NOTHING:
            batch = self._take()
            if batch is _END:
                if self.index == 0:
                    raise InputError(f"{self.name} is empty; wanted at least one batch")
                self.move_to(self.epoch + 1, 0)
                return self.peek()
            if batch_size(inputs_of(batch)) == 0:
                raise InputError(f"{self.name} yielded an empty batch; wanted at least one input in each")
            self._next = batch
        return self._next

    def next(self) -> Any:
        batch = self.peek()
        self._next = _NOTHING
        self.index += 1
        return batch

    def move_to(self, epoch: int, index: int) -> None:
        """Go to a place in the sequence, by going through that epoch's earlier batches again."""
        if (epoch, index) == (self.epoch, self.index):
            return
        self.epoch, self.index, self._iterator, self._next = epoch, 0, None, _NOTHING
        for _ in range(index):
            self.next()

    def one_epoch(self, *, skip: int = 0) -> Iterator[Any]:
        """The batches of the first epoch, once, from batch `skip` on."""
        self.move_to(0, 0)
        if skip == 0:
            self.peek()  # an empty loader is an error
        while True:
            batch, self._next = (self._take() if self._next is _NOTHING else self._next), _NOTHING
            if batch is _END:
                break
            self.index += 1
            if self.index > skip:
                yield batch
        self.move_to(1, 0)

    def _take(self) -> Any:
        if self._iterator is None:
            self._random.start(mix_seed(self._seed, self.epoch))
            with self._random.in_force(), self._shuffled_for_epoch():
                self._iterator = iter(self.loader)
                return next(self._iterator, _END)  # samplers draw the order of an epoch at its first batch
        with self._random.in_force():
            return next(self._iterator, _END)

    @contextlib.contextmanager
    def _shuffled_for_epoch(self) -> Iterator[None]:
        """Samplers of distributed training take the number of the epoch, and keep their own afterwards."""
        sampler = getattr(self.loader, "sampler", None)
        if not (callable(getattr(sampler, "set_epoch", None)) and hasattr(sampler, "epoch")):
            yield
            return
        assert sampler is not None
        theirs = sampler.epoch
        sampler.set_epoch(self.epoch)
        try:
            yield
        finally:
            sampler.set_epoch(theirs)


class RandomState:
    """The random numbers that a loader draws, apart from everybody else's.

    PyTorch's, NumPy's and Python's global generators, and any `torch.Generator` of the loader or its samplers.
    """

    def __init__(self, loader: Loader) -> None:
        batch_sampler = getattr(loader, "batch_sampler", None)
        owners = [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
        given = [g for o in owners if isinstance(g := getattr(o, "generator", None), torch.Generator)]
        self._generators = [torch.default_generator, *{id(g): g for g in given}.values()]
        self._ours: tuple[Any, ...] = ()

    def start(self, seed: int) -> None:
        states = [torch.Generator(g.device).manual_seed(seed).get_state() for g in self._generators]
        numpy_state = np.random.RandomState(seed & 0xFFFFFFFF).get_state()
        self._ours = (states, numpy_state, random.Random(seed).getstate())

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        theirs = self._get()
        self._set(self._ours)
        try:
            yield
        finally:
            self._ours = self._get()
            self._set(theirs)

    def _get(self) -> tuple[Any, ...]:
        return [g.get_state() for g in self._generators], np.random.get_state(), random.getstate()  # noqa: NPY002

    def _set(self, states: tuple[Any, ...]) -> None:
        for generator, state in zip(self._generators, states[0], strict=True):
            generator.set_state(state)
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])


def context_loaders(context: Any, *, context_batch_size: int) -> list[Loader]:
    """A loader for each context group: of a loader, a dataset, a tensor, or a list of such."""
    if context is None:
        return []
    if isinstance(context, list | tuple) and context and all(_is_source(c) for c in context):
        return [_as_loader(c, context_batch_size) for c in context]
    return [_as_loader(context, context_batch_size)]


def _is_source(item: Any) -> bool:
    """Whether an entry of a list is a context of its own, rather than the list being one loader of batches."""
    if isinstance(item, Tensor):
        return item.ndim > 1
    if isinstance(item, Mapping | tuple | list | str):
        return False
    return isinstance(item, Dataset) or hasattr(item, "__iter__")


def _as_loader(source: Any, size: int) -> Loader:
    if isinstance(source, Tensor | Mapping):
        source = _Rows(source)
    if isinstance(source, IterableDataset):
        return DataLoader(source, batch_size=size)
    if isinstance(source, Dataset):
        if len(source) == 0:  # type: ignore[arg-type]
            raise InputError("got an empty context; wanted at least one input")
        return DataLoader(source, batch_size=size, shuffle=True)
    return source


class _Rows(Dataset[Inputs]):
    """Inputs that lie in memory, one by one."""

    def __init__(self, inputs: Tensor | Mapping[str, Any]) -> None:
        self.inputs = inputs

    def __len__(self) -> int:
        return batch_size(self.inputs)

    def __getitem__(self, index: int) -> Inputs:
        return map_tensors(self.inputs, lambda t: t[index] if t.ndim else t)


class GroupedBatches:
    """Each step's inputs: a batch of the training data (group 0) and one of every context (1, 2, …)."""

    def __init__(self, train: EndlessBatches, contexts: Sequence[EndlessBatches]) -> None:
        self.sources = [train, *contexts]

    def next(self) -> list[Inputs]:
        batches = self.peek()
        for source in self.sources:
            source.next()
        return batches

    def peek(self) -> list[Inputs]:
        batches = [inputs_of(source.peek()) for source in self.sources]
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
        if not (isinstance(x, Tensor) and isinstance(train, Tensor)):
            continue
        if x.is_floating_point() != train.is_floating_point():
            raise InputError(
                f"got context inputs of type {x.dtype} beside training inputs of type {train.dtype}; wanted the same "
                "kind in the same scale: pixels from 0 to 255 are x.float() / 255 for a network trained on 0 to 1"
            )
        if x.shape[1:] != train.shape[1:]:
            raise InputError(
                f"got context inputs of shape {tuple(x.shape[1:])} beside training inputs of shape "
                f"{tuple(train.shape[1:])}; wanted the same shape: resize or crop the context"
            )


_END, _NOTHING = object(), object()
