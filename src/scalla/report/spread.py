"""Means over seeds, and what can be said about their differences: nothing from one seed, an interval from more."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

#: 97.5% quantiles of Student's t by degrees of freedom; beyond them the normal's is close
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
NORMAL_QUANTILE = 1.960


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (n − 1 in the denominator) over `count` seeds; None where one seed has none."""

    mean: float
    std: float | None
    count: int


@dataclass(frozen=True)
class Interval:
    """A 95% interval about `mean`; no half width from a single value."""

    mean: float
    half_width: float | None
    count: int

    @property
    def sign(self) -> int:
        """+1 or −1 where the interval leaves zero out, else 0."""
        if self.half_width is None or abs(self.mean) <= self.half_width:
            return 0
        return 1 if self.mean > 0 else -1


def spread(values: Iterable[float]) -> Spread | None:
    found = [*values]
    if not found:
        return None
    return Spread(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, len(found))


def t_quantile(degrees: int) -> float:
    return T_QUANTILES[degrees - 1] if degrees <= len(T_QUANTILES) else NORMAL_QUANTILE


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Interval | None:
    """Mean of ours − theirs over the seeds that both have: runs of one seed share their network."""
    found = spread(ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys()))
    if found is None:
        return None
    if found.std is None:
        return Interval(found.mean, None, 1)
    return Interval(found.mean, t_quantile(found.count - 1) * found.std / math.sqrt(found.count), found.count)


def one_more_seed(values: Iterable[float]) -> Interval | None:
    """Where a further single run would fall with 95% probability: mean ± t · std · √(1 + 1/n)."""
    found = spread(values)
    if found is None:
        return None
    if found.std is None:
        return Interval(found.mean, None, 1)
    return Interval(found.mean, t_quantile(found.count - 1) * found.std * math.sqrt(1 + 1 / found.count), found.count)
