"""Log-log plots of the scaling curves, and of the kernel error against seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def draw(found: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    if "scaling" in found:
        _scaling(found["scaling"]["rows"]).savefig(folder / "scaling.png", dpi=110)
    curves = [r for r in found.get("quality", {}).get("rows", []) if r.get("curve")]
    if curves:
        _quality(curves).savefig(folder / "quality.png", dpi=110)


def _scaling(rows: Sequence[Mapping[str, Any]]) -> Figure:
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    for ax, row in zip(figure.subplots(2, 3).flat, rows, strict=False):
        ax.loglog(row["sizes"], row["seconds"], "o-", color="#0072B2")
        _bare(ax)
        ax.set_title(f"{row['what']} against {row['letter']}: exponent {row['exponent']:.2f}", fontsize=9)
        ax.set_xlabel(row["letter"])
        ax.set_ylabel("seconds")
    return figure


def _quality(rows: Sequence[Mapping[str, Any]]) -> Figure:
    figure = Figure(figsize=(6, 4), layout="constrained")
    ax = figure.subplots()
    for row, color in zip(rows, ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"), strict=False):
        curve = row["curve"]
        ax.loglog([p["seconds"] for p in curve], [p["error"] for p in curve], label=row["recipe"], color=color)
    ax.axhline(rows[0]["floor"], color="#666666", linestyle=":", label="best of rank m")
    _bare(ax)
    ax.set_xlabel("seconds of the processor")
    ax.set_ylabel("held-out kernel error")
    ax.legend(frameon=False, fontsize=8)
    return figure


def _bare(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(True, which="major", alpha=0.2)
