"""Graded shift: NLL, ECE and the scores' AUC against severity, as charts and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from scalla.report.columns import Column
from scalla.report.results import ReportRow, value_at
from scalla.report.series import group, in_drawing_order
from scalla.report.spread import Spread, spread
from scalla.report.svg import Axis, Frame, figure, short
from scalla.report.table import Heading, Line, row_header, table, value_cell


@dataclass(frozen=True)
class Quantity:
    """A number that a shift has at every severity."""

    title: str
    path: tuple[str, ...]

    @property
    def is_auc(self) -> bool:
        return self.path[0] == "auc"

    def path_in(self, row: ReportRow) -> tuple[str, ...]:
        """A detector's own score stands with the entropies."""
        return ("auc", "score") if row.kind != "method" and self.path == ("auc", "entropy") else self.path


QUANTITIES = (
    Quantity("NLL", ("nll",)),
    Quantity("ECE", ("ece",)),
    Quantity("AUC", ("auc", "entropy")),
    Quantity("Gaussian AUC", ("auc", "gaussian_entropy")),
)
#: kind of shift → what its severity is
KINDS = {"rotation": "degrees of rotation", "noise": "standard deviation of the noise"}


def shift_charts(rows: Sequence[ReportRow], shown: set[str]) -> str:
    """One chart for each kind of shift and each quantity."""
    return "".join(_chart(rows, shown, kind, quantity) for kind in KINDS for quantity in QUANTITIES)


def shift_table(rows: Sequence[ReportRow]) -> str:
    """The same in numbers: one table for each kind of shift; "" for no rows."""
    return "".join(_table([row for row in rows if row.records], kind) for kind in KINDS)


def along(row: ReportRow, kind: str, quantity: Quantity) -> dict[float, Spread]:
    """Severity → mean and deviation over seeds."""
    values: dict[float, list[float]] = {}
    for record in row.records.values():
        for entry in value_at(record, ("metrics", "shift", kind)) or ():
            value = value_at(entry, quantity.path_in(row))
            if value is not None:
                values.setdefault(entry["severity"], []).append(value)
    return {severity: s for severity, v in values.items() if (s := spread(v)) is not None}


def _chart(rows: Sequence[ReportRow], shown: set[str], kind: str, quantity: Quantity) -> str:
    found = {row.slug: line for row in rows if (line := along(row, kind, quantity))}
    if not found:
        return ""
    severities = sorted({severity for line in found.values() for severity in line})
    low, high = severities[0], severities[-1]
    means = [s.mean for line in found.values() for s in line.values()]
    y = Axis.around(quantity.title, [*means, 0.5] if quantity.is_auc else means)
    frame = Frame(Axis(KINDS[kind], low, high, ticks=tuple(severities)), y)
    parts = [frame.rule((low, 0.5), (high, 0.5))] if quantity.is_auc else []
    for row in in_drawing_order(rows):
        if row.slug in found:
            xs, ys = [*found[row.slug]], [s.mean for s in found[row.slug].values()]
            parts.append(group(row, rows, shown, frame.line(row.label, xs, ys) + frame.dots(xs, ys)))
    caption = f"{quantity.title} under {kind}"
    if quantity.is_auc:
        caption += ", shifted images against the test images"
    words = f"{caption}, {KINDS[kind]} {short(low)} to {short(high)}. The numbers are in the table below the charts."
    return figure(escape(caption), frame.svg(words, "".join(parts)))


def _table(rows: Sequence[ReportRow], kind: str) -> str:
    found = {(row.slug, q.title): along(row, kind, q) for row in rows for q in QUANTITIES}
    severities = sorted({severity for line in found.values() for severity in line})
    if not severities:
        return ""
    headings = [Heading(short(s), q.title) for q in QUANTITIES for s in severities]
    lines = []
    for row in rows:
        cells = [
            value_cell(found[row.slug, q.title].get(severity), Column(q.title, q.path, "", ""))
            for q in QUANTITIES
            for severity in severities
        ]
        lines.append(Line(row_header(row), cells))
    caption = f"{KINDS[kind][0].upper()}{KINDS[kind][1:]}: mean ± standard deviation over seeds"
    return table(caption, headings, [("", lines)])
