"""Which surrogate, from which start, at which learning rate: the held-out kernel error of each, measured.

    python benchmarks/surrogates.py --out docs/measured/surrogates          the choice, about an hour on one core
    python benchmarks/surrogates.py --out DIR --quick                       the same at a hundredth of the length
    python benchmarks/surrogates.py --out DIR --table                       the table of what is there

    python benchmarks/surrogates.py --out docs/measured/starts --starts     what the start is worth outside, 40 min

On the network of the benchmark's `paper` protocol. Each fit is one JSON; one that is there is not run again. The
error is that of 100 + 100 inputs which no fit sees: the last of FashionMNIST's training images, and the last of MNIST's
test images (the context is the rest of them). No test image of FashionMNIST, and nothing of KMNIST, is looked at; but
with `--starts` the Gaussian score of 2,000 test images is compared with that of every further set, δ = 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pages import write_into
from torch import Tensor

from scalla import KernelError, ScaLLA
from scalla.benchmark import environment
from scalla.benchmark.batches import TensorBatches
from scalla.benchmark.clock import now
from scalla.benchmark.images import checksums, load_images, sizes_of
from scalla.benchmark.network import network_settings, trained_network
from scalla.benchmark.records import digest_of, write_json
from scalla.functional import FrozenNetwork
from scalla.kernel_error import exact_kernel, kernel_error, without_cross_groups
from scalla.metrics import auroc
from scalla.training import HistoryEntry

NUM_HELD, BATCH, NUM_FEATURES, NUM_SCORED = 100, 64, 100, 2000


@dataclass(frozen=True)
class Fit:
    """One row of the table."""

    surrogate: str = "mirror"
    options: tuple[tuple[str, Any], ...] = ()
    lr: float = 1e-3
    schedule: str = "cosine"
    num_steps: int = 1000
    num_probes: int = 1
    bias: bool = False
    seed: int = 0
    batch: int = BATCH

    @property
    def name(self) -> str:
        return f"{self.surrogate}-{digest_of(asdict(self))[:10]}"

    @property
    def title(self) -> str:
        return " ".join([self.surrogate, *(f"{k}={v}" for k, v in self.options)])


KINDS = (
    Fit("mirror", (("start", "trained"),)),
    Fit("mirror", (("start", "random"),)),
    Fit("trunk"),
)


def grid() -> Iterator[Fit]:
    """Every kind at every rate; then both schedules, probes, and the long fits at the rates that were best."""
    for kind, lr in itertools.product(KINDS, (3e-4, 1e-3, 3e-3)):
        yield replace(kind, lr=lr)
    for kind in KINDS:
        yield replace(kind, schedule="constant")
        yield replace(kind, num_probes=4)
        yield replace(kind, bias=True)
        yield replace(kind, num_steps=4000)
        yield replace(kind, num_steps=4000, bias=True)


def starts() -> Iterator[Fit]:
    """Trained and random weights, in this library's batches at its rate and in the published ones at theirs."""
    trained, random = ((("start", start),) for start in ("trained", "random"))
    published = Fit(lr=5e-5, batch=5, num_steps=10_000, bias=True)
    yield replace(published, options=trained)
    for options in (trained, random):
        yield Fit(options=options, num_steps=4000, bias=True)
    for steps, bias in itertools.product((4000, 10_000, 40_000), (True, False)):
        yield replace(published, options=random, num_steps=steps, bias=bias)


@dataclass(frozen=True, eq=False)
class Setting:
    """Network, data and the exact kernel of the held-out inputs."""

    model: torch.nn.Module
    train: tuple[Tensor, Tensor]
    context: Tensor
    held: tuple[Tensor, Tensor]
    kernel: Tensor
    data: dict[str, str]
    test: Tensor
    out: dict[str, Tensor]

    @staticmethod
    def load(cache: Path, data_root: Path | None, *, quick: bool) -> Setting:
        images = load_images(sizes_of("paper", quick=quick), data_root)
        data = checksums(data_root)
        settings = network_settings("paper", quick=quick)
        network = trained_network(images, settings, seed=1, data=data, folder=cache / "networks", progress_bar=True)
        (x, y), context, num = images.train, images.context, 5 if quick else NUM_HELD
        held = x[-num:], context[-num:]
        frozen = FrozenNetwork(network.model)
        params = {k: p.detach() for k, p in network.model.named_parameters()}
        kernel = exact_kernel(frozen, params, torch.cat(held))
        return Setting(
            network.model, (x[:-num], y[:-num]), context[:-num], held, kernel, data, images.test[0], images.out
        )

    def gaussian_auc(self, la: ScaLLA) -> dict[str, float]:
        def scores(x: Tensor) -> Tensor:
            return torch.cat([la.ood_score(part) for part in x[:NUM_SCORED].split(500)])

        inside = scores(self.test)
        return {name: auroc(inside, scores(x)) for name, x in self.out.items()}

    def error(self, la: ScaLLA, *, bias: bool) -> KernelError:
        features = la.features(torch.cat(self.held))
        sizes = [len(x) * features.shape[1] for x in self.held]
        return kernel_error(features, without_cross_groups(self.kernel, sizes) if bias else self.kernel)


