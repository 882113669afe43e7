"""`scalla demo`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from scalla.cli.console import guarded, out, print_json, progress

if TYPE_CHECKING:
    from scalla.demo import Demo
    from scalla.demo.row import Row


@guarded
def demo(
    folder: Annotated[Path, typer.Option("--out", help="Folder of the page.")] = Path("demo_output"),
    seed: Annotated[int, typer.Option(help="Decides everything random.", min=0)] = 0,
    steps: Annotated[int, typer.Option(help="Training steps of each ScaLLA.", min=1)] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Digits against photographs: a network, three ways to say how sure it is, in less than a minute.

    A small network learns to read scikit-learn's digits. Then it is shown
    patches of a photograph, which it must take for digits, too. The table says
    how well each method tells the two apart; the page shows it.

    [dim]$[/] scalla demo
    """
    from scalla.demo import Settings, run_demo, write_page
    from scalla.demo.experiment import STAGES

    settings = Settings(seed=seed, num_steps=steps)
    with progress() as bars:
        tasks = {stage: bars.add_task(stage, total=1.0, start=False, note="") for stage in STAGES}

        def advanced(stage: str, share: float) -> None:
            bars.start_task(tasks[stage])
            bars.update(tasks[stage], completed=share)

        result = run_demo(settings, on_progress=advanced)
    page = write_page(result, folder / "report.html")
    if as_json:
        print_json({"page": str(page), "rows": [_content(row) for row in result.rows]})
        return
    console = out()
    console.print(table_of(result))
    console.print(f"The page: [bold]{escape(str(page))}[/]", soft_wrap=True)


def table_of(result: Demo) -> Table:
    """The methods, a line each."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("Method", no_wrap=True)
    for head in ("Accuracy\n%", "NLL\n", "ECE\n", "OOD AUROC\nentropy", "OOD AUROC\nGaussian", "Seconds\nto fit"):
        table.add_column(head, justify="right")
    for row in result.rows:
        content = _content(row)
        areas = [content["ood_auroc"], content["ood_auroc_gaussian"]]
        table.add_row(
            row.title,
            f"{100 * row.accuracy:.2f}",
            f"{row.nll:.4f}",
            f"{row.reliability.ece:.4f}",
            *("–" if area is None else f"{area:.3f}" for area in areas),
            f"{row.fit_seconds:.1f}" if row.fit_seconds else "–",
        )
    return table


def _content(row: Row) -> dict[str, Any]:
    return {
        "method": row.title,
        "accuracy": row.accuracy,
        "nll": row.nll,
        "ece": row.reliability.ece,
        "ood_auroc": row.auroc("predictive_entropy"),
        "ood_auroc_gaussian": row.auroc("gaussian_entropy"),
        "fit_seconds": row.fit_seconds,
        "prior_precision": row.prior_precision,
        "kernel_error": None if row.kernel_error is None else vars(row.kernel_error),
    }
