"""The columns: what a fitted method is worth, and what it costs. A score that fails is an error, never a 0."""

from __future__ import annotations

import base64
import statistics
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scalla.baselines.protocol import Detector
from scalla.benchmark.as_published import as_published, double_softmax_entropy, has_gaussian, transposed_probs
from scalla.benchmark.clock import Seconds, now
from scalla.benchmark.images import Images, as_bytes
from scalla.benchmark.shift import NUM_SHIFTED, SHIFTS
from scalla.metrics import (
    accuracy,
    accuracy_rejection_curve,
    aupr,
    auroc,
    brier,
    fpr95,
    nll,
    reliability,
    roc_curve,
)
from scalla.predictive import Prediction, psd_cholesky

CHUNK = 500
NUM_ROC_POINTS, NUM_REJECTION_POINTS, NUM_HISTOGRAM_BINS, NUM_GALLERY = 101, 50, 40, 6
#: scores that curves and galleries are drawn of, where the method has them
DRAWN_SCORES = ("entropy", "gaussian_entropy", "score")


@dataclass(frozen=True, eq=False)
class Outputs:
    """Mean softmax and every score of every input; larger = more out of distribution."""

    probs: Float[Tensor, "B C"]
    scores: dict[str, Float[Tensor, " B"]]
    #: mean softmax of the samples that the published code draws, where they were asked for and there is a Gaussian
    transposed: Float[Tensor, "B C"] | None = None


@torch.no_grad()
def outputs_of(method: Any, x: Tensor, *, num_samples: int, chunk: int = CHUNK, transposed: bool = False) -> Outputs:
    """Predictions in chunks; the method's own seed gives every chunk the same function samples."""
    probs: list[Tensor] = []
    scores: dict[str, list[Tensor]] = {}
    turned: list[Tensor] = []
    for part in x.split(chunk):
        prediction = by_outputs(replace(method.predict(part, n_samples=num_samples), link="mc"))
        probs.append(prediction.probs)
        for name, values in prediction_scores(prediction).items():
            scores.setdefault(name, []).append(values.double())
        if transposed and has_gaussian(prediction):
            turned.append(transposed_probs(prediction, num_samples=num_samples))
    return Outputs(
        torch.cat(probs),
        {name: torch.cat(parts) for name, parts in scores.items()},
        torch.cat(turned) if turned else None,
    )


def by_outputs(prediction: Prediction) -> Prediction:
    """The same Gaussian at each input, with a factor C×C where it has more columns: C/R of the work of sampling."""
    num_outputs, rank = prediction.factor.shape[-2:]
    if prediction.noise is None or rank <= num_outputs:
        return prediction
    factor = prediction.factor.double()
    square = psd_cholesky(factor @ factor.mT).to(prediction.factor)
    return replace(prediction, factor=square, noise=prediction.noise[:num_outputs])


def prediction_scores(prediction: Prediction) -> dict[str, Tensor]:
    """Scores of the probabilities; and of the Gaussian over the outputs, where there is one (not for MAP)."""
    found = {
        "entropy": prediction.entropy,
        # What the published code computes for its covariance methods: the entropy of a softmax of probabilities.
        "double_softmax": double_softmax_entropy(prediction.probs),
        "max_prob": 1 - prediction.max_prob,
    }
    if prediction.factor.shape[-1]:
        found |= {
            "mutual_information": prediction.mutual_information,
            "gaussian_entropy": prediction.gaussian_entropy,
            "gaussian_entropy_projected": prediction.gaussian_entropy_projected,
            "variance": prediction.var.sum(-1),
        }
    return found


@torch.no_grad()
def scores_of(method: Any, x: Tensor, *, num_samples: int) -> dict[str, Tensor]:
    if isinstance(method, Detector):
        return {"score": torch.cat([method.score(part) for part in x.split(CHUNK)])}
    return outputs_of(method, x, num_samples=num_samples).scores


