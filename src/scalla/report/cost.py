"""Quality against cost: what a microsecond more at prediction, or a second more at fitting, buys."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TypeAlias

from scalla.report.columns import Column, cost_columns, ood_columns, quality_columns
from scalla.report.results import ReportRow
from scalla.report.series import group, in_drawing_order
from scalla.report.svg import Axis, Frame, figure

Box: TypeAlias = tuple[float, float, float, float]
#: pixels between two labels, and of a character
LINE_HEIGHT, CHARACTER = 10, 5.2


def cost_charts(rows: Sequence[ReportRow], shown: set[str], protocol: str) -> str:
    """AUC and NLL against microseconds per prediction and seconds of the fit."""
    costs = {c.title: c for c in cost_columns()}
    auc, gaussian = (c for c in ood_columns("KMNIST", protocol) if c.title in ("AUC", "Gaussian AUC"))
    nll = next(c for c in quality_columns() if c.title == "NLL")
    return "".join(
        _scatter(rows, shown, costs[cost], quality)
        for cost in ("µs / prediction", "fit, s")
        for quality in (nll, auc, gaussian)
    )


def _scatter(rows: Sequence[ReportRow], shown: set[str], cost: Column, quality: Column) -> str:
    found = {}
    for row in rows:
        x, y = cost.spread(row), quality.spread(row)
        if x is not None and y is not None:
            found[row.slug] = (max(x.mean, 1e-3), y.mean)
    if not found:
        return ""
    frame = Frame(
        Axis.around(f"{cost.title} (log scale)", [x for x, _ in found.values()], log=True),
        Axis.around(quality.label, [y for _, y in found.values()]),
    )
    places = {slug: frame.at(*point) for slug, point in found.items()}
    labels = _labels([row for row in rows if row.slug in found and row.slug in shown], places, frame)
    parts = []
    for row in in_drawing_order(rows):
        if row.slug not in found:
            continue
        px, py = places[row.slug]
        seconds, value = found[row.slug]
        text = escape(f"{row.label}: {cost.title} {cost.text(seconds)}, {quality.label} {quality.text(value)}")
        mark = (
            f'<circle class="mark" cx="{px:.1f}" cy="{py:.1f}" r="4.5" data-t="{text}"/>'
            if row.kind == "method"
            else f'<rect class="mark" x="{px - 3.5:.1f}" y="{py - 3.5:.1f}" width="7" height="7" data-t="{text}"/>'
        )
        parts.append(group(row, rows, shown, mark + labels.get(row.slug, "")))
    caption = f"{quality.label}, against {cost.title}"
    better = "up" if quality.better == "more" else "down"
    words = f"{caption}, one point for each row; better is {better} and to the left. The numbers are in the table."
    return figure(escape(caption), frame.svg(words, "".join(parts)))


def _labels(rows: Sequence[ReportRow], places: dict[str, tuple[float, float]], frame: Frame) -> dict[str, str]:
    """A name beside each point, where it covers least of the points and names that are there."""
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in (places[row.slug] for row in rows)]
    found = {}
    for row in rows:
        x, y = places[row.slug]
        width = CHARACTER * len(row.title)
        tries = [
            (x + dx if right else x - dx - width, y + dy, "start" if right else "end")
            for dy in (0, -7, 7, -13, 13, -19, 19)
            for dx in (7, 3)[: 1 + (dy != 0)]
            for right in (True, False)
        ]

        def covered(place: tuple[float, float, str], width: float = width) -> float:
            left, middle, _ = place
            box = (left, middle - LINE_HEIGHT / 2, left + width, middle + LINE_HEIGHT / 2)
            outside = max(0.0, frame.left - box[0]) + max(0.0, box[2] - frame.width)
            return 20 * outside + sum(_overlap(box, other) for other in taken)

        left, middle, anchor = min(tries, key=covered)  # the first of those that cover least
        taken.append((left, middle - LINE_HEIGHT / 2, left + width, middle + LINE_HEIGHT / 2))
        at = left if anchor == "start" else left + width
        found[row.slug] = (
            f'<text class="name" x="{at:.1f}" y="{middle + 3:.1f}" text-anchor="{anchor}">{escape(row.title)}</text>'
        )
    return found


def _overlap(a: Box, b: Box) -> float:
    """Area that two boxes (left, top, right, bottom) share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
