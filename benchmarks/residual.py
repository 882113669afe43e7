"""What tells unfamiliar inputs apart, and what it costs: the choices behind v(x) of a residual, each measured.

    python benchmarks/residual.py --out docs/measured/residual              about ten minutes on one core
    python benchmarks/residual.py --out DIR --table                         the tables of what is there

On the network of the benchmark's `tuned` protocol, with the posterior left out: Σ(x) = v(x) I, so that nothing but v
is seen. Distances are fitted to the training images, v to the validation images and, where there is one, to a
context. Choices were made by the columns of made contexts and of the context alone; those of the other sets say how
far they carry.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pages import write_into
from torch import Tensor

from scalla import context, metrics
from scalla.benchmark import environment
from scalla.benchmark.clock import now
from scalla.benchmark.images import Images, checksums, load_images, sizes_of
from scalla.benchmark.network import network_settings, trained_network
from scalla.benchmark.records import write_json
from scalla.density import ClassGaussians, ClassMoments
from scalla.functional import FrozenNetwork
from scalla.hidden import hidden_of, mark
from scalla.predictive import Prediction
from scalla.residual import NUM_DRAWS, UNFAMILIAR, Outcome, calibrated, variance

#: inputs of the convolutions, and of the linear layers
LAYERS = ("3", "6", "10", "12")
NUM_MADE, NUM_SAMPLES = 2000, 256

#: (B, L) z of each layer → (B,) z
COMBINED: dict[str, Callable[[Tensor], Tensor]] = {
    "rms above 0": lambda z: (z.clamp_min(0).square().mean(-1) + 1e-12).sqrt(),
    "mean": lambda z: z.mean(-1),
    "mean above 0": lambda z: z.clamp_min(0).mean(-1),
    "largest": lambda z: z.amax(-1),
}


@dataclass(frozen=True)
class Choice:
    """One row of the table."""

    layers: tuple[str, ...] = ("6", "10", "12")
    shared: bool = False
    ridge: float = 0.1
    combined: str = "rms above 0"
    context: str = "made"
    weight: float = 0.01
    beyond: float = UNFAMILIAR
    tempered: bool = True

    @property
    def title(self) -> str:
        covariance = "shared" if self.shared else "by class"
        beside = self.context if self.context == "none" else f"{self.context} × {self.weight:g}, z ≥ {self.beyond:g}"
        words = f"layers {' '.join(self.layers)} | {covariance}, ridge {self.ridge:g} | {self.combined} | {beside}"
        return words if self.tempered else f"{words} | κ = 1"


def choices() -> Iterator[Choice]:
    """Around the default, one thing at a time."""
    base = Choice()
    for layers in (("12",), ("10",), ("6",), ("3",), ("10", "12"), ("6", "10"), ("6", "10", "12"), LAYERS):
        yield replace(base, layers=layers)
    for layers in (("12",), ("6", "10", "12")):
        yield replace(base, layers=layers, shared=True)
    for ridge in (0.01, 1.0):
        yield replace(base, ridge=ridge)
    for combined in list(COMBINED)[1:]:
        yield replace(base, combined=combined)
    yield replace(base, context="none")
    for name, weights in (("made", (0.001, 0.003, 0.03, 0.1)), ("MNIST", (0.001, 0.003, 0.01, 0.03, 0.1))):
        for weight in weights:
            yield replace(base, context=name, weight=weight)
    for beyond in (0.0, 0.5, 0.75):
        yield replace(base, beyond=beyond)
    for beyond in (0.0, UNFAMILIAR):
        yield replace(base, beyond=beyond, tempered=False)
    yield replace(base, context="none", tempered=False)


@dataclass(frozen=True, eq=False)
class Seen:
    """What the network says of one set of images."""

    outputs: Tensor
    hidden: dict[str, Tensor]


def look(network: FrozenNetwork, x: Tensor) -> Seen:
    parts = [(network(part), hidden_of(network, LAYERS, part)) for part in x.split(500)]
    hidden = {name: torch.cat([h[name] for _, h in parts]) for name in LAYERS}
    return Seen(torch.cat([f for f, _ in parts]), hidden)


def sets_of(images: Images) -> dict[str, Tensor]:
    assert images.validation is not None
    assert images.context_held_out is not None
    kinds = (
        context.PatchShuffle, context.StrongAugment, context.ImageMix, context.PhaseScramble, context.Textures,
        context.Strokes,
    )  # fmt: skip
    made = {f"made: {kind.__name__}": kind(images.train[0], seed=5).generate(NUM_MADE) for kind in kinds}
    return {
        "train": images.train[0],
        "validation": images.validation[0],
        "test": images.test[0],
        "made": context.default(images.train[0], seed=3).generate(NUM_MADE),
        "MNIST": images.context[:NUM_MADE],
        **made,
        "held-out context": images.context_held_out,
        **{f"out: {name}": x for name, x in images.out.items()},
    }


class Distances:
    """log d_l of every set, for the pairs (shared, ridge) that are asked for."""

    def __init__(self, seen: dict[str, Seen], labels: Tensor) -> None:
        self.seen, self.labels = seen, labels
        self.found: dict[tuple[str, bool, float], dict[str, Tensor]] = {}

    def __call__(self, layer: str, shared: bool, ridge: float) -> dict[str, Tensor]:
        key = (layer, shared, ridge)
        if key not in self.found:
            h = self.seen["train"].hidden[layer]
            moments = ClassMoments(10, h, shared=shared)
            moments.add(h, self.labels)
            gaussians = ClassGaussians(10, h.shape[1], shared=shared, like=h)
            moments.write(gaussians, ridge=ridge)
            self.found[key] = {
                name: torch.cat([gaussians(part) for part in s.hidden[layer].split(1000)]).clamp_min(1e-30).log()
                for name, s in self.seen.items()
                if name != "train"
            }
        return self.found[key]


def measure(choice: Choice, images: Images, seen: dict[str, Seen], distances: Distances) -> dict[str, Any]:
    assert images.validation is not None
    logs = [distances(layer, choice.shared, choice.ridge) for layer in choice.layers]
    centres = [log["validation"].median() for log in logs]
    widths = [log["validation"].quantile(0.99) - c for log, c in zip(logs, centres, strict=True)]
    z = {
        name: COMBINED[choice.combined](
            torch.stack([(log[name] - c) / w for log, c, w in zip(logs, centres, widths, strict=True)], -1)
        )
        for name in logs[0]
    }

    def outcome(name: str, labels: Tensor | None) -> Outcome:
        f = seen[name].outputs
        return Outcome(f, f.expand(NUM_DRAWS, *f.shape), z[name], labels)

    shape = calibrated(
        "classification",
        outcome("validation", images.validation[1]),
        None if choice.context == "none" else outcome(choice.context, None).beyond(choice.beyond),
        weight=choice.weight,
        scale=torch.ones(10),
        tempered=choice.tempered,
    )
    noise = torch.randn(10, NUM_SAMPLES, generator=torch.Generator().manual_seed(0))

    def predicted(name: str) -> Prediction:
        outputs_scale, *rest = shape.to(z[name])
        added = variance(z[name], *rest)
        factor = torch.diag_embed(added.sqrt()[:, None].expand(-1, 10))
        return Prediction(outputs_scale * seen[name].outputs, factor, link="mc", noise=noise)

    inside, y = predicted("test"), images.test[1]
    held_out = predicted("validation")
    alone = torch.softmax(seen["test"].outputs, -1)
    return {
        "shape": shape.tolist(),
        "validation": {
            "nll": metrics.nll(held_out.probs, images.validation[1]),
            "ece": metrics.ece(held_out.probs, images.validation[1]),
        },
        "accuracy": metrics.accuracy(inside.probs, y),
        "nll": metrics.nll(inside.probs, y),
        "ece": metrics.ece(inside.probs, y),
        "map": {"accuracy": metrics.accuracy(alone, y), "nll": metrics.nll(alone, y), "ece": metrics.ece(alone, y)},
        "auroc": {
            name: {
                "entropy": metrics.auroc(inside.entropy, predicted(name).entropy),
                "z": metrics.auroc(z["test"], z[name]),
            }
            for name in seen
            if name.startswith(("made:", "held-out", "out:"))
        },
    }


def table(folder: Path) -> str:
    """Markdown, from the files."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not runs:
        return "nothing measured yet"
    names = list(runs[0]["auroc"])
    heads = [
        "choice",
        "held-out NLL",
        "held-out ECE",
        "ACC",
        "NLL",
        "ECE",
        *(name.removeprefix("out: ").removeprefix("made: ") for name in names),
    ]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    alone = runs[0]["map"]
    lines.append(
        f"| MAP | | | {100 * alone['accuracy']:.2f} | {alone['nll']:.4f} | {alone['ece']:.4f} |" + " |" * len(names)
    )
    for run in runs:
        cells = [f"{run['auroc'][n]['entropy']:.3f} / {run['auroc'][n]['z']:.4f}" for n in names]
        title = run["title"].replace(" | ", "; ")
        lines.append(
            "| "
            + " | ".join(
                [
                    title,
                    f"{run['validation']['nll']:.4f}",
                    f"{run['validation']['ece']:.4f}",
                    f"{100 * run['accuracy']:.2f}",
                    f"{run['nll']:.4f}",
                    f"{run['ece']:.4f}",
                    *cells,
                ]
            )
            + " |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--cache", type=Path, default=Path("runs"), help="folder of trained networks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="print the table of what is there, and measure nothing")
    parser.add_argument("--page", type=Path, help="page that the table is written into")
    options = parser.parse_args()
    if options.page is not None:
        write_into(options.page, table(options.out), source="benchmarks/residual.py")
    if options.table:
        print(table(options.out))
        return
    images = load_images(sizes_of("tuned", quick=False))
    trained = trained_network(
        images,
        network_settings("tuned", quick=False),
        seed=options.seed,
        data=checksums(),
        folder=options.cache / "networks",
        progress_bar=True,
    )
    network = FrozenNetwork(trained.model)
    mark(network, LAYERS)
    seen = {name: look(network, x) for name, x in sets_of(images).items()}
    distances = Distances(seen, images.train[1])
    about = {"versions": environment.versions(), "hardware": environment.hardware(), "seed": options.seed}
    for number, choice in enumerate(choices()):
        path = options.out / f"{number:02d}.json"
        if path.exists():
            continue
        began = now()
        found = measure(choice, images, seen, distances)
        seconds = (now() - began).cpu
        write_json(path, {"title": choice.title, "choice": asdict(choice), "cpu_seconds": seconds, **found, **about})
        print(f"{choice.title}: NLL {found['nll']:.4f}, ECE {found['ece']:.4f}", flush=True)
    print(table(options.out))


if __name__ == "__main__":
    main()
