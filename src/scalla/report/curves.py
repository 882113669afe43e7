"""The charts of one protocol that are made of curves: ROC, rejection, reliability, score histograms."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from html import escape

import numpy as np

from scalla.report.columns import MAIN_SETS
from scalla.report.results import Record, ReportRow, value_at
from scalla.report.series import css_of, group, in_drawing_order
from scalla.report.svg import Axis, Frame, figure

RATES = np.unique(np.concatenate([np.linspace(0, 0.1, 11), np.linspace(0.1, 1, 31)]))
UNIT_TICKS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
SCORE_NAMES = {
    "entropy": "entropy of the mean softmax",
    "gaussian_entropy": "entropy of the Gaussian",
    "score": "the own score of a control or detector",
}
#: width and height of a diagram that is one of many
SMALL = (220, 150)

Curve = tuple[np.ndarray, np.ndarray]


def mean_curve(row: ReportRow, curve_of: Callable[[Record], Curve | None], grid: np.ndarray) -> np.ndarray | None:
    """The mean over seeds of y at the same x."""
    found = [np.interp(grid, *curve) for record in row.records.values() if (curve := curve_of(record)) is not None]
    return np.mean(found, axis=0) if found else None


def roc_charts(rows: Sequence[ReportRow], shown: set[str]) -> str:
    """One chart for each set and each score; a detector's own score stands with the entropies."""
    return "".join(
        _roc_chart(rows, shown, name, score) for name in MAIN_SETS for score in ("entropy", "gaussian_entropy")
    )


def _roc_chart(rows: Sequence[ReportRow], shown: set[str], name: str, score: str) -> str:
    frame = Frame(
        Axis("false alarms: FashionMNIST flagged", 0, 1, ticks=UNIT_TICKS),
        Axis(f"{name} flagged", 0, 1, ticks=UNIT_TICKS),
    )
    parts = [frame.rule((0, 0), (1, 1))]
    for row in in_drawing_order(rows):
        own = score if row.kind == "method" else "score" if score == "entropy" else ""

        def roc(record: Record, own: str = own) -> Curve | None:
            found = value_at(record, ("curves", "ood", own, "roc", name))
            return None if found is None else (np.array(found["fpr"]), np.array(found["tpr"]))

        rates = mean_curve(row, roc, RATES)
        if rates is not None:
            # The jump at no false alarm at all is part of the curve.
            line = frame.line(row.label, [0.0, *RATES], [0.0, *rates])
            parts.append(group(row, rows, shown, line))
    caption = f"ROC, FashionMNIST against {name}; score: {SCORE_NAMES[score]}"
    return figure(escape(caption), frame.svg(f"{caption}. The areas are in the table above.", "".join(parts)))


def rejection_chart(rows: Sequence[ReportRow], shown: set[str]) -> str:
    """Accuracy on what is kept when the most uncertain inputs, by entropy, are rejected."""
    grid = np.linspace(0, 0.98, 50)

    def curve(record: Record) -> Curve | None:
        found = value_at(record, ("curves", "rejection"))
        return None if found is None else (np.array(found["rejected"]), np.array(found["accuracy"]))

    curves = {row.slug: found for row in rows if (found := mean_curve(row, curve, grid)) is not None}
    if not curves:
        return ""
    low = min(float(c.min()) for c in curves.values())
    frame = Frame(Axis("share rejected", 0, 1, ticks=UNIT_TICKS), Axis.around("accuracy on the rest", [low, 1.0]))
    parts = [
        group(row, rows, shown, frame.line(row.label, [*grid], [*curves[row.slug]]))
        for row in in_drawing_order(rows)
        if row.slug in curves
    ]
    caption = "Accuracy on the inputs kept when the most uncertain share is rejected"
    areas = [s.mean for row in rows if (s := row.spread(("metrics", "rejection_area"))) is not None]
    words = f"{caption}; the mean accuracy over all shares is between {min(areas):.3f} and {max(areas):.3f}."
    return figure(caption, frame.svg(words, "".join(parts)))


