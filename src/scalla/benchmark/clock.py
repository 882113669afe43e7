"""Seconds of a run, twice: of the processor, which other work on the machine leaves alone, and of the clock."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Seconds:
    """`cpu` is of all threads of this process: with one thread, what the clock shows on a machine that is idle."""

    cpu: float = 0.0
    wall: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.cpu + other.cpu, self.wall + other.wall)

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.cpu - other.cpu, self.wall - other.wall)

    def named(self, what: str) -> dict[str, float]:
        """As columns of a record."""
        return {f"{what}_seconds": self.cpu, f"{what}_wall_seconds": self.wall}


def now() -> Seconds:
    """A moment; the difference of two is what passed between them."""
    return Seconds(time.process_time(), time.perf_counter())
