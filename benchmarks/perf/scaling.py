"""Seconds of a fit's step against P, B, S, C and m, of the precision's pass against N; and the fitted exponents."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from networks import mlp
from step import Prepared
from timing import exponent, in_turns
from torch import Tensor

from scalla.batches import EndlessBatches
from scalla.fitting import sum_ggn

#: the sizes from which one is varied at a time
BASE = {"width": 512, "B": 128, "S": 1, "C": 10, "m": 100}
SIZES = {
    "P": (64, 256, 1024, 3200, 9600),  # widths: P from 1e4 to 1e8
    "B": (16, 64, 256, 1024),
    "S": (1, 2, 4, 8),
    "C": (10, 30, 100, 300, 1000),
    "m": (10, 30, 100, 300),
}
#: steps that are timed together
NUM_STEPS = 3
QUICK_SIZES = {"P": (16, 64), "B": (4, 16), "S": (1, 2), "C": (3, 6), "m": (4, 8)}


def measure(*, quick: bool, repeats: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    base = {"width": 32, "B": 8, "S": 1, "C": 3, "m": 4} if quick else BASE
    curves = []
    for letter, sizes in (QUICK_SIZES if quick else SIZES).items():
        points = []
        for size in sizes:
            setting = base | {"width" if letter == "P" else letter: size}
            if letter == "P":
                setting["B"] = min(setting["B"], 32)  # so that the largest takes seconds
            parameters, run = _step(**setting)
            found = in_turns({"step": run}, repeats=1 if parameters > 5e6 else repeats)["step"]
            points.append((parameters if letter == "P" else size, statistics.median(found) / NUM_STEPS))
            progress(f"step, {letter} = {points[-1][0]:.0e}: {points[-1][1]:.2g} s")
        curves.append(_curve(letter, "step", points))
    points = []
    for num in (50, 200) if quick else (1000, 4000, 16_000):
        points.append((num, statistics.median(in_turns({"ggn": _ggn(num, **base)}, repeats=repeats)["ggn"])))
        progress(f"precision, N = {num}: {points[-1][1]:.2g} s")
    curves.append(_curve("N", "precision", points))
    return curves


def _curve(letter: str, what: str, points: list[tuple[float, float]]) -> dict[str, Any]:
    sizes, values = [float(a) for a, _ in points], [b for _, b in points]
    return {"letter": letter, "what": what, "sizes": sizes, "seconds": values, "exponent": exponent(sizes, values)}


def _prepared(num: int, *, width: int, B: int, S: int, C: int, m: int) -> Prepared:
    torch.manual_seed(0)
    model = mlp(width if width < 1024 else 1024, width, 2, C).eval()
    x = torch.rand(num, model[0].in_features)
    return Prepared.of(model, x, torch.randint(C, (num,)), "mirror", m)


def _step(**setting: int) -> tuple[int, Callable[[], None]]:
    prepared = _prepared(setting["B"], **setting)
    run = prepared.step(NUM_STEPS, num_probes=setting["S"])
    return sum(p.numel() for p in prepared.features.params.values()), run


def _ggn(num: int, **setting: int) -> Callable[[], Tensor]:
    prepared = _prepared(num, **setting)
    prepared.features.set_training(False)
    labels = torch.randint(setting["C"], (num,))
    data = EndlessBatches(list(zip(prepared.x.split(setting["B"]), labels.split(setting["B"]), strict=True)), seed=0)
    return lambda: sum_ggn(prepared.features, data, "classification").ggn
