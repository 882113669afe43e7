"""Classes and uncertainty over two inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from scalla.metrics.inputs import Array, as_finite, class_labels
from scalla.plots.canvas import COLOURS, INK, axes_of, labelled, legend
from scalla.predictive import Prediction, ood_score
from scalla.types import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: from sure to unsure; dark enough to be read, light enough for lines and points on top
SHADES = ("#FFFFFF", "#D5DEE7", "#8FA6BA", "#5B7C99")


def decision_map(
    predict: Callable[[Tensor], Prediction],
    points: Array,
    labels: Array | None = None,
    *,
    score: str = "predictive_entropy",
    resolution: int = 120,
    margin: float = 0.5,
    dtype: torch.dtype = torch.float32,
    ax: Axes | None = None,
    title: str | None = None,
) -> Figure:
    """The uncertainty of a classifier as shades, the borders between its classes as lines, points on top.

    Args:
        predict: (B, 2) → Prediction: `la.predict`.
        points: (N, 2), drawn, and the region of the map is theirs and a margin.
        labels: classes of the points, which colour them.
        score: what is shaded; any of `scalla.SCORES`.
        resolution: grid points along each side.
        margin: added on each side, as a share of the points' range.
        dtype: of the grid that `predict` is given.
        ax: axes to draw into.
        title: of the axes.
    """
    shown = as_finite("points", points)
    if shown.ndim != 2 or shown.shape[1] != 2:
        raise InputError(f"got points of shape {tuple(shown.shape)}; wanted (N, 2): a map has two axes")
    if resolution < 2:
        raise InputError(f"got resolution={resolution}; wanted at least 2 grid points a side (120, say)")
    low, high = shown.amin(0), shown.amax(0)
    reach = margin * (high - low).clamp_min(1e-9)
    across, up = (
        torch.linspace(float(a), float(b), resolution) for a, b in zip(low - reach, high + reach, strict=True)
    )
    prediction = predict(_grid(across, up).to(dtype))
    if not isinstance(prediction, Prediction):
        raise InputError(f"predict gave {type(prediction).__name__}; wanted a Prediction: pass la.predict")
    shade = ood_score(prediction, score).detach().double().cpu().view(resolution, resolution)
    leads = _leads(prediction).view(resolution, resolution, -1)

    figure, ax = axes_of(ax, width=5.4, height=4.2)
    from matplotlib.colors import LinearSegmentedColormap

    ax.grid(False)
    shades = LinearSegmentedColormap.from_list("shades", SHADES)
    picture = ax.pcolormesh(across.numpy(), up.numpy(), shade.numpy(), cmap=shades, shading="gouraud", rasterized=True)
    bar = figure.colorbar(picture, ax=ax, pad=0.02)
    bar.set_label(score.replace("_", " "), color=INK, fontsize=10)
    bar.ax.tick_params(labelsize=9, colors=INK)
    bar.outline.set_visible(False)
    for lead in leads.unbind(-1):
        if float(lead.min()) < 0 < float(lead.max()):
            ax.contour(across.numpy(), up.numpy(), lead.numpy(), [0.0], colors=[INK], linewidths=1)
    _draw_points(ax, shown, labels)
    ax.set_xlim(float(across[0]), float(across[-1]))
    ax.set_ylim(float(up[0]), float(up[-1]))
    labelled(ax, "x₁", "x₂", title)
    legend(ax, loc="upper right", handletextpad=0.1)
    return figure


def _grid(across: Tensor, up: Tensor) -> Float[Tensor, "G 2"]:
    """Row by row, as an image is read."""
    rows, columns = torch.meshgrid(up, across, indexing="ij")
    return torch.stack([columns.flatten(), rows.flatten()], 1)


def _leads(prediction: Prediction) -> Float[Tensor, "G K"]:
    """By how much each class is ahead of the best other one: its border is where that is 0."""
    probs = prediction.probs.detach().double().cpu()
    if probs.shape[1] == 1:
        probs = torch.cat([1 - probs, probs], 1)
    best, second = probs.topk(2, 1).values.unbind(1)
    leads = probs - torch.where(probs == best[:, None], second[:, None], best[:, None])
    # Of two classes both borders are one line.
    return leads[:, 1:] if probs.shape[1] == 2 else leads


def _draw_points(ax: Axes, points: Float[Tensor, "N 2"], labels: Array | None) -> None:
    if labels is None:
        ax.scatter(
            points[:, 0].numpy(),
            points[:, 1].numpy(),
            s=14,
            color=COLOURS[0],
            edgecolors="white",
            linewidths=0.5,
            zorder=3,
        )
        return
    classes = class_labels(labels, len(points), 1 + int(as_finite("labels", labels).max()))
    for k in classes.unique().tolist():
        x, y = points[classes == k].T.numpy()
        colour = COLOURS[k % len(COLOURS)]
        marker = "osD^vPX"[k % 7]
        ax.scatter(x, y, s=18, color=colour, marker=marker, edgecolors="white", linewidths=0.5, label=f"{k}", zorder=3)