def run(fit: Fit, setting: Setting, *, score: bool = False) -> dict[str, Any]:
    la = ScaLLA(
        setting.model,
        num_features=NUM_FEATURES,
        surrogate=fit.surrogate,
        surrogate_options=dict(fit.options),
        seed=fit.seed,
    )
    loader = TensorBatches(*setting.train, fit.batch, shuffle=True)
    began, trained = now(), [now()]

    def note(entry: HistoryEntry) -> None:
        trained.append(now())

    la.fit(
        loader,
        context=setting.context,
        context_batch_size=fit.batch,
        bias=fit.bias,
        num_steps=fit.num_steps,
        num_probes=fit.num_probes,
        lr=fit.lr,
        schedule=fit.schedule,  # type: ignore[arg-type]
        callback=note,
    )
    done = now()
    error = setting.error(la, bias=fit.bias)
    assert la.surrogate is not None
    return {
        "fit": asdict(fit),
        "title": fit.title,
        "error": error.error,
        "floor": error.floor,
        "jvp_inputs": 2 * fit.batch * fit.num_steps * fit.num_probes,
        "weights": sum(p.numel() for p in la.surrogate.parameters()),
        **(trained[-1] - began).named("training"),
        **(done - trained[-1]).named("precision"),
        **({"gaussian_auc": setting.gaussian_auc(la)} if score else {}),
    }


def table(out: Path) -> str:
    rows = sorted((json.loads(path.read_text()) for path in out.glob("*.json")), key=_order)
    return _table_of_starts(rows) if rows and "gaussian_auc" in rows[0] else _table(rows)


def _table_of_starts(rows: list[dict[str, Any]]) -> str:
    sets = list(rows[0]["gaussian_auc"])
    lines = [
        f"| start | bias | inputs | rate | steps | kernel error | {' | '.join(sets)} | training, s |",
        "| --- | --- | ---: | ---: | ---: | ---: |" + " ---: |" * (len(sets) + 1),
    ]
    for row in rows:
        fit = row["fit"]
        scores = " | ".join(f"{row['gaussian_auc'][name]:.3f}" for name in sets)
        lines.append(
            f"| {dict(fit['options'])['start']} | {'yes' if fit['bias'] else 'no'} | {fit['batch']} + {fit['batch']} | "
            f"{fit['lr']:g} | {fit['num_steps']} | {row['error']:.3f} | {scores} | {row['training_seconds']:.0f} |"
        )
    return "\n".join([*lines, "", _about(rows[0])])


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| surrogate | bias | probes | rate | schedule | steps | kernel error | floor | training, s | precision, s |",
        "| --- | --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        fit = row["fit"]
        lines.append(
            f"| {row['title']} | {'yes' if fit['bias'] else 'no'} | {fit['num_probes']} | {fit['lr']:g} | "
            f"{fit['schedule']} | {fit['num_steps']} | {row['error']:.3f} | {row['floor']:.3f} | "
            f"{row['training_seconds']:.0f} | {row['precision_seconds']:.0f} |"
        )
    if rows:
        lines += ["", f"{_about(rows[0])} {2 * BATCH} inputs a step, half of them of the context; m = {NUM_FEATURES}."]
    return "\n".join(lines)


def _about(row: dict[str, Any]) -> str:
    machine, versions = row["hardware"], row["versions"]
    return (
        f"Seconds of the processor on one thread of {machine['cpu']}; torch {versions['torch']}, "
        f"Python {versions['python']}."
    )


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    fit = row["fit"]
    return -fit["batch"], fit["num_steps"], fit["bias"], row["title"], fit["num_probes"], fit["schedule"], fit["lr"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--cache", type=Path, default=Path("runs"), help="folder of the trained network")
    parser.add_argument("--data", type=Path, help="folder of the image data")
    parser.add_argument("--starts", action="store_true", help="the fits of the second table")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", action="store_true", help="print the table of what is there, run nothing")
    parser.add_argument("--page", type=Path, help="page that the table of --starts is written into")
    given = parser.parse_args()
    if not given.table:
        torch.set_num_threads(1)
        setting = Setting.load(given.cache, given.data, quick=given.quick)
        for fit in starts() if given.starts else grid():
            if given.quick:
                fit = replace(fit, num_steps=max(10, fit.num_steps // 100))
            path = given.out / f"{fit.name}.json"
            if not path.is_file():
                found = run(fit, setting, score=given.starts)
                found |= {"versions": environment.versions(), "hardware": environment.hardware(), "data": setting.data}
                write_json(path, found)
                print(
                    f"{fit.title} rate {fit.lr:g} {fit.schedule} {fit.num_steps} steps: {found['error']:.3f}",
                    flush=True,
                )
    text = table(given.out)
    if given.page is not None:
        write_into(given.page, text, source=f"benchmarks/surrogates.py{' --starts' if given.starts else ''}")
    print(text)


if __name__ == "__main__":
    main()
