"""The second task: a table for each of its data sets, and the toy's band."""

from __future__ import annotations

from html import escape

from scalla.benchmark import regression
from scalla.report.columns import Column
from scalla.report.notes import notes
from scalla.report.results import ReportRow, Results, value_at
from scalla.report.series import css_of
from scalla.report.svg import Axis, Frame, figure
from scalla.report.table import results_table

NAMES = {"diabetes": "diabetes", "wine_alcohol": "wine, alcohol from the other columns", "toy": "toy in one dimension"}


def _quality(path: tuple[str, ...], group: str) -> list[Column]:
    unit = "in units of the target's standard deviation" if group == "test" else "in the toy's own units"
    return [
        Column("RMSE", (*path, "rmse"), "less", f"Root mean square error, {unit}", group),
        Column("NLL", (*path, "nll"), "less", "−mean log density, noise included, in nats", group),
        Column("CRPS", (*path, "crps"), "less", "Continuous ranked probability score", group),
    ]


def _coverage(path: tuple[str, ...], group: str) -> Column:
    # Neither more nor less is better: 95% is.
    return Column("coverage, %", (*path, "coverage"), "", "Share of targets in the 95% interval", group, 1, scale=100)


def _costs() -> list[Column]:
    return [
        Column(
            "δ", ("metrics", "prior_precision"), "", "Prior precision, by marginal likelihood", "fit", significant=True
        ),
        Column("kernel error", ("metrics", "kernel_error", "error"), "", "Of the surrogate's kernel", "fit"),
        Column(
            "fit, s", ("cost", "fit_seconds"), "less", "Seconds of one core", "fit", significant=True, is_quality=False
        ),
    ]


def table_columns(table: str) -> list[Column]:
    """Those of one data set; the toy has them in its gap, too."""
    columns = [*_quality(("metrics",), "test"), _coverage(("metrics",), "test")]
    if table == "toy":
        columns += [*_quality(("metrics", "gap"), "in the gap"), _coverage(("metrics", "gap"), "in the gap")]
    return [*columns, *_costs()]


def regression_part(results: Results) -> str:
    """ "" where the task was not run."""
    rows = results.rows.get((regression.NAME, regression.PROTOCOLS[0]), ())
    parts = []
    for table in regression.TABLES:
        of_table = [row for row in rows if row.variant == table]
        if not any(row.records or row.failures for row in of_table):
            continue
        parts.append(results_table(escape(NAMES[table]), of_table, table_columns(table)))
    bands = "".join(_band(row) for row in rows if row.variant == "toy" and row.first is not None)
    if bands:
        parts.append(f'<div class="charts">{bands}</div>')
    if parts:
        every = notes(rows)
        parts.append(f"<details><summary>Settings and notes of every row</summary>{every}</details>")
    return "".join(parts)


def _band(row: ReportRow) -> str:
    toy = value_at(row.first or {}, ("curves", "toy"))
    if toy is None:
        return ""
    values = [*toy["train_y"], *toy["truth"]]
    room = 0.5 * (max(values) - min(values))
    frame = Frame(Axis("x", min(toy["x"]), max(toy["x"])), Axis("y", min(values) - room, max(values) + room))
    parts = [
        f'<g class="{css_of(row)}">',
        _two_deviations(frame, toy, "std_with_noise"),
        _two_deviations(frame, toy, "std"),
        "</g>",
        frame.line("the curve itself", toy["x"], toy["truth"], "truth"),
        f'<g class="s {css_of(row)} strong">{frame.line(f"{row.title}: mean", toy["x"], toy["mean"])}</g>',
        f'<g class="data">{frame.dots(toy["train_x"], toy["train_y"])}</g>',
    ]
    caption = (
        f"{escape(row.title)}<br><small>mean, ±2 standard deviations without and with noise; dashed: the curve</small>"
    )
    words = f"Toy regression by {row.title}: mean and bands of two standard deviations, data on both sides of a gap"
    return figure(caption, frame.svg(words, "".join(parts)))


def _two_deviations(frame: Frame, toy: dict[str, list[float]], key: str) -> str:
    low, high = ([m + sign * s for m, s in zip(toy["mean"], toy[key], strict=True)] for sign in (-2, 2))
    return frame.area(toy["x"], low, high, "band")
