"""A fit from start to end: check the data, train the surrogate, sum the precision; stopped and resumed anywhere."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset, default_collate
from tqdm.auto import tqdm

from scalla.batches import EndlessBatches, GroupedBatches, context_loaders, inputs_of, labels_of
from scalla.checkpoint import weights_digest
from scalla.device import check_autocast
from scalla.distributed import ALONE, Processes
from scalla.features import FeatureMap
from scalla.functional import batch_size, first_rows, tensors_of
from scalla.ggn import GGNSums, accumulate_ggn, check_inputs, empty_sums
from scalla.jvp import JacobianProduct
from scalla.likelihoods import check_labels
from scalla.probes import mix_seed, seeded_globally
from scalla.resume import FitCheckpoint, fit_identity
from scalla.surrogate import Trunk
from scalla.targets import directed_targets, gather_pool
from scalla.training import (
    HistoryEntry,
    TrainingSettings,
    TrainingState,
    estimate_target_scale,
    held_out_score,
    train_surrogate,
)
from scalla.types import InputError, Inputs, Likelihood, Loader
from scalla.wrapped import without_padding


@dataclass(frozen=True)
class FitData:
    """Training batches (group 0), context batches (1, 2, …) and held-out inputs of each."""

    train: EndlessBatches
    batches: GroupedBatches
    held_out: list[Inputs]

    @staticmethod
    def of(
        train_loader: Loader,
        context: Any,
        context_batch_size: int | None,
        bias: bool,
        val_loader: Loader | None,
        seed: int,
        processes: Processes = ALONE,
    ) -> FitData:
        train = EndlessBatches(train_loader, seed=mix_seed(seed, 101))
        batches = _grouped(train, context, context_batch_size, bias, seed, processes)
        held_out: list[Inputs] = []
        if val_loader is not None:
            validation = EndlessBatches(val_loader, seed=mix_seed(seed, 103), name="val_loader")
            sources = _grouped(validation, context, None, bias, mix_seed(seed, 104)).sources
            held_out = [first_rows(inputs_of(source.peek()), 256) for source in sources]
        return FitData(train, batches, held_out)

    def check(self, likelihood: Likelihood, features: FeatureMap) -> list[Inputs]:
        """The first batch of every source; data that lie in memory are checked whole, before the training."""
        blocks = self.batches.peek()
        for number, x in enumerate(blocks):
            check_inputs(x, "the first training batch" if number == 0 else f"context {number}")
        if (tensors := _whole_in_memory(self.train.loader)) is not None:
            x, y = tensors[:2]
            check_inputs(x, "train_loader")
            check_labels(likelihood, x.new_empty((len(x), features.num_outputs), dtype=torch.float32), y)
        return blocks

    def of_all(self, blocks: list[Inputs], processes: Processes) -> list[Inputs]:
        """The first batches as one process would have them, where each has a share: a fit begins with these."""
        shared = [processes.own_share(source.loader) for source in self.batches.sources]
        return [processes.first_rows_of_all(x, own=own) for x, own in zip(blocks, shared, strict=True)]


def _whole_in_memory(loader: Loader) -> tuple[Tensor, ...] | None:
    """Inputs and labels of a loader that yields every row of a TensorDataset as it lies there."""
    if not (isinstance(loader, DataLoader) and isinstance(loader.dataset, TensorDataset)):
        return None
    as_it_lies = isinstance(loader.sampler, SequentialSampler | RandomSampler) and loader.collate_fn is default_collate
    tensors = loader.dataset.tensors
    return tensors if as_it_lies and len(tensors) >= 2 else None


def _grouped(
    train: EndlessBatches,
    context: Any,
    context_batch_size: int | None,
    bias: bool,
    seed: int,
    processes: Processes = ALONE,
) -> GroupedBatches:
    if context_batch_size is not None and (not isinstance(context_batch_size, int) or context_batch_size < 1):
        raise InputError(f"got context_batch_size={context_batch_size!r}; wanted a whole number of at least 1")
    size = context_batch_size or batch_size(inputs_of(train.peek())) * processes.shares_of_a_batch(train.loader)
    loaders = context_loaders(context, context_batch_size=size)
    if bias and not loaders:
        raise InputError(
            "got bias=True without context; wanted inputs unlike the training data (a loader, dataset or tensor), "
            "against which the kernel is zeroed"
        )
    contexts = [EndlessBatches(loader, seed=mix_seed(seed, 102, i), name="context") for i, loader in enumerate(loaders)]
    return GroupedBatches(train, contexts)


def run_fit(
    features: FeatureMap,
    data: FitData,
    blocks: list[Inputs],
    settings: TrainingSettings,
    likelihood: Likelihood,
    *,
    identity: dict[str, Any],
    checkpoint_dir: str | os.PathLike[str] | None,
    checkpoint_every: float,
    resume: bool,
    progress_bar: bool,
    callback: Callable[[HistoryEntry], bool | None] | None,
    processes: Processes = ALONE,
) -> tuple[GGNSums, list[HistoryEntry]]:
    """Train `features.surrogate`, set `features.scale`, return the sums of the posterior and the history."""
    surrogate = features.surrogate
    assert surrogate is not None
    if settings.targets == "directed" and processes.count > 1:
        raise InputError(
            f"got targets='directed' in a fit of {processes.count} processes, which share out the products of a step; "
            "fit by targets='probes', or in one process with distributed=False"
        )
    check_autocast(settings.autocast, features.plain.dtype)
    trainable = features.trainable()
    if settings.num_steps and not trainable:
        raise InputError("the surrogate has no trainable weights; give num_steps=0 to use it as it is")
    optimizer = torch.optim.Adam(trainable or [torch.zeros(1, requires_grad=True)], lr=settings.lr)
    state, scale, partial = TrainingState(), 1.0, None
    checkpoint: FitCheckpoint | None = None
    own_share = processes.own_share(data.train.loader)
    if checkpoint_dir is not None or processes.count > 1:
        identity = fit_identity(
            settings,
            **identity,
            parameters=sorted(features.params),
            weights=weights_digest(features.plain.model),
            num_groups=len(blocks),
            trained=sorted(name for name, p in surrogate.named_parameters() if any(p is t for t in trainable)),
        )
        processes.check_same(
            {**identity, "shares": own_share, "checkpoint_dir": checkpoint_dir is not None, "resume": resume}
        )
    processes.same_tensors(surrogate)
    if checkpoint_dir is not None:
        checkpoint = FitCheckpoint(
            checkpoint_dir,
            identity=identity,
            every_seconds=checkpoint_every,
            processes=processes,
            shares=own_share,
            lengths=[source.num_batches for source in data.batches.sources],
        )
        if resume and (stored := checkpoint.read(surrogate, optimizer)) is not None:
            state, scale, partial = stored
    elif resume:
        raise InputError("got resume=True without checkpoint_dir; name the folder of the earlier fit")

    def due() -> bool:
        return checkpoint is not None and processes.any(checkpoint.due)

    def write(sums: GGNSums | None = None) -> None:
        assert checkpoint is not None
        checkpoint.write(surrogate, optimizer, state, scale, sums)

    def after_batch(sums: GGNSums) -> None:
        if processes.count > 1 and own_share:  # shares may differ in length: no place in the pass is common to all
            if checkpoint is not None and checkpoint.stop_requested:
                checkpoint.leave()
        elif due():
            write(processes.add_ggn(sums))

    def stops(entry: HistoryEntry) -> bool:
        with processes.together():
            stop = callback is not None and bool(callback(entry))
        return processes.any(stop)

    progress_bar = progress_bar and processes.rank == 0
    with checkpoint.signals() if checkpoint is not None else contextlib.nullcontext():
        if settings.num_steps and partial is None:
            pool = gather_pool(data.batches, settings.pool_size) if settings.targets == "directed" else None
            if state.position:
                data.batches.move_to(state.position)
            with processes.together():
                product = JacobianProduct(features.plain, features.params, blocks[0], autocast=settings.autocast)
                if state.step == 0:
                    scale = estimate_target_scale(blocks, product, settings)
            if state.step == 0:
                scale = processes.root_mean_square(scale)
            score = None
            if data.held_out:  # which is never judged in lower precision
                exact = JacobianProduct(features.plain, features.params, blocks[0]) if settings.autocast else product
                score = held_out_score(data.held_out, features, exact, settings, scale)
            directed = None
            if pool is not None:
                directed = directed_targets(
                    product, pool, features.num_features, bias=settings.bias, probe=settings.probe, seed=settings.seed
                )
            features_of: Callable[[Inputs], Tensor] = features.raw
            if directed is not None and isinstance(surrogate, Trunk):
                directed, features_of = directed.through(features.penultimate), surrogate
            features.set_training(True)
            train_surrogate(
                seeded(features_of, settings.seed, state),
                data.batches,
                product,
                settings,
                target_scale=scale,
                optimizer=optimizer,
                state=state,
                progress_bar=progress_bar,
                score=(lambda: processes.from_first(score())) if score is not None else None,
                callback=stops if callback is not None else None,
                checkpoint_due=due if checkpoint is not None else None,
                write_checkpoint=write,
                processes=processes,
                directed=directed,
                batch_sizes=[batch_size(x) for x in blocks],
            )
            processes.same_tensors(surrogate)
            if processes.count > 1 and own_share and checkpoint is not None:
                write()
        optimizer.zero_grad(set_to_none=True)
        features.set_training(False)
        features.scale = scale
        start = partial or empty_sums(likelihood, features.num_outputs, features.num_features, features.plain.device)
        sums = sum_ggn(
            features,
            data.train,
            likelihood,
            start=start,
            progress_bar=progress_bar,
            after_batch=after_batch,
            processes=processes,
        )
        if checkpoint is not None and processes.any(checkpoint.stop_requested):  # during the very last batch
            checkpoint.leave() if processes.count > 1 and own_share else write(sums)
    if checkpoint is not None:
        checkpoint.remove()
    return sums, state.history


def seeded(features_of: Callable[[Inputs], Tensor], seed: int, state: TrainingState) -> Callable[[Inputs], Tensor]:
    """`features_of` with random numbers (a surrogate's dropout) that are a function of seed and step alone."""

    def seeded_features(x: Inputs) -> Tensor:
        with seeded_globally(mix_seed(seed, 105, state.step), (t.device for t in tensors_of(x))):
            return features_of(x)

    return seeded_features


def sum_ggn(
    features: FeatureMap,
    data: EndlessBatches,
    likelihood: Likelihood,
    *,
    start: GGNSums | None = None,
    progress_bar: bool = False,
    after_batch: Callable[[GGNSums], None] | None = None,
    processes: Processes = ALONE,
) -> GGNSums:
    """Σ gᵀΛg over one epoch of `data`, from `start` on, and over all processes."""
    start = start or empty_sums(likelihood, features.num_outputs, features.num_features, features.plain.device)
    epoch = tqdm(
        data.one_epoch(skip=start.num_batches),
        total=data.num_batches,
        initial=start.num_batches,
        disable=not progress_bar,
        desc="precision",
        unit="batch",
    )
    dict_key_y = features.plain.dict_key_y
    if processes.count == 1:
        return accumulate_ggn(start, epoch, features, likelihood, dict_key_y=dict_key_y, after_batch=after_batch)
    if processes.rank > 0:  # what was summed before is the first process's to add
        start = replace(start, ggn=torch.zeros_like(start.ggn), loss=torch.zeros_like(start.loss), num_data=0)
    sums = start
    pairs: Iterator[tuple[Inputs, Any]] = ((inputs_of(b), labels_of(b, dict_key_y)) for b in epoch)
    with processes.together():
        if processes.own_share(data.loader):
            pairs = without_padding(pairs, data.loader)
            sums = accumulate_ggn(sums, pairs, features, likelihood, after_batch=after_batch)
        else:
            for x, y in pairs:
                share, num_rows = processes.rows(x, own=False)
                part = [(share, y[processes.slice(batch_size(x))])] if num_rows else []
                counted = sums.num_batches + 1
                sums = replace(accumulate_ggn(sums, part, features, likelihood), num_batches=counted)
                if after_batch is not None:
                    after_batch(sums)
    return processes.add_ggn(sums)
