"""MAP, and MAP with a temperature chosen on held-out data: the cheapest calibration there is."""

from __future__ import annotations

from torch import Tensor, nn

from scalla.baselines.map import MAP
from scalla.benchmark.methods.row import Problem, Row, Settings


class Tempered(nn.Module):
    """f(x)/T."""

    def __init__(self, model: nn.Module, temperature: float) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) / self.temperature


def fit(problem: Problem, settings: Settings) -> MAP:
    model = problem.model
    if settings.get("temperature", 1.0) != 1.0:
        model = Tempered(model, settings["temperature"])
    return MAP(model, problem.likelihood, seed=problem.seed).fit(problem.loader(256))


ROWS = (
    Row("map", "MAP", fit, num_samples=1, num_seeds=5),
    Row(
        "map_temperature",
        "MAP, temperature scaled",
        fit,
        num_samples=1,
        num_seeds=5,
        protocols=("tuned",),
        trials=tuple({"temperature": t} for t in (0.8, 1.0, 1.25, 1.5, 2.0, 2.5)),
        note="a control: what one number, chosen on held-out data, does for calibration",
    ),
)
