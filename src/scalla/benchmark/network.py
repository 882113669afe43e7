"""The network of the experiment, P = 140,594, and its training: trained once, kept in a file, shared by every row.

`paper`  pixels in [0, 1], all training images in their order, Adam 1e-3, the rate ×0.7 an epoch, 40 epochs,
         no weight decay: θ* is not stationary under any prior, so its evidence is a heuristic
`tuned`  shuffled, the negative log posterior with prior N(0, δ⁻¹ I): mean loss + δ/2 ‖θ‖²/N, the rate on a
         cosine to zero, on the training data less the validation part
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm.auto import tqdm

from scalla.benchmark.clock import Seconds, now
from scalla.benchmark.images import Images
from scalla.benchmark.records import digest_of
from scalla.checkpoint import read_file, write_file
from scalla.probes import mix_seed
from scalla.types import InputError

NUM_PARAMETERS = 140_594
KIND = "benchmark-network"


@dataclass(frozen=True)
class NetworkSettings:
    """All that decides the trained weights, besides data and seed."""

    variant: str
    num_epochs: int
    batch_size: int
    lr: float = 1e-3
    #: factor of the rate each epoch, or None for a cosine to zero
    lr_decay: float | None = None
    shuffle: bool = False
    #: δ of the prior in the loss; 0 is no weight decay
    prior_precision: float = 0.0

    def rate(self, epoch: int) -> float:
        if self.lr_decay is not None:
            return self.lr * self.lr_decay**epoch
        return self.lr * 0.5 * (1 + math.cos(math.pi * epoch / self.num_epochs))


def network_settings(protocol: str, *, quick: bool) -> NetworkSettings:
    if protocol == "paper":
        found = NetworkSettings("paper", num_epochs=40, batch_size=64, lr_decay=0.7)
        return replace(found, num_epochs=4) if quick else found
    if protocol == "tuned":
        found = NetworkSettings("tuned", num_epochs=20, batch_size=128, shuffle=True, prior_precision=1.0)
        return replace(found, num_epochs=4, batch_size=64) if quick else found
    raise InputError(f"got protocol={protocol!r}; choose 'paper' or 'tuned'")


@dataclass(frozen=True, eq=False)
class TrainedNetwork:
    """θ*, and the record of how it came about: one entry an epoch."""

    model: nn.Module
    history: list[dict[str, Any]]
    time: Seconds


def build_network(seed: int) -> nn.Sequential:
    """Three convolutions 1 → 16 → 32 → 64 without bias, each with ReLU and pooling; 576 → 200 → 10."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        widths = (1, 16, 32, 64)
        blocks = [
            (nn.Conv2d(a, b, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool2d(2))
            for a, b in itertools.pairwise(widths)
        ]
        network = nn.Sequential(
            *(layer for block in blocks for layer in block),
            nn.Flatten(),
            nn.Linear(576, 200),
            nn.ReLU(),
            nn.Linear(200, 10),
        )
    assert sum(p.numel() for p in network.parameters()) == NUM_PARAMETERS
    return network


def trained_network(
    images: Images,
    settings: NetworkSettings,
    *,
    seed: int,
    data: dict[str, str],
    folder: Path,
    progress_bar: bool = False,
) -> TrainedNetwork:
    """From the file if it is there; else trained, epoch after epoch, going on where an earlier call stopped."""
    x, y = images.train
    key = digest_of({"settings": asdict(settings), "seed": seed, "data": data, "num_train": len(x)})
    path = folder / f"network-{settings.variant}-seed{seed}-{key[:12]}.safetensors"
    network = build_network(seed)
    if path.is_file():
        tensors, meta = read_file(path, KIND)
        network.load_state_dict(tensors)
        return TrainedNetwork(network.eval(), meta["history"], Seconds(**meta["seconds"]))
    partial = path.with_suffix(".part.safetensors")
    parameters = dict(network.named_parameters())
    optimizer = torch.optim.Adam(parameters.values(), lr=settings.lr)
    history: list[dict[str, Any]] = []
    spent = Seconds()
    if partial.is_file():
        tensors, meta = read_file(partial, KIND)
        _restore(network, optimizer, parameters, tensors)
        history, spent = meta["history"], Seconds(**meta["seconds"])
    bar = tqdm(
        range(len(history), settings.num_epochs),
        initial=len(history),
        total=settings.num_epochs,
        desc=f"network {settings.variant} seed {seed}",
        unit="epoch",
        disable=not progress_bar,
    )
    for epoch in bar:
        start = now()
        for group in optimizer.param_groups:
            group["lr"] = settings.rate(epoch)
        loss = train_epoch(network, optimizer, x, y, settings, seed=mix_seed(seed, epoch))
        spent += now() - start
        entry = {"epoch": epoch + 1, "loss": loss, "lr": settings.rate(epoch)}
        if images.validation is not None:
            entry |= _validate(network, *images.validation)
        history.append(entry)
        bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
        write_file(
            partial, _state(network, optimizer, parameters), {"history": history, "seconds": asdict(spent)}, KIND
        )
    write_file(path, network.state_dict(), {"history": history, "seconds": asdict(spent)}, KIND)
    partial.unlink(missing_ok=True)
    return TrainedNetwork(network.eval(), history, spent)


def train_epoch(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    y: Tensor,
    settings: NetworkSettings,
    *,
    seed: int,
) -> float:
    """One pass; the mean cross-entropy while the weights change."""
    network.train()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)) if settings.shuffle else None
    total = torch.zeros((), dtype=torch.float64)
    for start in range(0, len(x), settings.batch_size):
        if order is None:
            inputs, labels = x[start : start + settings.batch_size], y[start : start + settings.batch_size]
        else:
            rows = order[start : start + settings.batch_size]
            inputs, labels = x.index_select(0, rows), y.index_select(0, rows)
        nll = F.cross_entropy(network(inputs), labels)
        loss = nll
        if settings.prior_precision:
            sq_norm = torch.stack([p.square().sum() for p in network.parameters()]).sum()
            loss = nll + 0.5 * settings.prior_precision / len(x) * sq_norm
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += nll.detach().double() * len(labels)
    network.eval()
    return float(total / len(x))


@torch.no_grad()
def _validate(network: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    logits = torch.cat([network(part) for part in x.split(1000)])
    return {
        "validation_nll": float(F.cross_entropy(logits, y)),
        "validation_accuracy": float((logits.argmax(1) == y).double().mean()),
    }


def _state(network: nn.Module, optimizer: torch.optim.Adam, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Weights and Adam's moments."""
    tensors = {f"weights/{k}": t for k, t in network.state_dict().items()}
    for name, p in parameters.items():
        tensors |= {f"{part}/{name}": torch.as_tensor(v) for part, v in optimizer.state[p].items()}
    return tensors


def _restore(
    network: nn.Module, optimizer: torch.optim.Adam, parameters: dict[str, nn.Parameter], tensors: dict[str, Tensor]
) -> None:
    network.load_state_dict({k.removeprefix("weights/"): t for k, t in tensors.items() if k.startswith("weights/")})
    for name, p in parameters.items():
        optimizer.state[p] = {part: tensors[f"{part}/{name}"] for part in ("step", "exp_avg", "exp_avg_sq")}