def reliability_diagrams(rows: Sequence[ReportRow]) -> str:
    """Accuracy in bins of confidence, counts of all seeds put together; a bar's strength is its share of the inputs."""
    return "".join(_reliability(row) for row in rows if value_at(row.first or {}, ("curves", "reliability")))


def _reliability(row: ReportRow) -> str:
    curves = [r["curves"]["reliability"] for r in row.records.values()]
    edges = curves[0]["edges"]
    counts = np.array([c["count"] for c in curves], dtype=float)
    total = counts.sum(0)
    correct, confidence = (_pooled([c[key] for c in curves], counts) for key in ("accuracy", "confidence"))
    unit = (0.0, 0.5, 1.0)
    frame = Frame(Axis("confidence", 0, 1, ticks=unit), Axis("accuracy", 0, 1, ticks=unit), *SMALL, left=34, bottom=30)
    bars = []
    for low, high, n, right, sure in zip(edges[:-1], edges[1:], total, correct, confidence, strict=True):
        if not n:
            continue
        (x0, y0), (x1, y1) = frame.at(low, 0), frame.at(high, right)
        share = n / total.sum()
        text = f"{low:.2f}–{high:.2f}: {share:.1%} of inputs, accuracy {right:.3f}, confidence {sure:.3f}"
        bars.append(
            f'<rect class="bar" x="{x0 + 0.5:.1f}" y="{y1:.1f}" width="{x1 - x0 - 1:.1f}" height="{y0 - y1:.1f}" '
            f'style="fill-opacity:{0.3 + 0.7 * min(1.0, 3 * share):.2f}" data-t="{text}"/>'
        )
    ece = row.spread(("metrics", "ece"))
    caption = f"{escape(row.label)}<br><small>ECE {ece.mean:.4f}</small>" if ece else escape(row.label)
    content = f'<g class="{css_of(row)}">{"".join(bars)}</g>{frame.rule((0, 0), (1, 1))}'
    words = f"Reliability diagram of {row.label}" + (f", expected calibration error {ece.mean:.4f}" if ece else "")
    return figure(caption, frame.svg(words, content))


def _pooled(values: list[list[float | None]], counts: np.ndarray) -> np.ndarray:
    """Means weighted by the counts; None stands where a bin is empty."""
    known = np.array([[0.0 if v is None else v for v in row] for row in values])
    return (known * counts).sum(0) / np.maximum(counts.sum(0), 1)


def histograms(rows: Sequence[ReportRow]) -> str:
    """Scores of the first seed, inside and outside; the better the score, the less they overlap."""
    parts = []
    for score, name in SCORE_NAMES.items():
        if found := "".join(_histogram(row, score) for row in rows):
            parts.append(f'<h4>{name[0].upper()}{name[1:]}</h4><div class="small">{found}</div>')
    return "".join(parts)


def _histogram(row: ReportRow, score: str) -> str:
    found = value_at(row.first or {}, ("curves", "ood", score, "histogram"))
    if found is None:
        return ""
    edges = found["edges"]
    names = ("FashionMNIST", *MAIN_SETS)
    shares = {name: np.array(found["counts"][name]) / max(sum(found["counts"][name]), 1) for name in names}
    most = max(float(s.max()) for s in shares.values())
    ticks = Axis("", edges[0], edges[-1]).shown_ticks()[::2]
    x = Axis("", edges[0], edges[-1], ticks=ticks)
    frame = Frame(x, Axis("", 0, most * 1.05, ticks=(0.0,)), *SMALL, left=14, bottom=20)
    parts = []
    for name in names:
        xs = [edge for pair in itertools.pairwise(edges) for edge in pair]
        ys = [share for share in shares[name] for _ in range(2)]
        css = name.lower()
        fill = frame.area([xs[0], *xs, xs[-1]], [0.0] * (len(xs) + 2), [0.0, *ys, 0.0], f"hist {css}")
        middle = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
        parts.append(fill + frame.line(name, middle, [*shares[name]], "unseen"))
    caption = escape(row.label)
    words = f"Histogram of the scores of {row.label}, {SCORE_NAMES[score]}: FashionMNIST, KMNIST and MNIST"
    return figure(caption, frame.svg(words, "".join(parts)))
