"""MFVI with the published 8,000 iterations, batch 100 and 20 samples; its rates so that σ and μ both move."""

from __future__ import annotations

from scalla.baselines.mfvi import MFVI
from scalla.benchmark.methods.row import Problem, Row, Settings


def fit(problem: Problem, settings: Settings) -> MFVI:
    method = MFVI(
        problem.model,
        problem.likelihood,
        prior_precision=settings["prior_precision"],
        num_steps=settings["num_steps"],
        lr=settings["lr"],
        lr_log_std=settings["lr_log_std"],
        seed=problem.seed,
    )
    return method.fit(problem.loader(settings["batch_size"], shuffle=True), progress_bar=problem.progress_bar)


ROWS = (
    Row(
        "mfvi",
        "MFVI",
        fit,
        settings={"prior_precision": 1.0, "num_steps": 8000, "batch_size": 100, "lr": 5e-3, "lr_log_std": 0.1},
        quick={"num_steps": 100},
        variants={"": {}, "published rates": {"lr": 1e-3, "lr_log_std": 1e-3}},
        trials=tuple({"prior_precision": d, "lr": lr} for d in (1.0, 10.0, 100.0) for lr in (1e-3, 5e-3)),
        trial={"num_steps": 2000},
        num_samples=20,
        note="20 weight draws, as published: each is a forward pass. The published rates barely move σ",
    ),
)
