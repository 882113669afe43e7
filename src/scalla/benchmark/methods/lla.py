"""LLA in three curvatures. Published: all layers in Kronecker factors (its text says last layer)."""

from __future__ import annotations

from scalla.baselines.lla import LLA
from scalla.benchmark.methods.row import Problem, Row, Settings


def fit(problem: Problem, settings: Settings) -> LLA:
    method = LLA(
        problem.model,
        problem.likelihood,
        subset=settings["subset"],
        structure=settings["structure"],
        prior_precision=settings["prior_precision"],
        sigma_noise=settings.get("sigma_noise", 1.0),
        seed=problem.seed,
    )
    return method.fit(problem.loader(settings["batch_size"]), progress_bar=problem.progress_bar)


def reconfigure(method: LLA, settings: Settings) -> None:
    method._fitted().prior_precision = float(settings["prior_precision"])


def found(method: LLA) -> dict[str, float]:
    return {"prior_precision": method.fitted_prior_precision}


def _row(name: str, title: str, subset: str, structure: str, num_seeds: int, note: str = "") -> Row:
    return Row(
        name,
        title,
        fit,
        settings={"subset": subset, "structure": structure, "prior_precision": 1.0, "batch_size": 256},
        variants={"prior 1": {}, "marglik": {"marglik": True}},
        trials=tuple({"prior_precision": d} for d in (0.1, 1.0, 10.0, 100.0, 1e3, 1e4)),
        after_fit=frozenset({"prior_precision"}),
        reconfigure=reconfigure,
        marglik=lambda method: method.optimize_prior_precision(),
        found=found,
        num_seeds=num_seeds,
        note=note,
    )


ROWS = (
    _row("lla_last_kron", "LLA, last layer, KFAC", "last_layer", "kron", 5),
    _row("lla_last_full", "LLA, last layer, full", "last_layer", "full", 5),
    _row(
        "lla_all_kron",
        "LLA, all layers, KFAC",
        "all",
        "kron",
        3,
        note="the posterior of laplace-torch; its predictive from the factors of the layers, a fourteenth of the time",
    ),
)
