"""Probabilities, variances and the OOD score of many inputs ÷ the network's plain forward pass over them.

laplace-torch beside it, in the same rounds: its moments of f, then the probit link, the variances and the entropy as
its users compute them. Its all-layer methods run with Jacobians input by input (scalla.baselines), which are several
times faster than its own, and on fewer inputs. Fits are not timed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from networks import Case
from timing import in_turns
from torch import Tensor

from scalla import ScaLLA
from scalla.baselines.ella import ELLA
from scalla.baselines.laplace_torch import quiet
from scalla.baselines.lla import LLA

#: inputs in a batch
BATCH = 500


def measure(case: Case, *, num_inputs: int, num_slow: int, num_features: int, repeats: int) -> dict[str, Any]:
    model = case.network()
    x, y = case.data(num_inputs)
    loader = [(x[:200], y[:200])]
    fast: dict[str, Callable[[Tensor], object]] = {"forward": model}
    for kind in ("mirror", "trunk"):
        fast[kind] = scalla_of(
            ScaLLA(model, num_features=num_features, surrogate=kind, prior_precision=1.0).fit(loader, num_steps=1)
        )
    for structure in ("kron", "full"):
        fitted = LLA(model, subset="last_layer", structure=structure).fit(loader)  # type: ignore[arg-type]
        fast[f"laplace-torch last layer {structure}"] = moments_of(fitted)
    slow: dict[str, Callable[[Tensor], object]] = {
        "laplace-torch all layers kron": moments_of(LLA(model, subset="all", structure="kron").fit(loader)),
        "laplace-torch ELLA": moments_of(ELLA(model, num_points=50, num_features=50).fit(loader)),
    }
    runs = {name: over(f, x) for name, f in fast.items()} | {name: over(f, x[:num_slow]) for name, f in slow.items()}
    found = in_turns(runs, repeats=repeats)
    per_input = {name: [s / (num_inputs if name in fast else num_slow) for s in found[name]] for name in runs}
    return {
        "network": case.name,
        "num_inputs": num_inputs,
        "num_inputs_all_layers": num_slow,
        "num_features": num_features,
        "microseconds_an_input": {name: 1e6 * statistics.median(s) for name, s in per_input.items()},
        "ratio": {
            name: statistics.median(a / b for a, b in zip(s, per_input["forward"], strict=True))
            for name, s in per_input.items()
        },
        "repeats": repeats,
    }


def over(function: Callable[[Tensor], object], x: Tensor) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad(), quiet():
            for part in x.split(BATCH):
                function(part)

    return run


def scalla_of(la: ScaLLA) -> Callable[[Tensor], object]:
    def run(x: Tensor) -> object:
        prediction = la.predict(x, n_samples=0)
        return prediction.probs, prediction.var, prediction.gaussian_entropy

    return run


def moments_of(method: LLA | ELLA) -> Callable[[Tensor], object]:
    posterior: Any = method._laplace

    def run(x: Tensor) -> object:
        mean, cov = posterior._glm_predictive_distribution(x)
        var = cov.diagonal(dim1=-2, dim2=-1)
        probs = torch.softmax(mean / (1 + math.pi / 8 * var).sqrt(), -1)
        return probs, var, 0.5 * torch.logdet(cov.double())

    return run
