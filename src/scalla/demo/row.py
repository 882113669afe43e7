"""What one method says of the digits and of the photograph, and how good that is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Int64
from torch import Tensor

from scalla.kernel_error import KernelError
from scalla.metrics import Reliability, RocCurve, accuracy, auroc, nll, reliability, roc_curve
from scalla.predictive import Prediction, ood_score

#: the two scores of the demo, larger = more out of distribution, as the page calls them
SCORES = {"predictive_entropy": "entropy of the probabilities", "gaussian_entropy": "entropy of the Gaussian"}


@dataclass(frozen=True, eq=False)
class Row:
    """One method on the test digits and on the patches of the unseen photograph."""

    name: str
    title: str
    digits: Prediction
    ood: Prediction
    labels: Int64[Tensor, " N"]
    fit_seconds: float = 0.0
    prior_precision: float | None = None
    kernel_error: KernelError | None = None

    @cached_property
    def accuracy(self) -> float:
        return accuracy(self.digits.probs, self.labels)

    @cached_property
    def nll(self) -> float:
        return nll(self.digits.probs, self.labels)

    @cached_property
    def reliability(self) -> Reliability:
        return reliability(self.digits.probs, self.labels)

    @property
    def scores(self) -> tuple[str, ...]:
        """Those that the method has: MAP is no Gaussian."""
        return tuple(SCORES) if self.digits.factor.shape[-1] else ("predictive_entropy",)

    @property
    def own_score(self) -> str:
        """Of a Gaussian its entropy, otherwise that of the probabilities."""
        return self.scores[-1]

    def score(self, name: str) -> tuple[Tensor, Tensor]:
        """Of the digits and of the patches."""
        return ood_score(self.digits, name), ood_score(self.ood, name)

    def auroc(self, name: str) -> float | None:
        return auroc(*self.score(name)) if name in self.scores else None

    def roc(self, name: str) -> RocCurve:
        return roc_curve(*self.score(name))

    def caught(self, name: str, false_alarms: float = 0.05) -> float:
        """Share of the patches flagged by the lowest threshold that flags no more than this share of the digits."""
        curve = self.roc(name)
        return float(curve.tpr[curve.fpr <= false_alarms].max())

    def sure_of_patches(self, confidence: float = 0.9) -> float:
        """Share of the patches that are taken for some digit with more than this probability."""
        return float((self.ood.max_prob > confidence).double().mean())
