"""The most memory that a fit and a prediction hold ÷ that of a plain training step (Adam), same network and batch.

Each is measured in a process of its own: `python memory.py NETWORK TASK`, which prints megabytes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from networks import CLASSES, FMNIST, LARGE, QUICK, Case
from torch.nn import functional as F

from scalla import ScaLLA
from scalla.benchmark.environment import peak_memory_mb

TASKS = ("import", "train", "fit", "predict")
CASES = {case.name: case for case in (*QUICK, FMNIST, *LARGE, *CLASSES)}


def measure(case: Case, kind: str) -> dict[str, Any]:
    found = {task: _in_child(case.name, task, kind) for task in TASKS}
    return {
        "network": case.name,
        "surrogate": kind,
        "batch": case.batch,
        "mb": found,
        "fit_ratio": found["fit"] / found["train"],
        "predict_ratio": found["predict"] / found["train"],
    }


def _in_child(name: str, task: str, kind: str) -> float:
    command = [sys.executable, str(Path(__file__)), name, task, kind]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def run(case: Case, task: str, kind: str) -> None:
    if task == "import":
        return
    model = case.network()
    x, y = case.data()
    if task == "train":
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return
    num_steps = 2 if task == "fit" else 0
    la = ScaLLA(model, surrogate=kind).fit([(x, y)], num_steps=num_steps)
    if task == "predict":
        prediction = la.predict(x, n_samples=0)
        assert torch.isfinite(prediction.probs).all()
        assert torch.isfinite(prediction.gaussian_entropy).all()


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(CASES[sys.argv[1]], sys.argv[2], sys.argv[3])
    print(peak_memory_mb())
