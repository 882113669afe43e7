"""One self-contained page, and the README's tables, from the JSON files of the benchmark's runs."""

from scalla.report.markdown import markdown_regression, markdown_table
from scalla.report.page import write_report

__all__ = ["markdown_regression", "markdown_table", "write_report"]
