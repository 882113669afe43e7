"""The tables of docs/benchmark.md, from the results that are there: python benchmarks/tables.py [--results results]"""

from __future__ import annotations

import argparse
from pathlib import Path

from pages import write_into

from scalla.benchmark.fmnist import PROTOCOLS
from scalla.report import markdown_regression, markdown_table

PAGE = Path(__file__).parents[1] / "docs" / "benchmark.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the JSON files")
    parser.add_argument("--page", type=Path, default=PAGE, help="page that the tables are written into")
    options = parser.parse_args()
    for protocol in PROTOCOLS:
        table = markdown_table(options.results, protocol).rstrip()
        write_into(options.page, table, source=f"benchmarks/tables.py, {protocol}")
    table = markdown_regression(options.results).rstrip()
    write_into(options.page, table, source="benchmarks/tables.py, regression")


if __name__ == "__main__":
    main()
