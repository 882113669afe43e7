"""How good a fitted method is on held-out data, beside the network alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scalla import metrics
from scalla.batches import EndlessBatches, context_loaders, inputs_of, labels_of
from scalla.likelihoods import check_labels
from scalla.predictive import Prediction, ood_score
from scalla.types import Likelihood, Loader

if TYPE_CHECKING:
    from scalla.method import ScaLLA


@dataclass(frozen=True)
class Measured:
    """Name of a metric → its value, for the network alone and for ScaLLA.

    Of a regression the network alone is N(f(x), σ²), ScaLLA N(f(x), Σ(x) + σ²).
    """

    num_inputs: int
    num_ood: int
    network: dict[str, float]
    scalla: dict[str, float]


def measure(la: ScaLLA, val_loader: Loader, ood: Any = None) -> Measured:
    """Accuracy and calibration on `val_loader`; with `ood` (a loader, dataset or tensor) the AUROC of the scores."""
    predictions, labels = [], []
    for batch in EndlessBatches(val_loader, seed=la.seed, name="val_loader").one_epoch():
        predictions.append(_of(la, inputs_of(batch)))
        y = check_labels(la.likelihood, predictions[-1].mean, labels_of(batch, la.dict_key_y))
        labels.append(y.reshape(predictions[-1].mean.shape).cpu() if la.likelihood == "regression" else y.cpu())
    inside, y = _joined(predictions), torch.cat(labels)
    found = {"network": _metrics(_without_variance(inside), y), "scalla": _metrics(inside, y)}
    outside = _joined([_of(la, x) for x in _inputs(ood, la.seed)]) if ood is not None else None
    if outside is not None:
        if la.likelihood == "classification":
            name = "predictive_entropy"
            alone = (ood_score(_without_variance(p), name) for p in (inside, outside))
            found["network"][f"ood_auroc_{name}"] = metrics.auroc(*alone)
        for name in _scores(la.likelihood):
            found["scalla"][f"ood_auroc_{name}"] = metrics.auroc(ood_score(inside, name), ood_score(outside, name))
    return Measured(len(y), 0 if outside is None else len(outside), **found)


def _scores(likelihood: Likelihood) -> tuple[str, ...]:
    return ("predictive_entropy", "gaussian_entropy") if likelihood == "classification" else ("gaussian_entropy",)


def _metrics(prediction: Prediction, y: Tensor) -> dict[str, float]:
    if prediction.likelihood == "regression":
        mean, var = prediction.mean, prediction.var_with_noise
        return {
            "rmse": metrics.rmse(mean, y),
            "nll": metrics.gaussian_nll(mean, var, y),
            "crps": metrics.crps_gaussian(mean, var, y),
            "coverage_95": metrics.interval_coverage(mean, var, y, 0.95),
        }
    probs = prediction.probs
    probs = torch.cat([1 - probs, probs], 1) if probs.shape[1] == 1 else probs
    return {
        "accuracy": metrics.accuracy(probs, y),
        "nll": metrics.nll(probs, y),
        "ece": metrics.ece(probs, y),
        "brier": metrics.brier(probs, y),
    }


def _of(la: ScaLLA, x: Any) -> Prediction:
    """On the CPU, and without a factor wider than C: all of them are kept."""
    with torch.no_grad():
        prediction = la.predict(x, n_samples=0)
    factor = prediction.factor
    if factor.shape[-1] > factor.shape[-2]:
        factor = torch.linalg.qr(factor.double().mT, mode="r").R.mT  # A = L Qᵀ and A Aᵀ = L Lᵀ
    mean, noise_var = prediction.mean.cpu(), prediction.noise_var
    noise_var = None if noise_var is None else noise_var.cpu().to(mean)
    return replace(prediction, mean=mean, factor=factor.cpu().to(mean), noise=None, noise_var=noise_var)


def _joined(predictions: list[Prediction]) -> Prediction:
    mean, factor = (torch.cat([getattr(p, name) for p in predictions]) for name in ("mean", "factor"))
    return replace(predictions[0], mean=mean, factor=factor)


def _without_variance(prediction: Prediction) -> Prediction:
    return replace(prediction, factor=torch.zeros_like(prediction.factor[..., :1]))


def _inputs(ood: Any, seed: int) -> Iterator[Any]:
    for loader in context_loaders(ood, context_batch_size=256):
        yield from map(inputs_of, EndlessBatches(loader, seed=seed, name="ood").one_epoch())
