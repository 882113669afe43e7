"""Scores of in-distribution inputs against scores of others: ROC curves, histograms. A larger score is more OOD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from scalla import metrics
from scalla.metrics.inputs import Array, as_finite
from scalla.plots.canvas import FAINT, axes_of, labelled, legend, line_style
from scalla.plots.series import described, named, partner_of
from scalla.predictive import Prediction, ood_score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: scores (B,), or a Prediction, whose score is taken
Scores: TypeAlias = Array | Prediction


def roc(
    scores_in: Scores | Mapping[str, Scores],
    scores_out: Scores | Mapping[str, Scores],
    *,
    score: str = "gaussian_entropy",
    ax: Axes | None = None,
    title: str | None = None,
) -> Figure:
    """Share of OOD inputs flagged against share of in-distribution inputs flagged, at every threshold.

    A line for each entry of a mapping `scores_out`: several methods where `scores_in` is a mapping with the same
    names, several OOD sets where it is not. `score` is what is read from a Prediction.
    """
    figure, ax = axes_of(ax, width=4.2, height=4.2)
    ax.plot([0, 1], [0, 1], color=FAINT, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    for i, (name, given) in enumerate(named(scores_out, "scores").items()):
        inside, outside = _values(partner_of(name, scores_in, "scores_in"), score), _values(given, score)
        curve = metrics.roc_curve(inside, outside)
        area = described(name, f"AUROC {metrics.auroc(inside, outside):.3f}")
        ax.plot(curve.fpr.numpy(), curve.tpr.numpy(), label=area, **line_style(i))
    ax.set_xlim(-0.01, 1)
    ax.set_ylim(0, 1.01)
    ax.set_aspect("equal")
    labelled(ax, "in-distribution inputs flagged", "OOD inputs flagged", title)
    legend(ax, loc="lower right")
    return figure


def score_histograms(
    scores_in: Scores,
    scores_out: Scores | Mapping[str, Scores],
    *,
    score: str = "gaussian_entropy",
    num_bins: int = 50,
    ax: Axes | None = None,
    title: str | None = None,
) -> Figure:
    """How the scores are spread, on common bins, each kind as shares of its own inputs."""
    figure, ax = axes_of(ax, width=5.2, height=3.2)
    kinds = {"in distribution": scores_in}
    kinds |= {name or "out of distribution": values for name, values in named(scores_out, "scores").items()}
    found = {name: as_finite(name, _values(values, score)).flatten().numpy() for name, values in kinds.items()}
    edges = np.histogram_bin_edges(np.concatenate(list(found.values())), num_bins)
    for i, (name, values) in enumerate(found.items()):
        shares = np.histogram(values, edges)[0] / len(values)
        style = line_style(i)
        ax.stairs(shares, edges, fill=True, alpha=0.22, color=style["color"])
        ax.stairs(shares, edges, color=style["color"], linestyle=style["linestyle"], linewidth=1.5, label=name)
    ax.set_ylim(0, 1.25 * ax.dataLim.y1)  # room for the legend
    ax.grid(False, axis="x")
    by_name = any(isinstance(values, Prediction) for values in kinds.values())
    labelled(ax, score.replace("_", " ") if by_name else "score", "share of inputs", title)
    legend(ax, loc="upper right")
    return figure


def _values(given: Scores, score: str) -> Any:
    return ood_score(given, score) if isinstance(given, Prediction) else given