def measure(method: Any, images: Images, *, num_samples: int, published: bool = False) -> dict[str, Any]:
    """Metrics, curves and galleries on the test images and on all out-of-distribution sets.

    `published`: also what the published code would print, for a method with a Gaussian over its outputs.
    """
    x, y = images.test
    metrics: dict[str, Any] = dict.fromkeys(("accuracy", "nll", "ece", "brier", "rejection_area", "as_published"))
    curves: dict[str, Any] = {}
    predicted: Tensor | None = None
    if isinstance(method, Detector):
        inside, *outside_scores = (scores_of(method, part, num_samples=0) for part in (x, *images.out.values()))
        outside = dict(zip(images.out, outside_scores, strict=True))
    else:
        outputs, *others = (
            outputs_of(method, part, num_samples=num_samples, transposed=published)
            for part in (x, *images.out.values())
        )
        inside, predicted = outputs.scores, outputs.probs.argmax(-1)
        outside = {name: other.scores for name, other in zip(images.out, others, strict=True)}
        turned = {name: o.transposed for name, o in zip(images.out, others, strict=True) if o.transposed is not None}
        bins = reliability(outputs.probs, y)
        rejection = accuracy_rejection_curve(outputs.probs, y, inside["entropy"])
        metrics |= {
            "accuracy": accuracy(outputs.probs, y),
            "nll": nll(outputs.probs, y),
            "ece": bins.ece,
            "brier": brier(outputs.probs, y),
            "rejection_area": rejection.area,
            "as_published": None if outputs.transposed is None else as_published(outputs.transposed, y, turned),
        }
        curves["reliability"] = {
            "edges": bins.edges.tolist(),
            "confidence": bins.confidence.tolist(),
            "accuracy": bins.accuracy.tolist(),
            "count": bins.count.tolist(),
        }
        kept = torch.linspace(0, len(y) - 1, min(NUM_REJECTION_POINTS, len(y))).long()
        curves["rejection"] = {
            "rejected": rejection.rejected[kept].tolist(),
            "accuracy": rejection.accuracy[kept].tolist(),
        }
    metrics["ood"] = {
        name: {score: detection(inside[score], values) for score, values in scores.items()}
        for name, scores in outside.items()
    }
    metrics["shift"] = shift_of(method, images, inside, num_samples=num_samples)
    curves["ood"] = {}
    for score in (s for s in DRAWN_SCORES if s in inside):
        values = {"FashionMNIST": inside[score]} | {name: scores[score] for name, scores in outside.items()}
        curves["ood"][score] = {
            "histogram": histograms(values),
            "roc": {name: roc_points(inside[score], scores[score]) for name, scores in outside.items()},
        }
    drawn = next(s for s in reversed(DRAWN_SCORES) if s in inside)
    sets = {"FashionMNIST": (x, inside[drawn])}
    sets |= {name: (images.out[name], scores[drawn]) for name, scores in outside.items()}
    gallery = {name: extremes(*pair) for name, pair in sets.items()}
    for end in ("least", "most"):
        for item in gallery["FashionMNIST"][end]:
            item["label"] = int(y[item["index"]])
            item["predicted"] = None if predicted is None else int(predicted[item["index"]])
    return {"metrics": metrics, "curves": curves, "gallery": {"score": drawn, "sets": gallery}}


def shift_of(
    method: Any, images: Images, inside: dict[str, Tensor], *, num_samples: int
) -> dict[str, list[dict[str, Any]]]:
    """Quality and scores on the first test images as they are (severity 0) and in growing shift."""
    x, y = (t[:NUM_SHIFTED] for t in images.test)
    found: dict[str, list[dict[str, Any]]] = {}
    for kind, (severities, shift) in SHIFTS.items():
        found[kind] = []
        for severity in (0.0, *severities):
            moved = x if severity == 0 else shift(x, severity)
            entry: dict[str, Any] = {"severity": severity}
            if isinstance(method, Detector):
                scores = scores_of(method, moved, num_samples=num_samples)
            else:
                outputs = outputs_of(method, moved, num_samples=num_samples)
                scores = outputs.scores
                entry |= {
                    "accuracy": accuracy(outputs.probs, y),
                    "nll": nll(outputs.probs, y),
                    "ece": reliability(outputs.probs, y).ece,
                }
            entry["scores"] = {name: float(values.mean()) for name, values in scores.items()}
            entry["auc"] = {name: auroc(inside[name], values) for name, values in scores.items()}
            found[kind].append(entry)
    return found


def detection(inside: Tensor, outside: Tensor) -> dict[str, float]:
    return {"auc": auroc(inside, outside), "fpr95": fpr95(inside, outside), "aupr": aupr(inside, outside)}


