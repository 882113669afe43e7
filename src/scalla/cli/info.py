"""`scalla info`"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from scalla.cli.common import Json
from scalla.cli.console import guarded, out, print_json
from scalla.types import FileFormatError

#: of a posterior, in the order in which they are shown
SHOWN = (
    "likelihood", "num_outputs", "num_features", "num_data", "surrogate", "probe", "prior_precision", "sigma_noise",
    "temperature", "seed",
)  # fmt: skip


@guarded
def info(
    path: Annotated[
        Path | None,
        typer.Argument(help="A folder of `scalla fit` or save_pretrained, or a file of save."),
    ] = None,
    as_json: Json = False,
) -> None:
    """What a saved ScaLLA holds, and what this machine runs it with. No code of the folder is run.

    [dim]$[/] scalla info fitted

    [dim]$[/] scalla info --json
    """
    from scalla.benchmark import environment

    found: dict[str, dict[str, Any]] = {} if path is None else {str(path): _saved(path)}
    found["versions"] = environment.versions()
    found["hardware"] = environment.hardware()
    if as_json:
        print_json(found)
        return
    for title, facts in found.items():
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False, title=title, title_justify="left")
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        for name, value in facts.items():
            if value not in (None, []):
                table.add_row(name.replace("_", " "), _text(value))
        out().print(table)


def _saved(path: Path) -> dict[str, Any]:
    from scalla.checkpoint import read_file
    from scalla.cli.store import NAME, Fitted
    from scalla.hub import CONFIG, POSTERIOR, fetched

    if not path.exists():
        raise FileFormatError(f"found nothing at {path}; wanted a folder or a file that scalla wrote")
    folder = fetched(path) if path.is_dir() else None
    file = path if folder is None else folder / POSTERIOR
    tensors, meta = read_file(file, kind="posterior")
    facts = {name: meta.get(name) for name in SHOWN}
    facts["surrogate_weights"] = sum(t.numel() for name, t in tensors.items() if name.startswith("surrogate."))
    facts["bytes"] = file.stat().st_size
    facts["last_loss"] = meta["history"][-1]["loss"] if meta.get("history") else None
    if folder is None:
        return facts
    facts["measured"] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["scalla"].get("measured")
    if (folder / NAME).is_file():
        fitted = Fitted.read(folder)
        facts |= {"network": fitted.network, "input_shape": list(fitted.input_shape), "classes": list(fitted.classes)}
    return facts


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items() if v is not None)
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return str(value)
