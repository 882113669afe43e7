"""FMGP with the published M = 200, batch 100, Adam 1e-4 (length scales: the logarithm taken once)."""

from __future__ import annotations

from scalla.baselines.fmgp import FMGP
from scalla.benchmark.methods.row import Problem, Row, Settings


def fit(problem: Problem, settings: Settings) -> FMGP:
    method = FMGP(
        problem.model,
        problem.likelihood,
        num_inducing=settings["num_inducing"],
        num_steps=settings["num_steps"],
        lr=settings["lr"],
        last_layer_kernel=settings["last_layer_kernel"],
        seed=problem.seed,
    )
    return method.fit(problem.loader(settings["batch_size"], shuffle=True), progress_bar=problem.progress_bar)


ROWS = (
    Row(
        "fmgp",
        "FMGP",
        fit,
        settings={"num_inducing": 200, "num_steps": 50_000, "batch_size": 100, "lr": 1e-4, "last_layer_kernel": False},
        quick={"num_inducing": 50, "num_steps": 100},
        trials=tuple({"last_layer_kernel": k, "lr": lr} for k in (False, True) for lr in (1e-4, 1e-3, 1e-2)),
        trial={"num_steps": 3000},
    ),
)
