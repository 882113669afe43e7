"""The metrics that torchmetrics lacks, as its classes: update by batches, synchronise over processes.

Calibration error, accuracy and Brier score exist there already. Needs `pip install "scalla[metrics]"`.
A metric of one kind of input only (in-distribution or OOD) is an `InputError` when computed; where single
batches may hold one kind only, call `update` rather than the metric itself, which also computes the batch's.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from scalla.metrics.inputs import Array, as_float64
from scalla.metrics.ood import auroc, fpr95
from scalla.metrics.regression import crps_gaussian, interval_coverage
from scalla.types import InputError

try:
    from torchmetrics import Metric
    from torchmetrics.utilities import dim_zero_cat
except ImportError as error:
    raise ImportError(
        "scalla.metrics.torchmetrics needs the package torchmetrics, which is not installed: "
        'pip install "scalla[metrics]" (the functions in scalla.metrics work without it)'
    ) from error


class _OODMetric(Metric):
    """Keeps all scores: a rank statistic cannot be summed over batches."""

    is_differentiable = False
    full_state_update = False
    scores: list[Tensor]
    is_out: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("scores", default=[], dist_reduce_fx="cat")
        self.add_state("is_out", default=[], dist_reduce_fx="cat")

    def update(self, scores: Tensor, is_out: Tensor) -> None:
        """Scores (B,), larger = more OOD, and for each input 1 if it is OOD and 0 if it is not."""
        if scores.ndim != 1 or scores.shape != is_out.shape:
            raise InputError(
                f"got scores of shape {tuple(scores.shape)} and is_out of shape {tuple(is_out.shape)}; "
                "wanted (B,) and (B,)"
            )
        if not bool(((is_out == 0) | (is_out == 1)).all()):
            raise InputError("got is_out with values other than 0 and 1; wanted 1 for OOD and 0 for the rest")
        if scores.numel():
            as_float64("scores", scores)  # NaN is refused here, where the batch at fault is known
        self.scores.append(scores.detach())
        self.is_out.append(is_out.detach().bool())

    def _split(self) -> tuple[Tensor, Tensor]:
        # A state that was synchronised is a tensor already.
        if isinstance(self.scores, list) and not self.scores:
            raise InputError("got no scores yet: call update(scores, is_out) before compute()")
        scores, is_out = dim_zero_cat(self.scores), dim_zero_cat(self.is_out)
        if not bool(is_out.any()) or bool(is_out.all()):
            raise InputError(
                f"got {int((~is_out).sum())} in-distribution and {int(is_out.sum())} OOD scores; "
                "wanted at least one of each: update with both before compute()"
            )
        return scores[~is_out], scores[is_out]


class OODAUROC(_OODMetric):
    """`scalla.metrics.auroc` over all batches and processes."""

    higher_is_better = True
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def compute(self) -> Tensor:
        return torch.tensor(auroc(*self._split()), device=self.device)


class OODFPR95(_OODMetric):
    """`scalla.metrics.fpr95` over all batches and processes."""

    higher_is_better = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def compute(self) -> Tensor:
        return torch.tensor(fpr95(*self._split()), device=self.device)


class _MeanMetric(Metric):
    """A mean over outputs: a sum and a count."""

    is_differentiable = False
    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", default=torch.tensor(0), dist_reduce_fx="sum")

    @abstractmethod
    def _batch_mean(self, mean: Array, var: Array, y: Array) -> float:
        """The mean over one batch."""

    def update(self, mean: Tensor, var: Tensor, y: Tensor) -> None:
        """Predicted mean and variance (with observation noise) and the value observed, all of one shape."""
        self.total += self._batch_mean(mean, var, y) * y.numel()
        self.count += y.numel()

    def compute(self) -> Tensor:
        if not int(self.count):
            raise InputError("got no predictions yet: call update(mean, var, y) before compute()")
        return self.total / self.count


class GaussianCRPS(_MeanMetric):
    """`scalla.metrics.crps_gaussian` over all batches and processes."""

    higher_is_better = False
    plot_lower_bound = 0.0

    def _batch_mean(self, mean: Array, var: Array, y: Array) -> float:
        return crps_gaussian(mean, var, y)


class IntervalCoverage(_MeanMetric):
    """`scalla.metrics.interval_coverage` over all batches and processes."""

    higher_is_better = None  # the best coverage is the level itself
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def __init__(self, level: float = 0.95, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.level = level

    def _batch_mean(self, mean: Array, var: Array, y: Array) -> float:
        return interval_coverage(mean, var, y, self.level)
