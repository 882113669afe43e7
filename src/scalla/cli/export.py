"""`scalla export`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scalla.cli.common import Folder, Json, NetworkAgain, NetworkOptions
from scalla.cli.console import guarded, out, print_json


@guarded
def export(
    folder: Folder,
    file: Annotated[Path, typer.Argument(help="The .onnx file to write.")],
    network: NetworkAgain = None,
    network_options: NetworkOptions = None,
    score: Annotated[str, typer.Option(help="What ood_score is in the graph.")] = "gaussian_entropy",
    link: Annotated[str, typer.Option(help="How probs are made: probit, bridge, bridge_norm, mc.")] = "probit",
    samples: Annotated[int, typer.Option(help="Constant draws, for mc.", min=1)] = 100,
    opset: Annotated[int | None, typer.Option(help="ONNX operator set.")] = None,
    as_json: Json = False,
) -> None:
    """One ONNX graph: inputs to probabilities (or mean), variance and out-of-distribution score.

    The size of the batch is free. With onnxruntime installed the file is
    compared with PyTorch before it is written.

    [dim]$[/] scalla export fitted model.onnx --network nets.py:make
    """
    from scalla.cli.store import load_fitted
    from scalla.predictive import LINKS
    from scalla.types import InputError

    if link not in LINKS:
        raise InputError(f"got --link {link}; choose one of {', '.join(LINKS)}")
    la, fitted = load_fitted(folder, network, network_options, "cpu")
    made = la.export(file, fitted.example(), score=score, link_approx=link, n_samples=samples, opset_version=opset)
    if as_json:
        print_json({**vars(made), "path": str(made.path)})
        return
    console = out()
    console.print(f"{', '.join(made.inputs)} → {', '.join(made.outputs)}   (ood_score: {made.score})", markup=False)
    checked = "not compared: onnxruntime is not installed"
    if made.max_difference is not None:
        checked = f"ONNX Runtime differs from PyTorch by at most {made.max_difference:.1e}"
    console.print(f"written: {made.path}; {checked}", markup=False, soft_wrap=True)
