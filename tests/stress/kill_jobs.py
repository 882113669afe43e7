"""What is killed: a fit, its pass over the data, a save, a run of the benchmark. Each tells when it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cases import mlp, normal
from children import report
from scalla import ScaLLA
from scalla.training import HistoryEntry

NUM_STEPS, NUM_BATCHES = 60, 40


class WithDropout(nn.Module):
    """A surrogate of one's own with dropout, whose random numbers must go on where they were."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3 * 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).unflatten(1, (3, 5))


def network() -> nn.Module:
    torch.manual_seed(3)
    return mlp()


def train_loader() -> DataLoader[Any]:
    x = normal(4 * NUM_BATCHES, 2, seed=1)
    y = torch.randint(3, (len(x),), generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)


def fit(folder: str, *, phase: str, resume: bool, checkpoint_every: float = 0.0) -> dict[str, Any]:
    """To its end, in float32, with context, bias and dropout; "begun" is told where `phase` begins."""
    torch.manual_seed(4)
    la = ScaLLA(network(), num_features=5, surrogate=WithDropout(), seed=7)

    def tell(entry: HistoryEntry) -> None:
        if phase == "training" and entry.step == 1:
            report("begun")
        if phase == "pass" and entry.step == NUM_STEPS:
            report("begun")

    if resume:
        report("begun")
    la.fit(
        train_loader(),
        context=normal(20, 2, seed=5) + 3,
        bias=True,
        num_steps=NUM_STEPS,
        num_probes=2,
        checkpoint_dir=folder,
        checkpoint_every=checkpoint_every,
        resume=resume,
        callback=tell,
    )
    return everything(la)


def everything(la: ScaLLA) -> dict[str, Any]:
    assert la.posterior is not None
    assert la.surrogate is not None
    x = normal(6, 2, seed=9)
    weights = {f"weight {k}": v for k, v in la.surrogate.state_dict().items()}
    return {
        **weights,
        "losses": [entry.loss for entry in la.history],
        "H": la.posterior.ggn,
        "data loss": la.posterior.loss,
        "number of data": la.n_data,
        "probabilities": la(x),
        "score": la.ood_score(x),
    }


def two_posteriors() -> list[ScaLLA]:
    """Of different data, so that their files differ."""
    made = []
    for num in (8, 12):
        x, y = normal(num, 2, seed=num), torch.randint(3, (num,), generator=torch.Generator().manual_seed(num))
        made.append(ScaLLA(network(), num_features=5, seed=7).fit([(x, y)], num_steps=0))
    return made


def save_for_ever(path: str) -> None:
    """One posterior after the other under one name, until the end of the process."""
    posteriors = two_posteriors()
    posteriors[0].save(path)
    report("begun")
    while True:
        for la in posteriors:
            la.save(path)


def benchmark_run(run: dict[str, Any], out: str, cache: str) -> bool:
    from scalla.benchmark.records import Run
    from scalla.benchmark.run_one import run_one

    report("begun")
    return run_one(Run.from_json(run), out=Path(out), cache=Path(cache))
