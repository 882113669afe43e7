"""Controls: what an out-of-distribution score must beat before it says anything."""

from __future__ import annotations

from scalla.baselines.controls import Brightness, ContextClassifier, PriorScore
from scalla.benchmark.methods.row import Problem, Row, Settings


def context_classifier(problem: Problem, settings: Settings) -> ContextClassifier:
    method = ContextClassifier(num_epochs=settings["num_epochs"], seed=problem.seed)
    return method.fit(problem.loader(1000), context=problem.context, progress_bar=problem.progress_bar)


def prior_score(problem: Problem, settings: Settings) -> PriorScore:
    return PriorScore(problem.model, statistic=settings["statistic"]).fit(problem.loader(1000))


def brightness(problem: Problem, settings: Settings) -> Brightness:
    return Brightness().fit(problem.loader(1000))


ROWS = (
    Row(
        "context_classifier",
        "Classifier, train against context",
        context_classifier,
        "control",
        settings={"num_epochs": 20},
        quick={"num_epochs": 2},
        num_seeds=5,
        note="sees the context, nothing of the network: what the context alone gives away",
    ),
    Row(
        "prior_score",
        "Prior alone, log det K(x, x)",
        prior_score,
        "control",
        settings={"statistic": "logdet"},
        note="no data but θ*",
    ),
    Row("brightness", "Mean brightness", brightness, "control", num_seeds=5),
)
