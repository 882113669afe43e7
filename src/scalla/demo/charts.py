"""The page's charts: shares, score histograms, ROC curves, reliability diagrams."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from html import escape

import torch
from torch import Tensor

from scalla.demo.row import SCORES, Row
from scalla.report.curves import UNIT_TICKS, reliability_diagrams
from scalla.report.results import ReportRow
from scalla.report.svg import Axis, Frame, figure

NUM_BINS, NUM_ROC_POINTS = 40, 160
#: width and height of a histogram
SMALL = (300, 150)
SET_NAMES = {"digits": "digits", "patches": "photograph"}


def share_bars(rows: Sequence[Row], shares: Sequence[float]) -> str:
    """A bar with its number for each method."""
    lines = "".join(
        f'<div class="share m-{row.name}"><span>{escape(row.title)}</span><div><i style="width:{100 * share:.1f}%"></i>'
        f"</div><b>{100 * share:.0f}%</b></div>"
        for row, share in zip(rows, shares, strict=True)
    )
    return f'<div class="shares">{lines}</div>'


def histograms(rows: Sequence[Row]) -> str:
    """Each score of each method, digits against patches; a score's axis is the same for all methods."""
    parts = []
    for score, name in SCORES.items():
        having = [row for row in rows if score in row.scores]
        values = torch.cat([part for row in having for part in row.score(score)])
        low, high = float(values.min()), float(values.max())
        found = "".join(_histogram(row, score, low, high) for row in having)
        parts.append(f'<h3>{name[0].upper()}{name[1:]}</h3><div class="trio">{found}</div>')
    keys = "".join(f'<span class="key {css}"><i></i>{name}</span>' for css, name in SET_NAMES.items())
    return f"<p>{keys}</p>{''.join(parts)}"


def _histogram(row: Row, score: str, low: float, high: float) -> str:
    edges = torch.linspace(low, high, NUM_BINS + 1, dtype=torch.float64)
    shares = {css: _shares(values, edges) for css, values in zip(SET_NAMES, row.score(score), strict=True)}
    most = max(max(s) for s in shares.values())
    frame = Frame(Axis("less sure →", low, high), Axis("", 0, 1.05 * most, ticks=(0.0,)), *SMALL, left=14, bottom=32)
    middle = [float(a + b) / 2 for a, b in itertools.pairwise(edges)]
    parts = []
    for css, share in shares.items():
        xs = [float(edge) for pair in itertools.pairwise(edges) for edge in pair]
        ys = [s for s in share for _ in range(2)]
        parts.append(frame.area([xs[0], *xs, xs[-1]], [0.0] * (len(xs) + 2), [0.0, *ys, 0.0], f"hist {css}"))
        parts.append(frame.line(SET_NAMES[css], middle, share, "unseen"))
    words = f"Histogram of the {SCORES[score]}, {row.title}: digits and patches of the photograph"
    caption = f"{escape(row.title)}<br><small>area under the ROC curve {row.auroc(score):.3f}</small>"
    return figure(caption, frame.svg(words, "".join(parts)))


def _shares(values: Tensor, edges: Tensor) -> list[float]:
    """Of the values in each bin."""
    index = (torch.bucketize(values.double(), edges) - 1).clamp(0, len(edges) - 2)
    return (torch.bincount(index, minlength=len(edges) - 1) / len(values)).tolist()


def roc_chart(rows: Sequence[Row]) -> str:
    """Every score of every method; dashed where it is that of the probabilities and the method has a better one."""
    frame = Frame(
        Axis("digits flagged by mistake", 0, 1, ticks=UNIT_TICKS),
        Axis("patches flagged", 0, 1, ticks=UNIT_TICKS),
        width=420,
        height=300,
    )
    lines, keys = [frame.rule((0, 0), (1, 1))], []
    for row in rows:
        for score in row.scores:
            dashed = "" if score == row.own_score else " dashed"
            curve = row.roc(score)
            kept = torch.linspace(0, len(curve.fpr) - 1, min(NUM_ROC_POINTS, len(curve.fpr))).long()
            line = frame.line(f"{row.title}, {SCORES[score]}", curve.fpr[kept].tolist(), curve.tpr[kept].tolist())
            lines.append(f'<g class="s strong m-{row.name}{dashed}">{line}</g>')
            keys.append(
                f'<li><span class="key m-{row.name}{dashed}"><i></i>{escape(row.title)}, {SCORES[score]}</span>'
                f" <b>{row.auroc(score):.3f}</b></li>"
            )
    words = "ROC curves of every score: digits against patches of the photograph"
    svg = frame.svg(words, "".join(lines))
    chart = figure("ROC curves; the areas are in the list", svg)
    return f'<div class="pair">{chart}<ul class="keys">{"".join(keys)}</ul></div>'


def reliability(rows: Sequence[Row]) -> str:
    """Accuracy in bins of confidence, on the test digits."""
    return f'<div class="trio">{reliability_diagrams([_as_report_row(row) for row in rows])}</div>'


def _as_report_row(row: Row) -> ReportRow:
    bins = row.reliability
    curve = {
        "edges": bins.edges.tolist(),
        "confidence": _or_none(bins.confidence),
        "accuracy": _or_none(bins.accuracy),
        "count": bins.count.tolist(),
    }
    record = {"curves": {"reliability": curve}, "metrics": {"ece": bins.ece}}
    return ReportRow("demo", "", row.name, "", row.title, "method", "", {0: record}, {}, ())


def _or_none(values: Tensor) -> list[float | None]:
    """Empty bins as the benchmark's records have them."""
    return [None if v != v else v for v in values.tolist()]