def roc_points(inside: Tensor, outside: Tensor) -> dict[str, list[float]]:
    """The ROC curve at points evenly spaced along it."""
    curve = roc_curve(inside, outside)
    along = (curve.fpr + curve.tpr).contiguous()
    rows = torch.searchsorted(along, torch.linspace(0, 2, NUM_ROC_POINTS, dtype=along.dtype)).clamp_max(len(along) - 1)
    rows = torch.cat([rows.new_zeros(1), rows]).unique()
    return {"fpr": curve.fpr[rows].tolist(), "tpr": curve.tpr[rows].tolist()}


def histograms(scores: Mapping[str, Tensor]) -> dict[str, Any]:
    """Counts in bins common to all sets, from the 0.5% to the 99.5% quantile of all; the end bins hold the rest."""
    everything = torch.cat([*scores.values()]).sort().values
    everything = everything[everything.isfinite()]
    low = float(everything[int(0.005 * (len(everything) - 1))])
    high = float(everything[int(0.995 * (len(everything) - 1))])
    if high <= low:
        low, high = low - 0.5, high + 0.5
    edges = torch.linspace(low, high, NUM_HISTOGRAM_BINS + 1, dtype=torch.float64)
    counts = {
        name: torch.bincount(
            (torch.bucketize(values, edges) - 1).clamp(0, NUM_HISTOGRAM_BINS - 1), minlength=NUM_HISTOGRAM_BINS
        ).tolist()
        for name, values in scores.items()
    }
    return {"edges": edges.tolist(), "counts": counts}


def extremes(x: Tensor, scores: Tensor) -> dict[str, list[dict[str, Any]]]:
    """The least and the most uncertain images, the most extreme first, as compressed bytes in base64."""
    order = scores.argsort(stable=True).tolist()
    chosen = {"least": order[:NUM_GALLERY], "most": order[::-1][:NUM_GALLERY]}
    return {
        end: [{"index": i, "score": float(scores[i]), "image": encode_image(x[i, 0])} for i in rows]
        for end, rows in chosen.items()
    }


def encode_image(image: Tensor) -> str:
    """28×28 bytes, zlib, base64; `decode_image` is in the report."""
    return base64.b64encode(zlib.compress(as_bytes(image).contiguous().numpy().tobytes(), 9)).decode()


@torch.no_grad()
def prediction_cost(
    method: Any, model: nn.Module, x: Tensor, *, num_samples: int, seconds: float = 10.0
) -> dict[str, Any]:
    """Microseconds of the processor (`_wall`: of the clock) an input: the network's own pass, and x → probabilities.

    (Of a detector, x → score.) They are called in turns, so that a busy machine slows all of them.
    Where the predictive is Gaussian the probabilities are by probit, without samples; `_mc` is the mean softmax over
    `num_samples` samples, the one that the metrics are of.
    """

    def forward() -> object:
        return model(x).softmax(-1)

    def cheapest() -> object:
        if isinstance(method, Detector):
            return method.score(x)
        samples = num_samples if needs_samples else 0
        prediction = method.predict(x, n_samples=samples)
        return replace(prediction, link="mc" if needs_samples else "probit").probs

    def monte_carlo() -> object:
        return replace(method.predict(x, n_samples=num_samples), link="mc").probs

    needs_samples = not isinstance(method, Detector) and method.predict(x[:2], n_samples=2).samples is not None
    both = [forward, cheapest] if isinstance(method, Detector) else [forward, cheapest, monte_carlo]
    medians = _in_turns(both, seconds)
    names = ("us_map_forward", "us_per_prediction", "us_per_prediction_mc")
    found: dict[str, Any] = dict.fromkeys((*names, *(f"{name}_wall" for name in names)))
    for name, took in zip(names, medians, strict=False):
        found |= {name: 1e6 * took.cpu / len(x), f"{name}_wall": 1e6 * took.wall / len(x)}
    return found | {
        "ratio_to_map": found["us_per_prediction"] / found["us_map_forward"],
        "timing_batch": len(x),
    }


def _in_turns(functions: list[Callable[[], object]], seconds: float, *, most: int = 11) -> list[Seconds]:
    """Median time of each, called in turns, so that a busy machine slows all of them."""
    for function in functions:
        function()
    times: list[list[Seconds]] = [[] for _ in functions]
    began = now()
    while len(times[0]) < most and (len(times[0]) < 3 or (now() - began).wall < seconds):
        for function, found in zip(functions, times, strict=True):
            start = now()
            function()
            found.append(now() - start)
    return [
        Seconds(statistics.median(t.cpu for t in found), statistics.median(t.wall for t in found)) for found in times
    ]
