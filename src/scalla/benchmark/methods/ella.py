"""ELLA with the published M = 1024, K = 50, δ = 1 (laplace-torch fills the diagonal blocks of the Gram matrix)."""

from __future__ import annotations

from scalla.baselines.ella import ELLA
from scalla.benchmark.methods.row import Problem, Row, Settings


def fit(problem: Problem, settings: Settings) -> ELLA:
    method = ELLA(
        problem.model,
        problem.likelihood,
        num_points=settings["num_points"],
        num_features=settings["num_features"],
        prior_precision=settings["prior_precision"],
        seed=problem.seed,
    )
    return method.fit(problem.loader(settings["batch_size"]), progress_bar=problem.progress_bar)


def reconfigure(method: ELLA, settings: Settings) -> None:
    # laplace-torch factorises anew when it is next asked for a posterior of its own; our predict asks for the factor.
    method._laplace.prior_precision = float(settings["prior_precision"])
    method._laplace._build_precision()


ROWS = (
    Row(
        "ella",
        "ELLA",
        fit,
        settings={"num_points": 1024, "num_features": 50, "prior_precision": 1.0, "batch_size": 64},
        quick={"num_points": 128, "num_features": 20},
        trials=tuple({"prior_precision": d} for d in (0.01, 0.1, 1.0, 10.0, 100.0, 1e3)),
        after_fit=frozenset({"prior_precision"}),
        reconfigure=reconfigure,
        note="the features of laplace-torch by C backward passes and their factors, in place of K forward-mode ones",
    ),
)
