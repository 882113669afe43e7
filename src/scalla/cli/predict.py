"""`scalla predict`"""

from __future__ import annotations

import contextlib
import csv
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from scalla.cli.common import DATA_HELP, Device, Folder, NetworkAgain, NetworkOptions, device_named
from scalla.cli.console import err, finite, guarded, progress

if TYPE_CHECKING:
    import torch

    from scalla.cli.reading import Data
    from scalla.cli.store import Fitted
    from scalla.method import ScaLLA
    from scalla.predictive import Prediction


@guarded
def predict(
    folder: Folder,
    data: Annotated[str, typer.Argument(help=f"Inputs, with labels or without. {DATA_HELP}")],
    network: NetworkAgain = None,
    network_options: NetworkOptions = None,
    file: Annotated[Path | None, typer.Option("--out", "-o", help="File to write rather than stdout.")] = None,
    lines: Annotated[bool, typer.Option("--json", help="A JSON object a line rather than CSV.")] = False,
    score: Annotated[
        str, typer.Option(help="The out-of-distribution score: gaussian_entropy, predictive_entropy, variance, …")
    ] = "gaussian_entropy",
    batch_size: Annotated[int, typer.Option(min=1)] = 256,
    device: Device = "cpu",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar, no summary.")] = False,
) -> None:
    """Predictions with their uncertainty, as CSV or JSON lines: a line for each input.

    A classification gives the class, its probability, the entropy, the score
    and the probability of every class; a regression the mean, its standard
    deviation and that of an observation. Where the data have labels of the same
    classes, accuracy, NLL and ECE (or RMSE and NLL) go to stderr.

    [dim]$[/] scalla predict fitted photos/new --network nets.py:make > predictions.csv

    [dim]$[/] scalla predict fitted photos/new --network nets.py:make --json | jq 'select(.ood_score > 20)'
    """
    from scalla.cli.reading import read_data
    from scalla.cli.store import load_fitted

    la, fitted = load_fitted(folder, network, network_options, device_named(device))
    given = read_data(data, fitted.inputs, likelihood=la.likelihood)
    comparable = given.labelled and given.classes in ((), fitted.classes)
    with _opened(file) as stream, progress(counts=True, hidden=quiet or not sys.stderr.isatty()) as bars:
        bar = bars.add_task("inputs", total=len(given), note="")
        writer: Any = None
        compared: list[tuple[torch.Tensor, ...]] = []
        start = 0
        for batch in given.loader(batch_size):
            prediction = la.predict(batch[0].to(la.posterior_precision.device))
            if comparable:
                compared.append(_to_compare(prediction, batch[1]))
            for row in _rows(prediction, given, fitted, score, start):
                if lines:
                    stream.write(json.dumps(finite(row), ensure_ascii=False) + "\n")
                else:
                    writer = writer or _writer(stream, row)
                    writer.writerow(row)
            start += len(prediction)
            bars.update(bar, completed=start)
    if comparable and not quiet:
        err().print(_summary(la, compared), markup=False)


def _rows(
    prediction: Prediction, data: Data, fitted: Fitted, score: str, start: int
) -> Iterator[dict[str, str | int | float]]:
    """What is written of each input."""
    from scalla.predictive import ood_score

    scores = ood_score(prediction, score).tolist()
    for i, own_score in enumerate(scores):
        name = {"input": data.names[start + i] if data.names else start + i}
        if prediction.likelihood == "regression":
            yield {**name, **_observed(prediction, i, fitted), "ood_score": own_score}
        else:
            yield {**name, **_classified(prediction, i, fitted, own_score)}


def _classified(prediction: Prediction, i: int, fitted: Fitted, score: float) -> dict[str, str | int | float]:
    probs = prediction.probs[i].tolist()
    probs = [1 - probs[0], probs[0]] if len(probs) == 1 else probs
    names: Sequence[str | int] = fitted.classes or range(len(probs))
    best = max(range(len(probs)), key=probs.__getitem__)
    return {
        "prediction": names[best],
        "confidence": probs[best],
        "entropy": float(prediction.entropy[i]),
        "ood_score": score,
        **{f"p_{name}": p for name, p in zip(names, probs, strict=True)},
    }


def _observed(prediction: Prediction, i: int, fitted: Fitted) -> dict[str, float]:
    means, stds, noisy = (
        v[i].tolist() for v in (prediction.mean, prediction.var.sqrt(), prediction.var_with_noise.sqrt())
    )
    names = fitted.inputs.targets if len(fitted.inputs.targets) == len(means) else tuple(map(str, range(len(means))))
    ends = [""] if len(means) == 1 else [f"_{name}" for name in names]
    row: dict[str, float] = {}
    for end, mean, std, std_noisy in zip(ends, means, stds, noisy, strict=True):
        row |= {f"mean{end}": mean, f"std{end}": std, f"std_with_noise{end}": std_noisy}
    return row


def _to_compare(prediction: Prediction, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What the summary needs of a batch."""
    if prediction.likelihood == "regression":
        return prediction.mean.cpu(), prediction.var_with_noise.cpu(), y
    return prediction.probs.cpu(), y


def _summary(la: ScaLLA, compared: list[tuple[torch.Tensor, ...]]) -> str:
    """How good the predictions were."""
    import torch

    from scalla.metrics import accuracy, ece, gaussian_nll, nll, rmse

    parts = [torch.cat(part) for part in zip(*compared, strict=True)]
    if la.likelihood == "regression":
        mean, var, y = parts
        return f"RMSE {rmse(mean, y):.4f}, NLL {gaussian_nll(mean, var, y):.4f} on {len(y):,} inputs"
    probs, y = parts
    found = f"accuracy {100 * accuracy(probs, y):.2f}%, NLL {nll(probs, y):.4f}, ECE {ece(probs, y):.4f}"
    return f"{found} on {len(y):,} inputs"


def _writer(stream: TextIO, row: dict[str, Any]) -> csv.DictWriter[str]:
    writer = csv.DictWriter(stream, list(row), lineterminator="\n")
    writer.writeheader()
    return writer


@contextlib.contextmanager
def _opened(file: Path | None) -> Iterator[TextIO]:
    """stdout, or the file, which is there once all of it is."""
    if file is None:
        yield sys.stdout
        return
    from scalla.checkpoint import replacing

    with replacing(file) as temporary, temporary.open("w", encoding="utf-8", newline="") as stream:
        yield stream
