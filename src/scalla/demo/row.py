"""What one method says of the digits and of the photograph, and how good that is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Bool, Int64
from torch import Tensor

from scalla.kernel_error import KernelError
from scalla.metrics import Reliability, RocCurve, accuracy, auroc, nll, reliability, roc_curve
from scalla.predictive import Prediction, ood_score

#: the two scores of the demo, larger = more out of distribution, as the page calls them
SCORES = {"predictive_entropy": "entropy of the probabilities", "gaussian_entropy": "entropy of the Gaussian"}
#: share of the digits that may set off the alarm
FALSE_ALARMS = 0.05


@dataclass(frozen=True, eq=False)
class Row:
    """One method on the test digits and on the patches of the unseen photograph."""

    name: str
    title: str
    digits: Prediction
    ood: Prediction
    labels: Int64[Tensor, " N"]
    #: of one core
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

    @cached_property
    def flagged(self) -> Bool[Tensor, " N"]:
        """The patches whose own score sets off an alarm that no more than FALSE_ALARMS of the digits set off."""
        curve = self.roc(self.own_score)
        return self.score(self.own_score)[1] >= curve.thresholds[curve.fpr <= FALSE_ALARMS].min()

    @property
    def share_flagged(self) -> float:
        return float(self.flagged.double().mean())

    def sure_of_patches(self, confidence: float = 0.9) -> float:
        """Share of the patches that are taken for some digit with more than this probability."""
        return float((self.ood.max_prob > confidence).double().mean())
