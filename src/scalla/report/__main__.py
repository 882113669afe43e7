"""`python -m scalla.report RESULTS OUT` writes the page; with `--markdown paper` a table instead, to the screen."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scalla.benchmark.fmnist import PROTOCOLS
from scalla.report import markdown_regression, markdown_table, write_report
from scalla.types import ScallaError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scalla.report", description="A page from the benchmark's results.")
    parser.add_argument("results", type=Path, help="folder of the JSON files")
    parser.add_argument("out", type=Path, nargs="?", default=Path("report.html"), help="the page (report.html)")
    parser.add_argument("--markdown", choices=(*PROTOCOLS, "regression"), help="print that table instead")
    options = parser.parse_args(argv)
    try:
        if options.markdown == "regression":
            print(markdown_regression(options.results), end="")
        elif options.markdown is not None:
            print(markdown_table(options.results, options.markdown), end="")
        else:
            print(write_report(options.results, options.out))
    except ScallaError as error:
        print(f"scalla.report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
