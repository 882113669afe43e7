"""How the kernel's error fell during a fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from scalla.metrics.inputs import Array, as_finite, same_shape
from scalla.plots.canvas import FAINT, axes_of, labelled, legend, line_style
from scalla.plots.series import described, named
from scalla.training import HistoryEntry
from scalla.types import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: `la.history`, or (steps, errors)
Errors: TypeAlias = Sequence[HistoryEntry] | tuple[Array, Array]


def kernel_error_curve(
    history: Errors | Mapping[str, Errors],
    *,
    floor: float | None = None,
    ax: Axes | None = None,
    title: str | None = None,
) -> Figure:
    """Relative error of the kernel on held-out inputs against steps, on a logarithmic axis.

    `la.history` has the errors where `fit` was given `val_loader`. An estimate of 0 has no place on the axis and is
    left out. `floor` is that of `la.kernel_error(x)`, drawn as a line.
    """
    figure, ax = axes_of(ax, width=5.0, height=3.2)
    for i, (name, given) in enumerate(named(history, "histories").items()):
        steps, errors = _errors(given)
        label = described(name, f"{float(errors[-1]):.3f} in the end")
        kept = errors > 0
        ax.plot(steps[kept].numpy(), errors[kept].numpy(), label=label, **line_style(i))
    if floor is not None:
        if floor > 0:
            ax.axhline(floor, color=FAINT, linewidth=1, linestyle=(0, (4, 3)), label=f"floor of the rank, {floor:.3f}")
        else:
            raise InputError(f"got floor={floor}; wanted a positive number, for the axis is logarithmic: leave it out")
    ax.set_yscale("log")
    ax.set_xlim(left=0)
    labelled(ax, "step", "kernel error", title)
    legend(ax, loc="best")
    return figure


def _errors(given: Errors) -> tuple[Any, Any]:
    if isinstance(given, tuple) and len(given) == 2 and not isinstance(given[0], HistoryEntry):
        steps, errors = given
    else:
        scored = [(e.step, e.kernel_score) for e in _entries(given) if e.kernel_score is not None]
        if not scored:
            raise InputError(
                f"got a history of {len(given)} entries without a kernel score; wanted one with: "
                "fit(..., val_loader=held_out) measures it every score_every steps"
            )
        steps, errors = [list(column) for column in zip(*scored, strict=True)]
    checked = as_finite("steps", steps), as_finite("errors", errors)
    same_shape(steps=checked[0], errors=checked[1])
    return checked


def _entries(given: Any) -> Sequence[HistoryEntry]:
    if not isinstance(given, Sequence) or not all(isinstance(e, HistoryEntry) for e in given):
        raise InputError(f"got a history of type {type(given).__name__}; wanted la.history, or (steps, errors)")
    return given
