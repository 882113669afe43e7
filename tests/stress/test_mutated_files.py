"""Damaged files of ours: a saved posterior and the checkpoint of a fit load right, or are refused by our own error.

`SCALLA_STRESS_FILES` is the number of files of the long form, 10,000 unless it is set.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_table import FaultTable
from mutations import mutants, outcomes
from torch import nn

from cases import loader, mlp, normal
from scalla import FileFormatError, ScaLLA

LONG = int(os.environ.get("SCALLA_STRESS_FILES", "10000"))
#: what reading a file of a few kilobytes may take, a hundred times over
MEMORY_MB = 64.0
POINTS = normal(5, 2, seed=11)


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp()


def unfitted() -> ScaLLA:
    return ScaLLA(network(), num_features=4)


def fit(la: ScaLLA, **options: Any) -> ScaLLA:
    return la.fit(loader(normal(20, 2), torch.arange(20) % 3), num_steps=3, **options)


class Stopped(Exception):
    """What ends a fit in the midst."""


def stop(entry: Any) -> None:
    if entry.step >= 2:
        raise Stopped


def mutants_of_a_posterior(count: int, folder: Path, *, seed: int = 0) -> Counter[str]:
    path = folder / "posterior.safetensors"
    la = fit(unfitted())
    la.save(path)
    wanted = la(POINTS)
    return outcomes(
        mutants(path.read_bytes(), count, seed=seed),
        path,
        lambda file: ScaLLA.load(file, network()),
        own_errors=FileFormatError,
        is_right=lambda loaded: torch.equal(loaded(POINTS), wanted),
        memory_mb=MEMORY_MB,
    )


def mutants_of_a_checkpoint(count: int, folder: Path, *, seed: int = 0) -> Counter[str]:
    """Of a fit that was stopped between two steps: it goes on to the same end, or says that the file is damaged."""
    wanted = fit(unfitted())(POINTS)
    with pytest.raises(Stopped):
        fit(unfitted(), checkpoint_dir=folder, checkpoint_every=0, callback=stop)
    path = folder / "fit.safetensors"
    return outcomes(
        mutants(path.read_bytes(), count, seed=seed),
        path,
        lambda file: fit(unfitted(), checkpoint_dir=file.parent, checkpoint_every=1e9, resume=True),
        own_errors=FileFormatError,
        is_right=lambda resumed: torch.equal(resumed(POINTS), wanted),
        memory_mb=MEMORY_MB,
    )


KINDS = {"saved posterior": mutants_of_a_posterior, "checkpoint of a fit": mutants_of_a_checkpoint}


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("saved posterior", 200),
        ("checkpoint of a fit", 100),
        *(pytest.param(kind, LONG // 2, marks=pytest.mark.stress) for kind in KINDS),
    ],
)
def test_a_damaged_file_loads_right_or_is_refused(kind: str, count: int, tmp_path: Path, table: FaultTable) -> None:
    found = KINDS[kind](count, tmp_path)
    assert sum(found.values()) == count
    assert found["refused"] > count // 2
    table.add(
        f"{kind}: bits flipped, cut, lengths altered",
        "loads right, or our own error; no crash, no hang",
        count=count,
        outcome=f"{found['refused']:,} refused, {found['right']:,} right",
    )
