"""Axes to draw into, their looks, and colours that everybody can tell apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scalla.types import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Okabe and Ito's palette without its yellow, which is faint on white; line styles tell the same apart in print
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 2, 1.5, 2)), (0, (4, 1)), (0, (1, 1)), "-")
INK, FAINT, GRID = "#333333", "#8C8C8C", "#E6E6E6"


def axes_of(ax: Axes | None, *, width: float = 4.6, height: float = 3.6) -> tuple[Figure, Axes]:
    """The axes that were given, or those of a new figure that pyplot knows nothing of."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'scalla.plots needs matplotlib, which is not installed: pip install "scalla[plots]"'
        ) from error
    if ax is None:
        figure = Figure(figsize=(width, height), layout="constrained", dpi=120)
        ax = figure.add_subplot()
    elif not hasattr(ax, "get_figure"):
        raise InputError(f"got ax of type {type(ax).__name__}; wanted matplotlib Axes: figure.add_subplot(), say")
    top: Any = ax.figure
    while not isinstance(top, Figure):  # axes of a subfigure
        top = top.figure
    return top, _plain(ax)


def _plain(ax: Axes) -> Axes:
    """Two thin spines, a faint grid behind the data."""
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(FAINT)
    ax.tick_params(colors=INK, labelsize=9, color=FAINT)
    ax.grid(True, color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    return ax


def labelled(ax: Axes, x: str, y: str, title: str | None = None) -> None:
    ax.set_xlabel(x, color=INK, fontsize=10)
    ax.set_ylabel(y, color=INK, fontsize=10)
    if title:
        ax.set_title(title, color=INK, fontsize=11, loc="left")


def legend(ax: Axes, **options: Any) -> None:
    """What the labelled artists are, without a frame; nothing where none has a label."""
    if ax.get_legend_handles_labels()[1]:
        ax.legend(frameon=False, fontsize=9, labelcolor=INK, **options)


def line_style(index: int) -> dict[str, Any]:
    """Colour and dashes of the series of this number."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index % len(DASHES)],
        "linewidth": 1.8,
        "solid_capstyle": "round",
    }
