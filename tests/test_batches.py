"""Batches without end: their order, the random states they leave alone, what may be given and what may not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from cases import Mappings, Stream, normal, words
from scalla.batches import (
    EndlessBatches,
    GroupedBatches,
    RandomState,
    check_same_shape,
    context_loaders,
    inputs_of,
    labels_of,
)
from scalla.types import InputError

DATA = TensorDataset(torch.arange(10.0)[:, None], torch.arange(10))


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=4, shuffle=True, **options)


def take(source: EndlessBatches, count: int) -> list[list[int]]:
    return [labels_of(source.next(), "labels").tolist() for _ in range(count)]


def order(loader: Any, count: int = 7, seed: int = 0) -> list[list[int]]:
    return take(EndlessBatches(loader, seed=seed), count)


# ---------------------------------------------------------------- order


def test_epoch_after_epoch_every_input_once() -> None:
    source = EndlessBatches(shuffled(), seed=0)
    epochs = [[i for batch in take(source, 3) for i in batch] for _ in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert (source.epoch, source.index) == (2, 3)


def test_the_order_is_a_function_of_the_seed_alone() -> None:
    first = order(shuffled())
    torch.manual_seed(99)
    torch.rand(5)
    assert order(shuffled()) == first
    assert order(shuffled(), seed=1) != first


def test_a_generator_of_the_loader_does_not_decide_the_order_and_is_left_as_it_was() -> None:
    found = []
    for state in (3, 4):
        generator = torch.Generator().manual_seed(state)
        before = generator.get_state()
        found.append(order(shuffled(generator=generator)))
        assert torch.equal(generator.get_state(), before)
    assert found[0] == found[1]


def test_generators_of_samplers_are_left_as_they_were() -> None:
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    samplers = [
        RandomSampler(DATA, generator=generator),
        WeightedRandomSampler(torch.ones(10), 10, generator=generator),
    ]
    for sampler in samplers:
        loader = DataLoader(DATA, batch_size=4, sampler=sampler)
        assert order(loader) == order(loader)
        assert torch.equal(generator.get_state(), before)
    nested = DataLoader(DATA, batch_sampler=torch.utils.data.BatchSampler(samplers[0], 4, False))
    assert order(nested) == order(nested)
    assert torch.equal(generator.get_state(), before)


class Noisy(Dataset[Tensor]):
    """Augments with all three global generators."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(torch.rand(())), np.random.rand(), random.random(), index])  # noqa: NPY002


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002


def test_augmentations_are_a_function_of_the_seed_and_all_global_generators_are_left_alone() -> None:
    loader = DataLoader(Noisy(), batch_size=2, shuffle=True)
    before = states()
    source = EndlessBatches(loader, seed=5)
    first = [source.next() for _ in range(7)]
    assert states() == before
    torch.rand(3), np.random.rand(3), random.random()  # noqa: NPY002
    again = EndlessBatches(loader, seed=5)
    for wanted in first:
        torch.rand(1)  # what others draw between two batches
        assert torch.equal(again.next(), wanted)
    other = EndlessBatches(loader, seed=6)
    assert not torch.equal(other.next(), first[0])


class Failing(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        torch.rand(3), np.random.rand(), random.random()  # noqa: NPY002
        raise OSError("a file is gone")


def test_an_error_of_the_loader_passes_through_and_leaves_the_generators_alone() -> None:
    before = states()
    with pytest.raises(OSError, match="a file is gone"):
        EndlessBatches(DataLoader(Failing(), batch_size=2, shuffle=True), seed=0).next()
    assert states() == before


def test_the_number_of_workers_does_not_change_the_order() -> None:
    generator = torch.Generator().manual_seed(3)
    before = states(), generator.get_state().tolist()
    with_worker = order(shuffled(num_workers=1, generator=generator))
    assert (states(), generator.get_state().tolist()) == before
    assert with_worker == order(shuffled(generator=generator))


def test_a_distributed_sampler_is_told_the_epoch_and_keeps_its_own() -> None:
    sampler = DistributedSampler(DATA, num_replicas=2, rank=0, seed=1)
    sampler.set_epoch(41)
    loader = DataLoader(DATA, batch_size=5, sampler=sampler)
    found = order(loader, 3)
    assert sampler.epoch == 41
    wanted = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        wanted.append(list(sampler))
    assert found == wanted


# ---------------------------------------------------------------- places


def test_peek_shows_the_next_batch_without_going_on() -> None:
    source = EndlessBatches(shuffled(), seed=0)
    assert source.peek() is source.peek()
    assert (source.epoch, source.index) == (0, 0)
    assert source.next() is not source.peek()
    assert take(EndlessBatches(shuffled(), seed=0), 1) == order(shuffled(), 1)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 6, 8])
