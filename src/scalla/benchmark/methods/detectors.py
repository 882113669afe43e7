"""Post-hoc detectors on the same network. In `tuned` they are chosen by AUROC against the held-out context."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from scalla.baselines import detectors
from scalla.benchmark.methods.row import Problem, Row, Settings


def _row(
    name: str, title: str, build: Callable[..., Any], *, trials: tuple[Mapping[str, Any], ...] = (), **settings: Any
) -> Row:
    def fit(problem: Problem, given: Settings) -> Any:
        options = {k: v for k, v in given.items() if k != "num_samples"}
        return build(problem.model, **options).fit(problem.loader(1000))

    return Row(name, title, fit, "detector", settings=settings, trials=trials, num_seeds=5)


ROWS = (
    _row("msp", "MSP", detectors.MSP),
    _row(
        "energy",
        "Energy",
        detectors.Energy,
        trials=tuple({"temperature": t} for t in (0.5, 1.0, 2.0, 5.0, 10.0, 100.0)),
    ),
    _row("mahalanobis", "Mahalanobis", detectors.Mahalanobis),
    _row("relative_mahalanobis", "Relative Mahalanobis", detectors.Mahalanobis, relative=True),
    _row("knn", "kNN", detectors.KNN, trials=tuple({"num_neighbours": k} for k in (1, 5, 10, 50, 100, 200))),
    _row("vim", "ViM", detectors.ViM, trials=tuple({"num_principal": k} for k in (10, 20, 50, 100, 150, 190))),
    _row(
        "gmm",
        "Gaussian per class",
        detectors.GaussianMixture,
        trials=tuple({"ridge": r} for r in (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)),
    ),
)
