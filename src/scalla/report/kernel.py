"""How good the kernel is, and when it became so: the estimate while fitting, the exact error after it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from scalla.report.columns import Column
from scalla.report.results import ReportRow
from scalla.report.series import css_of, dashes, group
from scalla.report.svg import Axis, Frame, figure
from scalla.report.table import results_table

ERROR_COLUMNS = (
    Column(
        "error",
        ("metrics", "kernel_error", "error"),
        "",
        "Relative Frobenius error of g gᵀ against the exact kernel of held-out images of both kinds "
        "(of a biased kernel: against its own target, without the cross terms)",
    ),
    Column(
        "floor",
        ("metrics", "kernel_error", "floor"),
        "",
        "The least that any kernel of that rank can have on the same inputs",
    ),
    Column("prior precision", ("metrics", "found", "prior_precision"), "", "δ as fitted", significant=True),
)


def kernel_part(protocols: dict[str, list[ReportRow]]) -> str:
    """One chart and one table for each protocol; "" without any ScaLLA run."""
    parts = []
    for protocol, rows in protocols.items():
        ours = [row for row in rows if row.method.startswith("scalla")]
        if any(row.records for row in ours):
            chart = _chart(protocol, ours)
            table = results_table(f"Kernel error after the fit, {protocol} protocol", ours, ERROR_COLUMNS)
            parts.append(f'<div class="pair">{chart}{table}</div>')
    return "".join(parts)


def _chart(protocol: str, rows: Sequence[ReportRow]) -> str:
    lines = {row.slug: line for row in rows if (line := _history(row))[0]}
    if not lines:
        return ""
    steps = [x for xs, _ in lines.values() for x in xs]
    frame = Frame(
        Axis("step", 0, max(steps)),
        Axis.around("kernel error (estimate)", [y for _, ys in lines.values() for y in ys if y > 0], log=True),
    )
    parts = [group(row, rows, {row.slug}, frame.line(row.label, *lines[row.slug])) for row in rows if row.slug in lines]
    caption = f"Kernel error against steps, {protocol} protocol"
    words = f"{caption}: an unbiased estimate from probes on held-out images, mean over seeds."
    keys = " ".join(
        f'<span class="key {css_of(row)}{dashes(row, rows)}"><i></i>{escape(row.label)}</span>'
        for row in rows
        if row.slug in lines
    )
    return figure(f"{caption}<br>{keys}", frame.svg(words, "".join(parts)))


def _history(row: ReportRow) -> tuple[list[float], list[float]]:
    values: dict[float, list[float]] = {}
    for record in row.records.values():
        for entry in record.get("history") or ():
            score = entry.get("kernel_score")
            if score:  # an estimate of zero has no place on a logarithmic axis
                values.setdefault(entry["step"], []).append(score)
    steps = sorted(values)
    return steps, [sum(values[s]) / len(values[s]) for s in steps]
