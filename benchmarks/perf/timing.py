"""Seconds of the processor: medians over repeats, the things that are compared taking turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import numpy as np

from scalla.benchmark.clock import now


def seconds(function: Callable[[], object]) -> float:
    began = now()
    function()
    return (now() - began).cpu


def in_turns(functions: Mapping[str, Callable[[], object]], *, repeats: int) -> dict[str, list[float]]:
    """Seconds of each, after one run that does not count."""
    for function in functions.values():
        function()
    rounds = [{name: seconds(function) for name, function in functions.items()} for _ in range(repeats)]
    return {name: [r[name] for r in rounds] for name in functions}


def median_ratio(above: list[float], below: list[float]) -> float:
    """The median of the ratios within each round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def exponent(sizes: list[float], values: list[float]) -> float:
    """k of value ∝ size^k, by least squares on logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])
