"""The tables of docs/benchmark.md and the README, from the results that are there: python benchmarks/tables.py"""

from __future__ import annotations

import argparse
from pathlib import Path

from pages import write_into

from scalla.benchmark.fmnist import PROTOCOLS
from scalla.report import markdown_regression, markdown_table

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "benchmark.md", ROOT / "README.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the JSON files")
    parser.add_argument("--page", type=Path, default=PAGE, help="page that the tables are written into")
    parser.add_argument("--readme", type=Path, default=README, help="page that the rows with numbers are written into")
    options = parser.parse_args()
    for protocol in PROTOCOLS:
        table = markdown_table(options.results, protocol).rstrip()
        write_into(options.page, table, source=f"benchmarks/tables.py, {protocol}")
    rows = markdown_table(options.results, "tuned").rstrip().splitlines()
    there = "\n".join(row for row in rows if "(not run)" not in row)
    write_into(options.readme, there, source="benchmarks/tables.py, tuned, rows that were run")
    table = markdown_regression(options.results).rstrip()
    write_into(options.page, table, source="benchmarks/tables.py, regression")


if __name__ == "__main__":
    main()
