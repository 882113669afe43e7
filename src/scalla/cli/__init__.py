"""The command `scalla`: demo, fit, predict, export, info, benchmark, report."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; exit code 0 done, 1 failed, 2 wrong input, 130 interrupted."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        print(f'scalla: the command line needs {error.name}: pip install "scalla[cli]"', file=sys.stderr)
        raise SystemExit(2) from error
    from scalla.cli.app import app

    app(prog_name="scalla")
