"""ScaLLA, unbiased and biased: mirror surrogate from random weights, m = 100, one Rademacher probe a step, batches of
5 + 5 with the context in every one, Adam 5e-5, as published.

Published: 10⁶ steps. Here 10⁴, with a rate that falls to 0 on a cosine: more of them lower the kernel error, and cost
separation from what is unlike both data and context (`benchmarks/surrogates.py --starts`, docs/surrogates.md).

With a residual (`ScaLLA.fit_residual`): after the same fit, the prior precision of the same six trials by held-out
NLL, then v(x) on the same held-out data; beside them a context that is made of the training images, or that of the row.
"""

from __future__ import annotations

import torch

from scalla import ScaLLA
from scalla.benchmark.batches import TensorBatches
from scalla.benchmark.methods.row import Problem, Row, Settings
from scalla.types import InputError

#: settings that the fit depends on; the others come after it
OF_FIT = ("num_features", "surrogate", "start", "bias", "batch_size", "num_steps", "num_probes", "lr", "score_every")


def fit(problem: Problem, settings: Settings) -> ScaLLA:
    decisive = {name: settings[name] for name in OF_FIT}
    if problem.fits is None:
        method = fitted(problem, decisive)
    else:
        method = problem.fits.fit(problem.model, decisive, lambda: fitted(problem, decisive))
    reconfigure(method, settings)
    return method


def fitted(problem: Problem, settings: Settings) -> ScaLLA:
    method = ScaLLA(
        problem.model,
        problem.likelihood,
        num_features=settings["num_features"],
        surrogate=settings["surrogate"],
        surrogate_options={"start": settings["start"]},
        seed=problem.seed,
    )
    watched = problem.watched
    held_out = None if watched is None else TensorBatches(watched, watched.new_zeros(len(watched)), len(watched))
    return method.fit(
        problem.loader(settings["batch_size"], shuffle=True),
        context=problem.context,
        bias=settings["bias"],
        num_steps=settings["num_steps"],
        num_probes=settings["num_probes"],
        lr=settings["lr"],
        val_loader=held_out,
        score_every=settings["score_every"],
        progress_bar=problem.progress_bar,
    )


def fit_with_residual(problem: Problem, settings: Settings) -> ScaLLA:
    if problem.validation is None:
        raise InputError("the residual is calibrated on held-out data; the 'paper' protocol holds none out")
    method = fit(problem, settings)
    held_out = TensorBatches(*problem.validation, settings["batch_size"])
    precisions = torch.tensor(settings["prior_precisions"]).log10()
    method.optimize_prior_precision(
        method="gridsearch",
        val_loader=held_out,
        log_prior_prec_min=float(precisions[0]),
        log_prior_prec_max=float(precisions[-1]),
        grid_size=len(precisions),
        link_approx="mc",
    )
    context = problem.context if settings["residual_context"] == "context" else "generated"
    return method.fit_residual(problem.loader(1000), held_out, context=context, progress_bar=problem.progress_bar)


def reconfigure(method: ScaLLA, settings: Settings) -> None:
    method.prior_precision = float(settings["prior_precision"])


def found(method: ScaLLA) -> dict[str, float]:
    return {"prior_precision": float(method.prior_precision)}


SETTINGS: Settings = {
    "num_features": 100,
    "surrogate": "mirror",
    "start": "random",
    "num_steps": 10_000,
    "num_probes": 1,
    "batch_size": 5,
    "lr": 5e-5,
    "score_every": 250,
    "prior_precision": 1.0,
}
QUICK: Settings = {"num_steps": 100, "score_every": 10, "batch_size": 32, "lr": 1e-3}
PRECISIONS = (0.1, 1.0, 10.0, 100.0, 1e3, 1e4)


def _row(name: str, title: str, *, bias: bool) -> Row:
    return Row(
        name,
        title,
        fit,
        settings={**SETTINGS, "bias": bias},
        quick=QUICK,
        variants={"prior 1": {}, "marglik": {"marglik": True}},
        trials=tuple({"prior_precision": d} for d in PRECISIONS),
        after_fit=frozenset({"prior_precision"}),
        reconfigure=reconfigure,
        marglik=lambda method: method.optimize_prior_precision(method="marglik"),
        found=found,
        note="10,000 steps with a rate that falls to 0, in place of 10⁶",
    )


def _row_with_residual(name: str, title: str, *, bias: bool, context: str, note: str) -> Row:
    return Row(
        name,
        title,
        fit_with_residual,
        settings={**SETTINGS, "bias": bias, "prior_precisions": PRECISIONS, "residual_context": context},
        quick=QUICK,
        found=found_of_residual,
        num_seeds=5,
        protocols=("tuned",),
        note=note,
    )


def found_of_residual(method: ScaLLA) -> dict[str, float]:
    assert method.residual is not None
    names = ("outputs_scale", "base", "log_size", "power")
    return found(method) | {
        f"residual_{name}": v for name, v in zip(names, method.residual.shape.tolist(), strict=True)
    }


ROWS = (
    _row("scalla", "ScaLLA", bias=False),
    _row("scalla_biased", "ScaLLA biased", bias=True),
    _row_with_residual(
        "scalla_residual",
        "ScaLLA + residual",
        bias=False,
        context="generated",
        note="no auxiliary data: its context is made of the training images",
    ),
    _row_with_residual(
        "scalla_biased_residual",
        "ScaLLA biased + residual",
        bias=True,
        context="context",
        note="v(x) is calibrated on the context beside the held-out data",
    ),
)
