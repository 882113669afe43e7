"""A fit from start to end: check the data, train the surrogate, sum the precision; stopped and resumed anywhere."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

from scalla.batches import EndlessBatches, GroupedBatches, context_loaders, inputs_of
from scalla.checkpoint import weights_digest
from scalla.features import FeatureMap
from scalla.functional import batch_size, first_rows, tensors_of
from scalla.ggn import GGNSums, accumulate_ggn, check_inputs, empty_sums
from scalla.jvp import JacobianProduct
from scalla.likelihoods import check_labels
from scalla.probes import mix_seed
from scalla.resume import FitCheckpoint, fit_identity
from scalla.training import (
    HistoryEntry,
    TrainingSettings,
    TrainingState,
    estimate_target_scale,
    held_out_score,
    train_surrogate,
)
from scalla.types import InputError, Inputs, Likelihood, Loader


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
    ) -> FitData:
        train = EndlessBatches(train_loader, seed=mix_seed(seed, 101))
        batches = _grouped(train, context, context_batch_size, bias, seed)
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
        loader = self.train.loader
        dataset = loader.dataset if isinstance(loader, DataLoader) else None
        if isinstance(dataset, TensorDataset) and len(dataset.tensors) >= 2:
            x, y = dataset.tensors[:2]
            check_inputs(x, "train_loader")
            check_labels(likelihood, x.new_empty((len(x), features.num_outputs), dtype=torch.float32), y)
        return blocks


def _grouped(
    train: EndlessBatches, context: Any, context_batch_size: int | None, bias: bool, seed: int
) -> GroupedBatches:
    if context_batch_size is not None and (not isinstance(context_batch_size, int) or context_batch_size < 1):
        raise InputError(f"got context_batch_size={context_batch_size!r}; wanted a whole number of at least 1")
    size = context_batch_size or batch_size(inputs_of(train.peek()))
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
) -> tuple[GGNSums, list[HistoryEntry]]:
    """Train `features.surrogate`, set `features.scale`, return the sums of the posterior and the history."""
    surrogate = features.surrogate
    assert surrogate is not None
    trainable = features.trainable()
    if settings.num_steps and not trainable:
        raise InputError("the surrogate has no trainable weights; give num_steps=0 to use it as it is")
    optimizer = torch.optim.Adam(trainable or [torch.zeros(1, requires_grad=True)], lr=settings.lr)
    state, scale, partial = TrainingState(), 1.0, None
    checkpoint: FitCheckpoint | None = None
    if checkpoint_dir is not None:
        identity = fit_identity(
            settings,
            **identity,
            parameters=sorted(features.params),
            weights=weights_digest(features.plain.model),
            num_groups=len(blocks),
        )
        checkpoint = FitCheckpoint(checkpoint_dir, identity=identity, every_seconds=checkpoint_every)
        if resume and (stored := checkpoint.read(surrogate, optimizer)) is not None:
            state, scale, partial = stored
    elif resume:
        raise InputError("got resume=True without checkpoint_dir; name the folder of the earlier fit")

    def save(sums: GGNSums | None = None) -> None:
        if checkpoint is not None and checkpoint.due:
            checkpoint.write(surrogate, optimizer, state, scale, sums)

    with checkpoint.signals() if checkpoint is not None else contextlib.nullcontext():
        if settings.num_steps and partial is None:
            if state.position:
                data.batches.move_to(state.position)
            product = JacobianProduct(features.plain, features.params, blocks[0])
            if state.step == 0:
                scale = estimate_target_scale(blocks, product, settings)
            score = held_out_score(data.held_out, features.raw, product, settings, scale) if data.held_out else None
            features.set_training(True)
            train_surrogate(
                seeded(features.raw, settings.seed, state),
                data.batches,
                product,
                settings,
                target_scale=scale,
                optimizer=optimizer,
                state=state,
                progress_bar=progress_bar,
                score=score,
                callback=callback,
                checkpoint_due=(lambda: checkpoint.due) if checkpoint is not None else None,
                write_checkpoint=save,
            )
        optimizer.zero_grad(set_to_none=True)
        features.set_training(False)
        features.scale = scale
        start = partial or empty_sums(likelihood, features.num_outputs, features.num_features, features.plain.device)
        sums = sum_ggn(features, data.train, likelihood, start=start, progress_bar=progress_bar, after_batch=save)
    if checkpoint is not None:
        checkpoint.remove()
    return sums, state.history


def seeded(features_of: Callable[[Inputs], Tensor], seed: int, state: TrainingState) -> Callable[[Inputs], Tensor]:
    """`features_of` with random numbers (a surrogate's dropout) that are a function of seed and step alone."""

    def seeded_features(x: Inputs) -> Tensor:
        devices = {t.device for t in tensors_of(x) if t.device.type == "cuda"}
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(mix_seed(seed, 105, state.step))
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
) -> GGNSums:
    """Σ gᵀΛg over one epoch of `data`, from `start` on."""
    start = start or empty_sums(likelihood, features.num_outputs, features.num_features, features.plain.device)
    total = len(data.loader) if hasattr(data.loader, "__len__") else None  # type: ignore[arg-type]
    epoch = tqdm(
        data.one_epoch(skip=start.num_batches),
        total=total,
        initial=start.num_batches,
        disable=not progress_bar,
        desc="precision",
        unit="batch",
    )
    dict_key_y = features.plain.dict_key_y
    return accumulate_ggn(start, epoch, features, likelihood, dict_key_y=dict_key_y, after_batch=after_batch)
