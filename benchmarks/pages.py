"""A measured table in a page of the documentation, between two comments that say where it comes from."""

from __future__ import annotations

from pathlib import Path


def write_into(page: Path, text: str, *, source: str) -> None:
    """Replace what lies between `<!-- table: source -->` and `<!-- end of table -->`."""
    start, end = f"<!-- table: {source} -->", "<!-- end of table -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(start)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise SystemExit(f"{page} lacks the lines {start} and {end}, between which the table goes")
    page.write_text(f"{before}{start}\n\n{text}\n\n{end}{after}", encoding="utf-8")
