"""A regression along one input: mean, error bars, data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from scalla.metrics.inputs import Array, as_finite
from scalla.plots.canvas import COLOURS, FAINT, INK, axes_of, labelled, legend
from scalla.predictive import Prediction
from scalla.types import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: a Prediction, or (mean, variance) of one output each (B,) or of several (B, C)
Gaussian: TypeAlias = Prediction | tuple[Array, Array]


def regression_band(
    x: Array,
    prediction: Gaussian,
    *,
    data: tuple[Array, Array] | None = None,
    truth: Array | None = None,
    output: int = 0,
    num_std: float = 2.0,
    ax: Axes | None = None,
    title: str | None = None,
) -> Figure:
    """Mean ± `num_std` standard deviations over one input; the paler band is that of an observation, noise included.

    Args:
        x: (B,) or (B, 1), in any order.
        prediction: at x. A Prediction of a regression has the noise in it; of (mean, variance) one band is drawn.
        data: points (x, y) to draw.
        truth: the curve itself at x, if it is known.
        output: which of several outputs.
        num_std: half the width of the band.
        ax: axes to draw into.
        title: of the axes.
    """
    places = _column("x", x, 0)
    order = places.argsort()
    at = places[order].numpy()
    mean, variances = _moments(prediction, output)
    for what, values in {"prediction": mean, **variances}.items():
        if len(values) != len(places):
            raise InputError(
                f"got {len(places)} values of x and a {what} of {len(values)} inputs; wanted the same number"
            )
    figure, ax = axes_of(ax, width=5.6, height=3.4)
    centre = mean[order].numpy()
    for alpha, (what, variance) in zip((0.30, 0.13), variances.items(), strict=False):
        half = num_std * variance[order].sqrt().numpy()
        label = f"{what} ± {num_std:g} sd"
        ax.fill_between(at, centre - half, centre + half, color=COLOURS[0], alpha=alpha, linewidth=0, label=label)
    ax.plot(at, centre, color=COLOURS[0], linewidth=1.8, label="mean")
    if truth is not None:
        ax.plot(
            at, _column("truth", truth, output)[order].numpy(), color=INK, linewidth=1, linestyle="--", label="truth"
        )
    if data is not None:
        seen_x, seen_y = _column("data[0]", data[0], 0).numpy(), _column("data[1]", data[1], output).numpy()
        ax.scatter(seen_x, seen_y, s=9, color=FAINT, linewidths=0, label="data", zorder=3)
    ax.set_xlim(float(at[0]), float(at[-1]))
    labelled(ax, "x", "y", title)
    legend(ax, loc="best")
    return figure


def _moments(prediction: Gaussian, output: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean, and every variance that is known by the name of what it is the variance of."""
    if isinstance(prediction, Prediction):
        found: dict[str, Any] = {"function": prediction.var}
        if prediction.noise_var is not None:
            found["observation"] = prediction.var_with_noise
        mean: Any = prediction.mean
    elif isinstance(prediction, tuple) and len(prediction) == 2:
        mean, found = prediction[0], {"mean": prediction[1]}
    else:
        raise InputError(
            f"got a prediction of type {type(prediction).__name__}; wanted a Prediction or (mean, variance)"
        )
    variances = {what: _column("variance", variance, output) for what, variance in found.items()}
    for variance in variances.values():
        if bool((variance < 0).any()):
            raise InputError(f"got a variance of {float(variance.min()):.4g}; wanted variances, which are ≥ 0")
    return _column("mean", mean, output), variances


def _column(name: str, values: Array, output: int) -> Tensor:
    """One column in float64: (B,) as it is, of (B, C) that of `output`."""
    tensor = as_finite(name, values)
    if tensor.ndim == 1:
        return tensor
    if tensor.ndim != 2 or not -tensor.shape[1] <= output < tensor.shape[1]:
        raise InputError(f"got {name} of shape {tuple(tensor.shape)}; wanted (B,), or (B, C) with a column {output}")
    if name in ("x", "data[0]") and tensor.shape[1] != 1:
        raise InputError(
            f"got {name} of shape {tuple(tensor.shape)}; wanted one input, (B,) or (B, 1): a band has one axis"
        )
    return torch.as_tensor(tensor[:, output])
