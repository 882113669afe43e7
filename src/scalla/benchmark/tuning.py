"""The `tuned` protocol: the same few trials for every method, on held-out training data alone.

Methods are chosen by the NLL of their mean softmax on the validation images. Detectors have no probabilities:
they are chosen by AUROC of validation images against the context's held-out part (never KMNIST).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from scalla.benchmark.clock import Seconds, now
from scalla.benchmark.images import Images
from scalla.benchmark.measure import outputs_of, scores_of
from scalla.benchmark.methods.row import Fitted, Problem, Row, Settings, seeded_fit
from scalla.metrics import auroc, nll
from scalla.types import InputError

#: validation inputs and logit samples that a trial is judged by
NUM_VALIDATION, NUM_TRIAL_SAMPLES = 2000, 256


@dataclass(frozen=True)
class Tuned:
    """The method with the settings of the best trial, and what every trial gave (the least value wins)."""

    method: Fitted
    settings: dict[str, Any]
    trials: list[dict[str, Any]]
    fit_time: Seconds
    tuning_time: Seconds


def fit_row(row: Row, problem: Problem, settings: Settings) -> Tuned:
    """One fit with the settings given, and the marginal likelihood after it where they say so."""
    start = now()
    method = seeded_fit(row, problem, settings)
    fitted = now()
    if settings.get("marglik"):
        assert row.marglik is not None, row.name
        row.marglik(method)
    return Tuned(method, dict(settings), [], fitted - start, now() - fitted)


def tune_row(row: Row, problem: Problem, images: Images, settings: Settings) -> Tuned:
    """Every trial of the row, then the best one in full."""
    if not row.trials:
        return fit_row(row, problem, settings)
    start = now()
    # A trial may be shorter than the settings given (those of a quick run, say), never longer.
    cheap = {k: min(v, settings[k]) for k, v in row.trial.items()}
    kept: tuple[dict[str, Any], Fitted, Seconds] | None = None
    trials: list[dict[str, Any]] = []
    for trial in row.trials:
        tried = {**settings, **trial, **cheap}
        if kept is None or kept[0] != _before_fit(row, tried):
            kept = None  # so that two of them are never in memory at once
            began = now()
            method = seeded_fit(row, problem, tried)
            kept = _before_fit(row, tried), method, now() - began
        if row.reconfigure is not None:
            row.reconfigure(kept[1], tried)
        trials.append({**trial, "value": _judge(row, kept[1], images, tried)})
    best = min(range(len(trials)), key=lambda i: trials[i]["value"])
    final = {**settings, **row.trials[best]}
    if kept is not None and kept[0] == _before_fit(row, final) and row.reconfigure is not None:
        row.reconfigure(kept[1], final)
        return Tuned(kept[1], final, trials, kept[2], now() - start - kept[2])
    kept = None
    began = now()
    method = seeded_fit(row, problem, final)
    return Tuned(method, final, trials, now() - began, began - start)


def choose_score(method: Fitted, images: Images, settings: Settings) -> dict[str, Any]:
    """The score that tells the context's held-out part best from validation images."""
    if images.validation is None or images.context_held_out is None:
        raise InputError("the paper protocol holds nothing out; scores are chosen in the 'tuned' protocol only")
    num_samples = min(settings["num_samples"], NUM_TRIAL_SAMPLES)
    inside = scores_of(method, images.validation[0][:NUM_VALIDATION], num_samples=num_samples)
    outside = scores_of(method, images.context_held_out, num_samples=num_samples)
    found = {name: auroc(scores, outside[name]) for name, scores in inside.items()}
    best = max(found, key=found.__getitem__)
    return {"score": best, "held_out_auc": found}


def _judge(row: Row, method: Fitted, images: Images, settings: Settings) -> float:
    if images.validation is None or images.context_held_out is None:
        raise InputError(
            "the paper protocol holds nothing out; hyper-parameters are tuned in the 'tuned' protocol only"
        )
    x, y = (t[:NUM_VALIDATION] for t in images.validation)
    if row.kind == "method":
        outputs = outputs_of(method, x, num_samples=min(settings["num_samples"], NUM_TRIAL_SAMPLES))
        return nll(outputs.probs, y)
    with torch.no_grad():
        return -auroc(*(scores_of(method, x, num_samples=0)["score"] for x in (x, images.context_held_out)))


def _before_fit(row: Row, settings: Settings) -> dict[str, Any]:
    return {k: v for k, v in settings.items() if k not in row.after_fit}
