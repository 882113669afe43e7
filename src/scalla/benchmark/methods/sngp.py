"""SNGP: bound 6 on every hidden layer, D = 1024 features, length scale 2, ridge 1; trained from scratch."""

from __future__ import annotations

from scalla.baselines.sngp import SNGP
from scalla.benchmark.methods.row import Problem, Row, Settings


def fit(problem: Problem, settings: Settings) -> SNGP:
    method = SNGP(
        problem.model,
        problem.likelihood,
        norm_bound=settings["norm_bound"],
        num_features=settings["num_features"],
        length_scale=settings["length_scale"],
        ridge=settings["ridge"],
        num_epochs=settings["num_epochs"],
        seed=problem.seed,
    )
    return method.fit(problem.loader(settings["batch_size"], shuffle=True), progress_bar=problem.progress_bar)


ROWS = (
    Row(
        "sngp",
        "SNGP",
        fit,
        settings={
            "norm_bound": 6.0,
            "num_features": 1024,
            "length_scale": 2.0,
            "ridge": 1.0,
            "num_epochs": 20,
            "batch_size": 100,
        },
        quick={"num_features": 256, "num_epochs": 2},
        trials=tuple({"norm_bound": b, "length_scale": s} for b in (2.0, 6.0) for s in (1.0, 2.0, 4.0)),
        trial={"num_epochs": 4},
        note="a network of its own, trained from scratch; published without spectral normalisation in effect, "
        "without √(2/D), and with a precision updated on the test batches",
    ),
)
