"""Which row is drawn how: its colour is its method's everywhere on the page, its dashes are its variant's."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from scalla.report.published import PUBLISHED
from scalla.report.results import ReportRow

#: method → (colour on a light page, colour on a dark one); what is not here is grey
COLOURS: dict[str, tuple[str, str]] = {
    "map": ("#222222", "#f0f0f0"),
    "map_temperature": ("#6b6b6b", "#b5b5b5"),
    "lla_last_kron": ("#7fa8dd", "#86aee6"),
    "lla_last_full": ("#4c86cf", "#5b95e0"),
    "lla_all_kron": ("#1f5fae", "#7db7ff"),
    "lla_last": ("#7fa8dd", "#86aee6"),
    "lla_all_full": ("#1f5fae", "#7db7ff"),
    "ella": ("#0e8f8f", "#35c4c4"),
    "valla": ("#2c8a3c", "#5ecb70"),
    "fmgp": ("#8a7a00", "#d6c22e"),
    "mfvi": ("#8047b8", "#bd8cf0"),
    "sngp": ("#9a5a35", "#d39a73"),
    "scalla": ("#e07b00", "#ffa63d"),
    "scalla_biased": ("#d0213f", "#ff6b81"),
    "scalla_residual": ("#a86b00", "#e8b860"),
    "scalla_biased_residual": ("#8c1450", "#f095c0"),
}
GREY = ("#8d8d8d", "#8d8d8d")


def colour_rules() -> tuple[str, str]:
    """CSS of the colours, for a light page and for a dark one."""
    light, dark = (
        "".join(f".m-{name}{{--c:{pair[i]}}}" for name, pair in {**COLOURS, "other": GREY}.items()) for i in (0, 1)
    )
    return light, dark


def css_of(row: ReportRow) -> str:
    return f"m-{row.method if row.method in COLOURS else 'other'}"


def dashes(row: ReportRow, rows: Sequence[ReportRow]) -> str:
    """ " dashed" for any but a method's first variant."""
    first = next(r for r in rows if r.method == row.method)
    return "" if row.variant == first.variant else " dashed"


def shown_first(rows: Sequence[ReportRow]) -> set[str]:
    """Slugs of the rows that charts begin with: each method once, in the variant closest to the published one."""
    chosen: dict[str, ReportRow] = {}
    for row in rows:
        if row.kind != "method" or not row.records or row.method.startswith("lla_last"):
            continue
        if row.method not in chosen or (row.method, row.variant) in PUBLISHED:
            chosen[row.method] = row
    return {row.slug for row in chosen.values()}


def group(row: ReportRow, rows: Sequence[ReportRow], shown: set[str], content: str) -> str:
    """The row's part of a chart, which the legend switches on and off."""
    strong = " strong" if row.method.startswith("scalla") else ""
    off = "" if row.slug in shown else " off"
    return f'<g class="s {css_of(row)}{dashes(row, rows)}{strong}{off}" data-row="{row.slug}">{content}</g>'


def in_drawing_order(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """Our own last, that is, on top."""
    return sorted((r for r in rows if r.records), key=lambda r: r.method.startswith("scalla"))


def legend(rows: Sequence[ReportRow], shown: set[str]) -> str:
    """One switch for each row that has numbers."""
    switches = []
    for row in (r for r in rows if r.records):
        pressed = str(row.slug in shown).lower()
        switches.append(
            f'<button type="button" class="chip {css_of(row)}{dashes(row, rows)}" data-switch="{row.slug}" '
            f'aria-pressed="{pressed}"><i></i>{escape(row.label)}</button>'
        )
    return (
        '<details class="legend" open><summary>Rows drawn in the charts of this protocol</summary>'
        f'<div class="chips">{"".join(switches)}</div></details>'
    )
