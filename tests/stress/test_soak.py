"""Predictions without end: the memory stays flat, and the same inputs give the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fault_table import FaultTable

from cases import CASES, normal
from children import Child
from scalla import ScaLLA

#: what the memory may grow by, from the first tenth of the predictions to the last
MOST_MB = 8.0


def resident_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS: a soak needs Linux")


def predict_again_and_again(count: int) -> dict[str, Any]:
    """Batches of 1 to 8 in turn, by every way of asking; how many differed from the first time, and the growth."""
    case = CASES["cnn_batchnorm"]
    la = ScaLLA(case.model(), num_features=5, seed=7).fit(case.loader(), num_steps=5)
    batches = [normal(size, 1, 6, 6, seed=size) for size in range(1, 9)]
    ways = (
        lambda x: la(x),
        lambda x: la(x, link_approx="mc"),
        lambda x: la.ood_score(x),
        lambda x: la.functional_samples(x, 3),
        lambda x: la.predict(x).var,
    )
    wanted = [[way(x) for x in batches] for way in ways]
    differed, after_a_tenth = 0, 0.0
    for number in range(count):
        way, batch = number % len(ways), number // len(ways) % len(batches)
        differed += not torch.equal(ways[way](batches[batch]), wanted[way][batch])
        if number == count // 10:
            after_a_tenth = resident_mb()
    return {"differed": differed, "grown": resident_mb() - after_a_tenth}


@pytest.mark.parametrize("count", [2000, pytest.param(200_000, marks=pytest.mark.stress)])
def test_a_soak_leaves_memory_and_results_as_they_were(table: FaultTable, count: int) -> None:
    found = Child(predict_again_and_again, count).result(patience=3600)
    assert found["differed"] == 0
    assert found["grown"] <= MOST_MB, f"the memory grew by {found['grown']:.1f} MB"
    outcome = f"all equal, memory {found['grown']:+.1f} MB"
    table.add("predictions one after the other", "the same bits, memory flat", count=count, outcome=outcome)
