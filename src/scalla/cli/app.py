"""The command's parts, put together; what is heavy is imported by the command that needs it."""

from __future__ import annotations

from typing import Annotated

import typer

from scalla import __version__
from scalla.cli.benchmark import benchmark, report
from scalla.cli.console import out
from scalla.cli.demo import demo
from scalla.cli.export import export
from scalla.cli.fit import fit
from scalla.cli.info import info
from scalla.cli.predict import predict

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        out().print(f"scalla {__version__}")
        raise typer.Exit


@app.callback()
def scalla(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Calibrated probabilities, error bars and out-of-distribution scores for networks that are already trained.

    Begin with [bold]scalla demo[/]. For a network of your own: [bold]fit[/], then [bold]predict[/] or
    [bold]export[/].

    Exit codes: 0 done, 1 a run failed, 2 wrong input (one line says what),
    130 interrupted.
    """


app.command()(demo)
app.command()(fit)
app.command()(predict)
app.command()(export)
app.command()(info)
app.command(rich_help_panel="The published comparison")(benchmark)
app.command(rich_help_panel="The published comparison")(report)
