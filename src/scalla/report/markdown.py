"""Tables in Markdown: a protocol of the published table with the columns that fit, and the regression."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from scalla.benchmark import regression
from scalla.report.columns import Column, Mark, cost_columns, marks, ood_columns, quality_columns
from scalla.report.results import ReportRow, load_results
from scalla.report.second_task import NAMES, table_columns
from scalla.types import InputError

#: titles of `ood_columns` and `cost_columns` that fit
COLUMNS = ("AUC", "Gaussian AUC", "chosen AUC", "fit, s", "µs / prediction")


def markdown_table(results: Path, protocol: str) -> str:
    """Mean ± standard deviation over seeds, the best of each kind in bold, in the `paper` protocol (published)."""
    rows = load_results(Path(results)).of(protocol)
    if not rows:
        raise InputError(f"found no run of the protocol {protocol!r} below {results}; run the benchmark with it first")
    columns = [*quality_columns(), *ood_columns("KMNIST", protocol), *cost_columns()]
    return _table(rows, [c for c in columns if c.title in COLUMNS or c.group == "FashionMNIST"])


def markdown_regression(results: Path) -> str:
    """One table for each of its data sets."""
    rows = load_results(Path(results)).rows.get((regression.NAME, regression.PROTOCOLS[0]), ())
    parts = []
    for name in regression.TABLES:
        of_table = [row for row in rows if row.variant == name]
        if any(row.records or row.failures for row in of_table):
            title = NAMES[name]
            parts.append(f"**{title[0].upper()}{title[1:]}**\n\n{_table(of_table, table_columns(name))}")
    if not parts:
        raise InputError(f"found no run of the regression below {results}; run `scalla benchmark regression` first")
    return "\n".join(parts)


def _table(rows: Sequence[ReportRow], columns: Sequence[Column]) -> str:
    kinds = {kind: [r for r in rows if r.kind == kind] for kind in dict.fromkeys(r.kind for r in rows)}
    marked = [{k: m for members in kinds.values() for k, m in marks(members, c).items()} for c in columns]
    titles = [f"{c.title} {c.group}" if c.group == "in the gap" else c.title for c in columns]
    lines = ["| Method | " + " | ".join(titles) + " |", "| --- |" + " ---: |" * len(columns)]
    for row in rows:
        cells = [_cell(row, c, found.get(row.slug, "")) for c, found in zip(columns, marked, strict=True)]
        lines.append(f"| {row.label}{_standing(row)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: ReportRow, column: Column, mark: Mark) -> str:
    found = column.spread(row)
    if found is None:
        return "–"
    text = column.text(found.mean)
    if mark == "best":
        text = f"**{text}**"
    if found.std is not None and column.is_quality:
        text += f" ± {column.text(found.std)}"
    published = column.published_for(row)
    return text if published is None else f"{text} ({column.published_text(published)})"


def _standing(row: ReportRow) -> str:
    """What a row without all of its seeds must say."""
    if not row.records:
        return " (failed)" if row.failures else " (not run)"
    parts = [f"{len(row.failures)} failed"] * bool(row.failures) + [f"{len(row.missing)} missing"] * bool(row.missing)
    count = len(row.records)
    return f" ({count} seed{'s' * (count != 1)}, {', '.join(parts)})" if parts else ""
