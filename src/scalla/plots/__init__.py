"""Pictures of what `scalla.metrics` and a fitted ScaLLA say, each a matplotlib Figure.

    reliability         confidence against accuracy        risk_coverage      error against the share kept
    roc                 false against true alarms          regression_band    mean and error bars along one input
    score_histograms    scores of one kind and the other   decision_map       classes and uncertainty in two dimensions
    kernel_error_curve  kernel error against steps

All take tensors, numpy arrays, lists or Predictions, and `ax=` to draw into axes of your own. Nothing is shown and
no state of pyplot is touched: `figure.savefig("x.png")`, or in a notebook `display(figure)`.
Needs matplotlib: `pip install "scalla[plots]"`.
"""

from scalla.plots.classification import reliability, risk_coverage
from scalla.plots.decision import decision_map
from scalla.plots.kernel import kernel_error_curve
from scalla.plots.ood import roc, score_histograms
from scalla.plots.regression import regression_band

__all__ = [
    "decision_map",
    "kernel_error_curve",
    "regression_band",
    "reliability",
    "risk_coverage",
    "roc",
    "score_histograms",
]
