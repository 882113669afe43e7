"""Ours beside the published numbers, and beside what the published code would print for our own predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scalla.report.columns import Column, ood_columns, quality_columns
from scalla.report.published import PUBLISHED, ROUNDING
from scalla.report.results import ReportRow
from scalla.report.spread import one_more_seed
from scalla.report.table import Heading, Line, row_header, table, value_cell

EXPLANATION = (
    "“Their code” is the published evaluation applied to our predictions: logits sampled with the transposed "
    "Cholesky factor (covariance LᵀL in place of LLᵀ), and the AUC of the entropy of a softmax taken twice. It is "
    "defined for methods with a Gaussian over the outputs, and leaves the Gaussian AUC alone. A published number is "
    "marked ✓ where it lies in the interval that would hold one more seed of ours with 95% probability (Student's t, "
    "widened by the rounding of the published digits), (✓) where it lies in that of their code's number only, and ≠ "
    "where it lies in neither."
)


def columns() -> list[Column]:
    auc, gaussian = (c for c in ood_columns("KMNIST", "paper") if c.title in ("AUC", "Gaussian AUC"))
    return [*quality_columns(), auc, gaussian]


def their_column(column: Column) -> Column | None:
    """The same number as the published code would give it; it leaves the Gaussian AUC alone."""
    paths = {
        "accuracy": ("accuracy",),
        "nll": ("nll",),
        "ece": ("ece",),
        "auc": ("auc", "KMNIST"),
    }
    if column.published not in paths:
        return None
    return replace(column, path=("metrics", "as_published", *paths[column.published]), own_path=None)


def agreement(row: ReportRow, column: Column) -> str:
    """ "ours", "theirs" or "neither" agrees with the published number; "" without one, or with one seed of ours."""
    published = column.published_for(row)
    if published is None or len(column.by_seed(row)) < 2:
        return ""
    theirs = their_column(column)
    for name, found in (("ours", column), ("theirs", theirs)):
        interval = None if found is None else one_more_seed(found.by_seed(row).values())
        if interval is None or interval.half_width is None:
            continue
        if abs(interval.mean - published) <= interval.half_width + ROUNDING[column.published]:
            return name
    return "neither"


def comparison_table(rows: Sequence[ReportRow]) -> str:
    """ "" where no row has either."""
    compared = [
        row
        for row in rows
        if row.records and ((row.method, row.variant) in PUBLISHED or row.spread(("metrics", "as_published", "nll")))
    ]
    if not compared:
        return ""
    headings = []
    for column in columns():
        group = column.title
        headings += [Heading("ours", group, column.help)]
        headings += [Heading("their code", group, "What the published code computes")] * (
            their_column(column) is not None
        )
        headings += [Heading("published", group)]
    lines = [Line(row_header(row), [c for column in columns() for c in _cells(row, column)]) for row in compared]
    caption = "Ours, what the published code computes of our predictions, and the published numbers; OOD: KMNIST"
    return table(caption, headings, [("", lines)]) + f"<p>{_count(compared)}</p>"


def _cells(row: ReportRow, column: Column) -> list[str]:
    theirs = their_column(column)
    published = column.published_for(row)
    found = [value_cell(column.spread(row), column)]
    if theirs is not None:
        found.append(value_cell(theirs.spread(row), theirs))
    if published is None:
        return [*found, '<td class="none">–</td>']
    sign, css, words = {
        "ours": ("✓", "good", "within noise of ours"),
        "theirs": ("(✓)", "good", "within noise of their code's"),
        "neither": ("≠", "bad", "outside the noise of both"),
        "": ("", "", "noise unknown"),
    }[agreement(row, column)]
    mark = f' <span class="{css}" title="{words}">{sign}<span class="sr"> {words}</span></span>' if sign else ""
    return [*found, f"<td>{column.published_text(published)}{mark}</td>"]


def _count(rows: Sequence[ReportRow]) -> str:
    found = [agreement(row, column) for row in rows for column in columns()]
    compared = sum(f != "" for f in found)
    if not compared:
        return "With one seed there is no noise to compare the published numbers with."
    ours, theirs = found.count("ours"), found.count("theirs")
    return (
        f"Of {compared} published numbers, {ours} lie within the noise of ours, {theirs} more within the noise of what "
        f"the published code computes, and {compared - ours - theirs} within neither."
    )