@pytest.mark.parametrize("used", [0, 2, 5])
@pytest.mark.parametrize("loader", [shuffled(), DataLoader(Noisy(), batch_size=2, shuffle=True)])
def test_moving_to_a_place_goes_on_exactly_there(count: int, used: int, loader: DataLoader[Any]) -> None:
    reference = EndlessBatches(loader, seed=2)
    for _ in range(count):
        reference.next()
    place = reference.epoch, reference.index
    source = EndlessBatches(loader, seed=2)
    for _ in range(used):  # from wherever it is, and with a batch looked at
        source.next()
    source.peek()
    source.move_to(*place)
    assert (source.epoch, source.index) == place
    for _ in range(4):
        torch.testing.assert_close(source.next(), reference.next(), rtol=0, atol=0)


def test_one_epoch_is_the_first_whatever_went_before() -> None:
    wanted = order(shuffled(), 3)
    for used in (0, 1, 5):
        source = EndlessBatches(shuffled(), seed=0)
        take(source, used)
        source.peek()
        assert [labels_of(b, "labels").tolist() for b in source.one_epoch()] == wanted
        assert [labels_of(b, "labels").tolist() for b in source.one_epoch(skip=2)] == wanted[2:]
        assert list(source.one_epoch(skip=3)) == []


def test_grouped_batches_keep_the_place_of_every_source() -> None:
    def grouped() -> GroupedBatches:
        train = EndlessBatches(shuffled(), seed=0)
        context = EndlessBatches(DataLoader(TensorDataset(torch.arange(7.0)[:, None]), batch_size=3), seed=1)
        return GroupedBatches(train, [context])

    reference = grouped()
    for _ in range(5):
        reference.next()
    assert reference.position == [(1, 2), (1, 2)]
    moved = grouped()
    moved.move_to(reference.position)
    for _ in range(4):
        for left, right in zip(moved.next(), reference.next(), strict=True):
            assert torch.equal(left, right)
    assert [len(x) for x in moved.peek()] == [4, 3]


# ---------------------------------------------------------------- loaders of every kind


def test_lists_streams_and_mappings() -> None:
    pairs = [(torch.zeros(2, 1), torch.tensor([0, 1])), (torch.ones(1, 1), torch.tensor([2]))]
    assert order(pairs, 4) == [[0, 1], [2], [0, 1], [2]]
    stream = DataLoader(Stream(torch.arange(5.0)[:, None], torch.arange(5)), batch_size=2)
    assert order(stream, 4) == [[0, 1], [2, 3], [4], [0, 1]]
    mappings = EndlessBatches(DataLoader(Mappings(6), batch_size=4), seed=0)
    batch = mappings.next()
    assert inputs_of(batch) is batch
    assert labels_of(batch, "labels").tolist() == Mappings(6).columns["labels"][:4].tolist()


def test_a_loader_of_ones_own_class() -> None:
    class Own:
        def __iter__(self) -> Iterator[Any]:
            return iter([(torch.zeros(2, 1), torch.tensor([0, 1]))])

    assert order(Own(), 2) == [[0, 1], [0, 1]]


def test_inputs_and_labels_of_a_batch() -> None:
    x, y, w = torch.zeros(2, 1), torch.tensor([0, 1]), torch.ones(2)
    assert inputs_of(x) is x
    assert inputs_of((x, y, w)) is x  # weights or indices after the labels are not read
    assert labels_of([x, y, w], "labels") is y
    assert inputs_of(((x, w), y)) == (x, w)
    assert labels_of({"x": x, "target": y}, "target") is y


BAD_BATCHES: list[tuple[Any, str]] = [
    (np.zeros(3), "batch of type ndarray; wanted"),
    ("text", "batch of type str; wanted"),
    ((), "batch of type tuple; wanted"),
]


