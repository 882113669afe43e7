"""Scores of in-distribution inputs against scores of out-of-distribution (OOD) inputs.

OOD is the positive class and a larger score means more OOD: `auroc(scores_in, scores_out)`. The curves are
counted from sorted scores, here and not by scikit-learn, which therefore stays out of the core's
dependencies (the tests compare with it). Infinite scores are ranked like any other number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from scalla.metrics.inputs import Array, as_float64
from scalla.types import InputError


def auroc(scores_in: Array, scores_out: Array) -> float:
    """P(score_out > score_in) + ½ P(score_out = score_in): the area under the ROC curve.

    >>> auroc([0.1, 0.2, 0.3], [0.3, 0.9])
    0.9166666666666666
    """
    inside, outside = _sorted_scores(scores_in, scores_out)
    below = torch.searchsorted(inside, outside, right=False)
    not_above = torch.searchsorted(inside, outside, right=True)
    return int((below + not_above).sum()) / (2 * len(inside) * len(outside))  # a ratio of integers: exact


def fpr95(scores_in: Array, scores_out: Array) -> float:
    """Share of in-distribution inputs flagged by the highest threshold that flags at least 95% of the OOD.

    >>> fpr95([0.1, 0.2, 0.3, 0.4], [0.35, 0.9])
    0.25
    """
    inside, outside = _sorted_scores(scores_in, scores_out)
    num_flagged = (19 * len(outside) + 19) // 20  # ⌈0.95 N⌉ in integers, for 0.95 is no binary number
    threshold = outside[-num_flagged]
    return int((inside >= threshold).sum()) / len(inside)


def aupr(scores_in: Array, scores_out: Array) -> float:
    """Area under the precision-recall curve as a sum of steps, Σ (R_n − R_{n−1}) P_n (average precision).

    Unlike the AUROC it depends on the share of OOD inputs: a random score gives that share.

    >>> round(aupr([0.1, 0.4], [0.35, 0.8]), 4)
    0.8333
    """
    _, false_pos, true_pos = _counts(scores_in, scores_out)
    false_pos, true_pos = false_pos.double(), true_pos.double()  # int64 / int64 would be float32
    gained = torch.diff(true_pos, prepend=true_pos.new_zeros(1))
    return float((gained * (true_pos / (true_pos + false_pos))).sum() / true_pos[-1])


@dataclass(frozen=True, eq=False)
class RocCurve:
    """Rates of false and of true alarms at every threshold that makes a difference, from (0, 0) to (1, 1)."""

    fpr: Float64[Tensor, " T"]
    tpr: Float64[Tensor, " T"]
    #: an input is flagged when its score ≥ the threshold; descending from +∞
    thresholds: Float64[Tensor, " T"]


def roc_curve(scores_in: Array, scores_out: Array) -> RocCurve:
    """The ROC curve with a point for every distinct score."""
    thresholds, false_pos, true_pos = _counts(scores_in, scores_out)
    zero = torch.zeros(1, dtype=torch.float64)
    return RocCurve(
        torch.cat([zero, false_pos / false_pos[-1].double()]),
        torch.cat([zero, true_pos / true_pos[-1].double()]),
        torch.cat([zero + torch.inf, thresholds]),
    )


def _counts(
    scores_in: Array, scores_out: Array
) -> tuple[Float64[Tensor, " T"], Int64[Tensor, " T"], Int64[Tensor, " T"]]:
    """Distinct scores in descending order, and how many of either kind are at or above each."""
    inside, outside = _sorted_scores(scores_in, scores_out)
    thresholds = torch.cat([inside, outside]).unique().flip(0)
    false_pos = len(inside) - torch.searchsorted(inside, thresholds)
    true_pos = len(outside) - torch.searchsorted(outside, thresholds)
    return thresholds, false_pos, true_pos


def _sorted_scores(scores_in: Array, scores_out: Array) -> tuple[Float64[Tensor, " N_in"], Float64[Tensor, " N_out"]]:
    sorted_scores = []
    for name, values in (("scores_in", scores_in), ("scores_out", scores_out)):
        scores = as_float64(name, values)
        if scores.ndim != 1:
            raise InputError(
                f"got {name} of shape {tuple(scores.shape)}; wanted one score for each input, (N,): "
                "for (N, 1) pass scores[:, 0]"
            )
        sorted_scores.append(scores.sort().values)
    return sorted_scores[0], sorted_scores[1]
