"""Probabilities against labels: reliability diagram, risk-coverage curve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from scalla import metrics
from scalla.metrics.inputs import Array, probs_and_labels
from scalla.plots.canvas import FAINT, axes_of, labelled, legend, line_style
from scalla.plots.series import described, named, partner_of
from scalla.predictive import Prediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: class probabilities (B, C), or a Prediction that has them
Probabilities: TypeAlias = Array | Prediction


def reliability(
    probs: Probabilities | Mapping[str, Probabilities],
    labels: Array,
    *,
    num_bins: int = 15,
    ax: Axes | None = None,
    title: str | None = None,
) -> Figure:
    """Accuracy against confidence in equal bins; on the diagonal a probability means what it says.

    The area of a dot is the share of the inputs in its bin. A mapping name → probabilities draws one line each.
    """
    figure, ax = axes_of(ax, width=4.2, height=4.2)
    ax.plot([0, 1], [0, 1], color=FAINT, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    for i, (name, given) in enumerate(named(probs, "probabilities").items()):
        bins = metrics.reliability(_probs(given), labels, num_bins)
        full = bins.count > 0
        x, y, share = (v[full].numpy() for v in (bins.confidence, bins.accuracy, bins.count / bins.count.sum()))
        style = line_style(i)
        ax.plot(x, y, label=described(name, f"ECE {bins.ece:.3f}"), **style | {"linewidth": 1.3}, zorder=2)
        ax.scatter(x, y, s=14 + 260 * share, color=style["color"], alpha=0.75, linewidths=0, zorder=3)
    ax.set_xlim(0, 1.02)
    ax.set_ylim(0, 1.02)
    ax.set_aspect("equal")
    labelled(ax, "confidence", "accuracy", title)
    legend(ax, loc="upper left")
    return figure


def risk_coverage(
    probs: Probabilities | Mapping[str, Probabilities],
    labels: Array,
    uncertainty: Array | Mapping[str, Array] | None = None,
    *,
    ax: Axes | None = None,
    title: str | None = None,
) -> Figure:
    """Error among the inputs kept when the most uncertain are left to somebody else.

    `uncertainty` is one number for each input, larger = less sure; by default 1 − the largest probability.
    """
    figure, ax = axes_of(ax)
    highest = 0.0
    for i, (name, given) in enumerate(named(probs, "probabilities").items()):
        values = _probs(given)
        own = partner_of(name, uncertainty, "uncertainty")
        if own is None:
            own = 1 - probs_and_labels(values, labels)[0].amax(1)
        curve = metrics.accuracy_rejection_curve(values, labels, own)
        coverage, risk = (1 - curve.rejected).numpy(), (1 - curve.accuracy).numpy()
        ax.plot(coverage, risk, label=described(name, f"area {float(risk.mean()):.4f}"), **line_style(i))
        highest = max(highest, float(risk.max()))
    ax.set_xlim(0, 1)
    ax.set_ylim(0, max(1.08 * highest, 1e-3))
    labelled(ax, "share of inputs kept", "error among them", title)
    legend(ax, loc="upper left")
    return figure


def _probs(given: Probabilities) -> Any:
    return given.probs if isinstance(given, Prediction) else given
