"""Probabilities against labels: accuracy, NLL, calibration, Brier score, rejection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from scalla.metrics.inputs import Array, as_float64, precision, probs_and_labels
from scalla.types import InputError


def accuracy(probs: Array, labels: Array) -> float:
    """Share of inputs whose most probable class is the label.

    >>> accuracy([[0.9, 0.1], [0.6, 0.4]], [0, 1])
    0.5
    """
    return float(_correct(*probs_and_labels(probs, labels)).mean())


def nll(probs: Array, labels: Array) -> float:
    """−mean log p(label), in nats.

    A probability of exactly 0 counts as the smallest normal number of its type (87.3 nats in float32,
    708.4 in float64), so that one underflow costs much and hides nothing else.

    >>> round(nll([[0.5, 0.5], [0.25, 0.75]], [0, 1]), 4)
    0.4904
    """
    checked, classes = probs_and_labels(probs, labels)
    floor = torch.finfo(torch.float64 if precision(probs) == torch.float64 else torch.float32).tiny
    return float(-_of_label(checked, classes).clamp_min(floor).log().mean())


def brier(probs: Array, labels: Array) -> float:
    """Mean over inputs of Σ_k (p_k − 1[k = label])², between 0 and 2, for two classes as for many.

    >>> round(brier([[0.9, 0.1], [0.6, 0.4]], [0, 1]), 4)
    0.37
    """
    checked, classes = probs_and_labels(probs, labels)
    one_hot = torch.nn.functional.one_hot(classes, checked.shape[1])
    return float((checked - one_hot).square().sum(1).mean())


@dataclass(frozen=True, eq=False)
class Reliability:
    """Confidence and accuracy in equal bins (lo, hi] of the largest probability; NaN where a bin is empty."""

    edges: Float64[Tensor, " num_edges"]
    confidence: Float64[Tensor, " num_bins"]
    accuracy: Float64[Tensor, " num_bins"]
    count: Int64[Tensor, " num_bins"]

    @property
    def gap(self) -> Float64[Tensor, " num_bins"]:
        """|accuracy − confidence|, 0 where a bin is empty."""
        return (self.accuracy - self.confidence).abs().nan_to_num(0.0)

    @property
    def ece(self) -> float:
        """Expected calibration error: the gaps, weighted by the counts."""
        return float((self.gap * self.count).sum() / self.count.sum())

    @property
    def mce(self) -> float:
        """Maximum calibration error: the largest gap."""
        return float(self.gap.max())


def reliability(probs: Array, labels: Array, num_bins: int = 15) -> Reliability:
    """The reliability diagram in numbers."""
    if num_bins < 1:
        raise InputError(f"got num_bins={num_bins}; wanted at least 1 (15 is customary)")
    checked, classes = probs_and_labels(probs, labels)
    # Edges rounded as the probabilities are: a float32 0.2 is in the bin that ends at 0.2.
    edges = (torch.arange(num_bins + 1, dtype=torch.float64) / num_bins).to(precision(probs)).double()
    confidence = checked.amax(1)
    index = (torch.bucketize(confidence, edges) - 1).clamp(0, num_bins - 1)  # edges[i] < c <= edges[i+1]
    count = torch.bincount(index, minlength=num_bins)
    return Reliability(
        edges,
        torch.bincount(index, confidence, minlength=num_bins) / count,
        torch.bincount(index, _correct(checked, classes), minlength=num_bins) / count,
        count,
    )


def ece(probs: Array, labels: Array, num_bins: int = 15) -> float:
    """Expected calibration error over equal bins (lo, hi] of the largest probability.

    >>> round(ece([[0.9, 0.1], [0.9, 0.1]], [0, 1]), 4)
    0.4
    """
    return reliability(probs, labels, num_bins).ece


@dataclass(frozen=True, eq=False)
class RejectionCurve:
    """Accuracy on the inputs kept when the most uncertain share is rejected: 0, 1/B, …, (B−1)/B."""

    rejected: Float64[Tensor, " B"]
    accuracy: Float64[Tensor, " B"]

    @property
    def area(self) -> float:
        """Mean accuracy over all shares rejected; a better uncertainty gives a larger one."""
        return float(self.accuracy.mean())


def accuracy_rejection_curve(probs: Array, labels: Array, uncertainty: Array) -> RejectionCurve:
    """Reject the most uncertain inputs first, and measure the accuracy of the others.

    Inputs of equal uncertainty are rejected in random order, in expectation: each counts as the mean of its
    ties, so the curve depends on nothing but the values.
    """
    checked, classes = probs_and_labels(probs, labels)
    scores = as_float64("uncertainty", uncertainty)
    if scores.shape != classes.shape:
        raise InputError(
            f"got uncertainty of shape {tuple(scores.shape)} for {len(classes)} inputs; "
            f"wanted ({len(classes)},): one number for each input, larger = less sure"
        )
    _, group, size = scores.unique(return_inverse=True, return_counts=True)  # groups in ascending order
    share_correct = torch.bincount(group, _correct(checked, classes)) / size
    kept_correct = share_correct.repeat_interleave(size).cumsum(0)
    num_kept = torch.arange(1, len(classes) + 1)
    return RejectionCurve(1 - num_kept.flip(0).double() / len(classes), (kept_correct / num_kept).flip(0))


def _of_label(probs: Tensor, labels: Tensor) -> Float64[Tensor, " B"]:
    return probs.gather(1, labels[:, None])[:, 0]


def _correct(probs: Tensor, labels: Tensor) -> Float64[Tensor, " B"]:
    """1 where the most probable class is the label; among equals the first class counts, as in numpy."""
    first_best = (probs == probs.amax(1, keepdim=True)).int().argmax(1)
    return (first_best == labels).double()
