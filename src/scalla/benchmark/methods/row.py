"""A row of the table: which method, fitted how, with which settings, and why those."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from scalla.baselines.protocol import Detector, Method
from scalla.benchmark.batches import TensorBatches
from scalla.benchmark.shared_fits import SharedFits
from scalla.types import InputError

Settings: TypeAlias = Mapping[str, Any]
Fitted: TypeAlias = Any  # a Method or a Detector

#: trials of hyper-parameters that every method has in the `tuned` protocol; fewer where it has no more to tune
NUM_TRIALS = 6


@dataclass(frozen=True, eq=False)
class Problem:
    """What a method is given: the trained network and data. Never test data."""

    model: nn.Module
    train: tuple[Tensor, Tensor]
    context: Tensor | None
    seed: int
    likelihood: Literal["classification", "regression"] = "classification"
    #: held-out training data, where the protocol holds any out
    validation: tuple[Tensor, Tensor] | None = None
    #: inputs on which a kernel error may be watched while fitting; nothing is chosen by it
    watched: Tensor | None = None
    progress_bar: bool = False
    #: fits that rows have in common
    fits: SharedFits | None = None

    def loader(self, batch_size: int, *, shuffle: bool = False) -> TensorBatches:
        return TensorBatches(*self.train, batch_size, shuffle)


@dataclass(frozen=True)
class Row:
    """`fit` takes the problem and all settings; the rest are the settings, as differences from one another."""

    name: str
    title: str
    fit: Callable[[Problem, Settings], Method | Detector]
    kind: Literal["method", "control", "detector"] = "method"
    settings: Settings = field(default_factory=dict)
    quick: Settings = field(default_factory=dict)
    #: in the `paper` protocol
    variants: Mapping[str, Settings] = field(default_factory=lambda: {"": {}})
    #: in the `tuned` protocol: what is tried
    trials: Sequence[Settings] = ()
    #: cheaper settings for the trials, where a fit is long
    trial: Settings = field(default_factory=dict)
    #: settings that `reconfigure` can change on a fitted method
    after_fit: frozenset[str] = frozenset()
    reconfigure: Callable[[Fitted, Settings], None] | None = None
    #: in place of a choice by hand, where settings has "marglik": after the fit, timed as tuning
    marglik: Callable[[Fitted], object] | None = None
    #: settings made of the fitted method itself, recorded with the run (a tuned prior precision, say)
    found: Callable[[Fitted], dict[str, float]] | None = None
    #: logit samples behind the mean softmax
    num_samples: int = 2048
    #: how many seeds make a mean
    num_seeds: int = 3
    #: in the protocols where it says something
    protocols: tuple[str, ...] = ("paper", "tuned")
    #: where it differs from what was published, and why
    note: str = ""

    def __post_init__(self) -> None:
        assert len(self.trials) <= NUM_TRIALS, self.name

    def variants_in(self, protocol: str) -> Mapping[str, Settings]:
        return self.variants if protocol == "paper" else {"": {}}

    def settings_of(self, variant: str, protocol: str, *, quick: bool) -> dict[str, Any]:
        variants = self.variants_in(protocol)
        if variant not in variants:
            raise InputError(f"got variant {variant!r} of {self.name}; choose one of {', '.join(map(repr, variants))}")
        return {**self.settings, **variants[variant], **(self.quick if quick else {}), "num_samples": self.num_samples}


def seeded_fit(row: Row, problem: Problem, settings: Settings) -> Fitted:
    """Loaders that shuffle draw from the global state: the fit must be a function of the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(problem.seed)
        return row.fit(problem, settings)
