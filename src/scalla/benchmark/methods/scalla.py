"""ScaLLA, unbiased and biased: mirror surrogate, m = 100, one Rademacher probe a step, context in every batch.

Published: batches of 5 + 5 for 10⁶ steps at 5e-5, that is 10⁷ Jacobian-vector products. Larger batches average the
probe's noise over more pairs, so a fraction of them does.
"""

from __future__ import annotations

from scalla import ScaLLA
from scalla.benchmark.batches import TensorBatches
from scalla.benchmark.methods.row import Problem, Row, Settings


def fit(problem: Problem, settings: Settings) -> ScaLLA:
    method = ScaLLA(
        problem.model,
        problem.likelihood,
        num_features=settings["num_features"],
        surrogate=settings["surrogate"],
        prior_precision=settings["prior_precision"],
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


def reconfigure(method: ScaLLA, settings: Settings) -> None:
    method.prior_precision = float(settings["prior_precision"])


def found(method: ScaLLA) -> dict[str, float]:
    return {"prior_precision": float(method.prior_precision)}


def _row(name: str, title: str, *, bias: bool) -> Row:
    return Row(
        name,
        title,
        fit,
        settings={
            "num_features": 100,
            "surrogate": "mirror",
            "bias": bias,
            "num_steps": 4000,
            "num_probes": 1,
            "batch_size": 64,
            "lr": 1e-3,
            "score_every": 200,
            "prior_precision": 1.0,
        },
        quick={"num_steps": 100, "score_every": 10, "batch_size": 32},
        variants={"prior 1": {}, "marglik": {"marglik": True}},
        trials=tuple({"prior_precision": d} for d in (0.1, 1.0, 10.0, 100.0, 1e3, 1e4)),
        after_fit=frozenset({"prior_precision"}),
        reconfigure=reconfigure,
        marglik=lambda method: method.optimize_prior_precision(method="marglik"),
        found=found,
    )


ROWS = (_row("scalla", "ScaLLA", bias=False), _row("scalla_biased", "ScaLLA biased", bias=True))
