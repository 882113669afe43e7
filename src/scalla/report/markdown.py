"""The README's table of a protocol: the columns that fit there, from the same numbers as the page."""

from __future__ import annotations

from pathlib import Path

from scalla.report.columns import Column, Mark, cost_columns, marks, ood_columns, quality_columns
from scalla.report.results import ReportRow, load_results
from scalla.types import InputError

#: titles of `ood_columns` and `cost_columns` that fit
COLUMNS = ("AUC", "Gaussian AUC", "chosen AUC", "fit, s", "µs / prediction")


def markdown_table(results: Path, protocol: str) -> str:
    """Mean ± standard deviation over seeds, the best of each kind in bold, in the `paper` protocol (published)."""
    rows = load_results(Path(results)).of(protocol)
    if not rows:
        raise InputError(f"found no run of the protocol {protocol!r} below {results}; run the benchmark with it first")
    columns = [*quality_columns(), *ood_columns("KMNIST", protocol), *cost_columns()]
    columns = [c for c in columns if c.title in COLUMNS or c.group == "FashionMNIST"]
    kinds = {kind: [r for r in rows if r.kind == kind] for kind in dict.fromkeys(r.kind for r in rows)}
    marked = {c.title: {k: m for members in kinds.values() for k, m in marks(members, c).items()} for c in columns}
    lines = [
        "| Method | " + " | ".join(c.title for c in columns) + " |",
        "| --- |" + " ---: |" * len(columns),
    ]
    for row in rows:
        cells = [_cell(row, c, marked[c.title].get(row.slug, "")) for c in columns]
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