@pytest.mark.parametrize(("batch", "message"), BAD_BATCHES)
def test_a_batch_of_another_kind_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        inputs_of(batch)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.zeros(2), r"batch of type Tensor without labels; wanted \(x, y\) or a mapping"),
        ((torch.zeros(2),), "batch of type tuple without labels"),
        ({"x": 1, "y": 2}, r"keys \['x', 'y'\]; wanted labels under 'labels' \(set dict_key_y\)"),
    ],
)
def test_missing_labels_are_named(batch: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        labels_of(batch, "labels")


class Nothing(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(())


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (5, "train_loader of type int; wanted a DataLoader or a list of batches"),
        (DATA, "train_loader of type TensorDataset; wanted a DataLoader"),
        (iter([torch.zeros(2, 1)]), "train_loader is an iterator, which can be gone through once only"),
        ((torch.zeros(2, 1) for _ in range(3)), "is an iterator"),
        ([], "train_loader is empty; wanted at least one batch"),
        (DataLoader(Nothing(), batch_size=2), "train_loader is empty"),
        (DataLoader(DATA, batch_size=20, drop_last=True), "train_loader is empty"),
        ([(torch.zeros(0, 1), torch.zeros(0))], "train_loader yielded an empty batch; wanted at least one input"),
        ([("text", 0)], "without any tensor in them"),
    ],
)
def test_loaders_that_cannot_serve_are_refused(loader: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        EndlessBatches(loader, seed=0).peek()
    if loader == []:
        with pytest.raises(InputError, match=message):
            list(EndlessBatches(loader, seed=0).one_epoch())


def test_the_name_of_the_loader_is_in_the_message() -> None:
    with pytest.raises(InputError, match="val_loader is empty"):
        EndlessBatches([], seed=0, name="val_loader").peek()


# ---------------------------------------------------------------- contexts


def first_batches(context: Any, size: int = 3) -> list[Any]:
    return [
        inputs_of(EndlessBatches(loader, seed=0).peek()) for loader in context_loaders(context, context_batch_size=size)
    ]


def test_a_context_may_be_a_tensor_a_dataset_a_loader_a_mapping_or_batches() -> None:
    x = normal(8, 2)
    (found,) = first_batches(x)
    assert found.shape == (3, 2)
    assert all(any(torch.equal(row, r) for r in x) for row in found)
    assert first_batches(TensorDataset(x, torch.zeros(8)))[0].shape == (3, 2)
    assert first_batches(DataLoader(TensorDataset(x), batch_size=5))[0].shape == (5, 2)  # as the loader says
    assert first_batches(Stream(x, torch.zeros(8)))[0].tolist() == x[:3].tolist()
    assert {k: v.shape for k, v in first_batches(words(8))[0].items()} == {
        "input_ids": (3, 4),
        "attention_mask": (3, 4),
    }
    assert set(first_batches(Mappings(8))[0]) == {"input_ids", "attention_mask", "labels"}
    assert first_batches([(x[:4], None), (x[4:], None)])[0].shape == (4, 2)  # a list of batches is one loader
    assert first_batches([words(4), words(4)])[0]["input_ids"].shape == (4, 4)
    assert context_loaders(None, context_batch_size=3) == []


def test_tensors_and_datasets_are_shuffled_to_the_end() -> None:
    (loader,) = context_loaders(torch.arange(7.0)[:, None], context_batch_size=3)
    source = EndlessBatches(loader, seed=0)
    epoch = torch.cat([source.next() for _ in range(3)]).flatten().tolist()
    assert epoch != sorted(epoch)
    assert sorted(epoch) == [float(i) for i in range(7)]


class OwnLoader:
    def __iter__(self) -> Iterator[Any]:
        return iter([torch.full((2, 2), 4.0)])


def test_a_list_of_several_is_a_group_each() -> None:
    x = normal(8, 2)
    several = [x, TensorDataset(x + 1), DataLoader(TensorDataset(x + 2), batch_size=2), OwnLoader()]
    assert [len(b) for b in first_batches(several)] == [3, 3, 2, 2]
    assert [len(b) for b in first_batches((x, x + 1))] == [3, 3]


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (torch.zeros(0, 2), "empty context; wanted at least one input"),
        (TensorDataset(torch.zeros(0, 2)), "empty context"),
        ([normal(4, 2), torch.zeros(0, 2)], "empty context"),
        ([], "is empty"),
        (5, "of type int; wanted"),
        (iter([normal(4, 2)]), "is an iterator"),
    ],
)
def test_contexts_that_cannot_serve_are_refused(context: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        first_batches(context)


def test_context_inputs_must_be_like_the_training_inputs() -> None:
    x = normal(4, 1, 6, 6)
    check_same_shape(x, [normal(3, 1, 6, 6), normal(9, 1, 6, 6).double()])
    check_same_shape(words(4), [words(3)])
    with pytest.raises(InputError, match=r"shape \(1, 8, 8\) beside training inputs of shape \(1, 6, 6\).*resize"):
        check_same_shape(x, [x, normal(4, 1, 8, 8)])
    with pytest.raises(InputError, match=r"type dict beside training inputs of type Tensor; wanted the same kind"):
        check_same_shape(x, [words(3)])
    with pytest.raises(InputError, match=r"type torch.uint8 beside training inputs of type torch.float32"):
        check_same_shape(x, [torch.zeros(4, 1, 6, 6, dtype=torch.uint8)])


def test_a_loader_may_hold_the_global_generator_itself() -> None:
    before = torch.get_rng_state()
    assert order(shuffled(generator=torch.default_generator)) == order(shuffled(generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_random_state_of_ones_own_goes_on_where_it_was() -> None:
    state = RandomState([])
    state.start(3)
    with state.in_force():
        first = torch.rand(2), np.random.rand(2), random.random()  # noqa: NPY002
    torch.rand(9), np.random.rand(9), random.random()  # noqa: NPY002
    with state.in_force():
        second = torch.rand(2), np.random.rand(2), random.random()  # noqa: NPY002
    state.start(3)
    with state.in_force():
        both = torch.rand(4), np.random.rand(4), [random.random() for _ in range(2)]  # noqa: NPY002
    assert torch.equal(both[0], torch.cat([first[0], second[0]]))
    assert both[1].tolist() == [*first[1], *second[1]]
    assert both[2] == [first[2], second[2]]
