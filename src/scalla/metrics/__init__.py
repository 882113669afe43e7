"""How good are probabilities, error bars and out-of-distribution scores?

Every function takes tensors, numpy arrays or lists, and returns a Python float or a small frozen dataclass.
What cannot be measured (one class missing, NaN, shapes that do not fit) is an `InputError`, never a 0.
Classes for `torchmetrics` are in `scalla.metrics.torchmetrics`, which needs that package.
"""

from scalla.metrics.classification import (
    RejectionCurve,
    Reliability,
    accuracy,
    accuracy_rejection_curve,
    brier,
    ece,
    nll,
    reliability,
)
from scalla.metrics.ood import RocCurve, aupr, auroc, fpr95, roc_curve
from scalla.metrics.regression import crps_gaussian, gaussian_nll, interval_coverage, rmse

__all__ = [
    "RejectionCurve",
    "Reliability",
    "RocCurve",
    "accuracy",
    "accuracy_rejection_curve",
    "aupr",
    "auroc",
    "brier",
    "crps_gaussian",
    "ece",
    "fpr95",
    "gaussian_nll",
    "interval_coverage",
    "nll",
    "reliability",
    "rmse",
    "roc_curve",
]
