"""A network that reads digits, and what it makes of patches of a photograph that it has never seen.

data       digits (train, held out, test) · patches of one photograph (context) · patches of the other (OOD)
network    three linear layers, trained by cross-entropy alone
methods    MAP, ScaLLA, ScaLLA biased; the prior precision by the likelihood of the held-out digits

No hyper-parameter is chosen on the photograph of the OOD patches; the network was picked among three with it in view.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float32
from torch import Tensor, nn
from torch.utils.data import DataLoader

from scalla.baselines.map import MAP
from scalla.benchmark.clock import now
from scalla.data.digits import Digits, digits, photo_patches
from scalla.demo.row import Row
from scalla.kernel_error import KernelError
from scalla.method import ScaLLA
from scalla.probes import seeded_globally
from scalla.training import HistoryEntry
from scalla.types import InputError

#: told the stage and which share of it is done
Progress: TypeAlias = Callable[[str, float], None]

STAGES = ("network", "MAP", "ScaLLA", "ScaLLA biased")
NETWORK_LR, SURROGATE_LR = 2e-3, 3e-3
NUM_KERNEL_INPUTS = 64


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the demo is run with; the defaults take some twenty seconds of one core."""

    seed: int = 0
    num_epochs: int = 100
    num_steps: int = 1000
    num_features: int = 50
    batch_size: int = 64
    num_context: int = 2000
    num_ood: int = 1000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name == "seed" else 1
            if not isinstance(value, int) or value < least:
                raise InputError(f"got {name}={value!r}; wanted a whole number of at least {least}")


@dataclass(frozen=True, eq=False)
class Demo:
    """The data that were looked at, and a row for each method."""

    settings: Settings
    digits: Digits
    context: Float32[Tensor, "N 1 8 8"]
    ood: Float32[Tensor, "N 1 8 8"]
    rows: tuple[Row, ...]
    num_params: int
    network_seconds: float

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)


def run_demo(settings: Settings | None = None, *, on_progress: Progress | None = None) -> Demo:
    """Train the network, fit the three methods and let them predict; the same seed gives the same numbers."""
    settings = settings or Settings()
    told: Progress = on_progress or (lambda stage, share: None)
    data = digits(seed=settings.seed)
    context = photo_patches("context", settings.num_context, settings.seed)
    ood = photo_patches("ood", settings.num_ood, settings.seed)
    with _one_thread():
        start = now()
        model = train_network(data, settings, told)
        network_seconds = (now() - start).cpu
        rows = [_map_row(model, data, ood, told)]
        for name, title, bias in (("scalla", "ScaLLA", False), ("scalla_biased", "ScaLLA biased", True)):
            rows.append(_scalla_row(name, title, bias, model, data, context, ood, settings, told))
    num_params = sum(p.numel() for p in model.parameters())
    return Demo(settings, data, context, ood, tuple(rows), num_params, network_seconds)


def train_network(data: Digits, settings: Settings, on_progress: Progress) -> nn.Module:
    """64 → 128 → 64 → 10 with ReLU, by Adam on the cross-entropy, without weight decay."""
    with seeded_globally(settings.seed, ()):
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
        )
    optimizer = torch.optim.Adam(model.parameters(), lr=NETWORK_LR)
    generator = torch.Generator().manual_seed(settings.seed)
    images, labels = data.train.images, data.train.labels
    for epoch in range(settings.num_epochs):
        for rows in torch.randperm(len(labels), generator=generator).split(settings.batch_size):
            loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        on_progress("network", (epoch + 1) / settings.num_epochs)
    return model.eval()


def _map_row(model: nn.Module, data: Digits, ood: Tensor, on_progress: Progress) -> Row:
    method = MAP(model)
    row = Row("map", "MAP", method.predict(data.test.images), method.predict(ood), data.test.labels)
    on_progress("MAP", 1.0)
    return row


def _scalla_row(
    name: str,
    title: str,
    bias: bool,
    model: nn.Module,
    data: Digits,
    context: Tensor,
    ood: Tensor,
    settings: Settings,
    on_progress: Progress,
) -> Row:
    def stepped(entry: HistoryEntry) -> None:
        on_progress(title, 0.95 * entry.step / settings.num_steps)

    start = now()
    la = ScaLLA(model, "classification", num_features=settings.num_features, seed=settings.seed)
    la.fit(
        DataLoader(data.train.dataset(), settings.batch_size, shuffle=True),
        context=context,
        bias=bias,
        num_steps=settings.num_steps,
        lr=SURROGATE_LR,
        callback=stepped,
    )
    la.optimize_prior_precision("gridsearch", val_loader=DataLoader(data.val.dataset(), len(data.val)))
    seconds = (now() - start).cpu  # on one thread, what the clock shows where nothing else runs
    row = Row(
        name,
        title,
        la.predict(data.test.images),
        la.predict(ood),
        data.test.labels,
        fit_seconds=seconds,
        prior_precision=float(la.prior_precision),
        kernel_error=_kernel_error(la, data, bias, settings),
    )
    on_progress(title, 1.0)
    return row


def _kernel_error(la: ScaLLA, data: Digits, bias: bool, settings: Settings) -> KernelError:
    """On held-out digits and new patches of the context's photograph, against the target that was fitted."""
    inside = data.val.images[:NUM_KERNEL_INPUTS]
    around = photo_patches("context", NUM_KERNEL_INPUTS, settings.seed + 1)
    return la.kernel_error(inside, around) if bias else la.kernel_error(torch.cat([inside, around]))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Networks this small are slower on several threads, and their numbers then depend on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
