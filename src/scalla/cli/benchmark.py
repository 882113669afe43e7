"""`scalla benchmark` and `scalla report`"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from scalla.cli.common import Json, numbers, words
from scalla.cli.console import FAILED, guarded, out, print_json


class Task(str, Enum):
    fmnist = "fmnist"
    regression = "regression"


class Protocol(str, Enum):
    paper = "paper"
    tuned = "tuned"


@guarded
def benchmark(
    task: Annotated[Task, typer.Argument(help="fmnist: the published table. regression: tables and a toy.")],
    methods: Annotated[str | None, typer.Option(help="Rows, with commas between them; all of them by default.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds, with commas between them; 3 or 5 by default.")] = None,
    protocol: Annotated[str | None, typer.Option(help="paper, tuned, or both with a comma between them.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A subset and short fits: a few minutes.")] = False,
    folder: Annotated[Path, typer.Option("--out", help="Folder of the JSON files, one a run.")] = Path("results"),
    cache: Annotated[Path, typer.Option(help="Folder of trained networks and logs.")] = Path("runs"),
    data_root: Annotated[Path | None, typer.Option("--data", help="Folder of the image data (or SCALLA_DATA).")] = None,
    threads: Annotated[int, typer.Option(help="Of torch, in each run.", min=1)] = 1,
    jobs: Annotated[int, typer.Option(help="Runs at a time; more than one disturbs the clock.", min=1)] = 1,
    network_seed: Annotated[int | None, typer.Option(help="One network for all seeds.")] = None,
    retry: Annotated[bool, typer.Option("--retry/--no-retry", help="Run again what failed before.")] = True,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which a run counts as failed.")] = None,
    as_json: Json = False,
) -> None:
    """Every method of the published table, a process for each run; what is done is not done again.

    Stop it whenever you like: the same command goes on. Exit code 1 says that some run failed.

    [dim]$[/] scalla benchmark fmnist --quick

    [dim]$[/] scalla benchmark fmnist --methods map,scalla,scalla_biased --seeds 1,2
    """
    from scalla.benchmark import run_benchmark

    summary = run_benchmark(
        task.value,
        methods=words(methods) or None,
        seeds=[int(n) for n in numbers(seeds, "--seeds", int)] or None,
        protocols=words(protocol) or None,
        quick=quick,
        out=folder,
        cache=cache,
        data_root=data_root,
        threads=threads,
        jobs=jobs,
        network_seed=network_seed,
        retry_failed=retry,
        timeout=timeout,
    )
    if as_json:
        print_json(vars(summary))
    else:
        out().print(str(summary), markup=False)
    if summary.failed:
        raise typer.Exit(FAILED)


@guarded
def report(
    results: Annotated[Path, typer.Argument(help="Folder of the benchmark's JSON files.")] = Path("results"),
    page: Annotated[Path, typer.Argument(help="The page to write.")] = Path("report.html"),
    markdown: Annotated[Protocol | None, typer.Option(help="Print that protocol's table as Markdown instead.")] = None,
) -> None:
    """One self-contained page, or a Markdown table, from the benchmark's results.

    [dim]$[/] scalla report results report.html

    [dim]$[/] scalla report results --markdown paper
    """
    from scalla.report import markdown_table, write_report

    if markdown is not None:
        print(markdown_table(results, markdown.value), end="")
    else:
        out().print(f"written: {write_report(results, page)}", markup=False, soft_wrap=True)
