"""The settings of the FashionMNIST table, unchanged, on another task: MNIST in, FashionMNIST and KMNIST out.

    python benchmarks/second_task.py --out docs/measured/second_task        about half an hour on one core
    python benchmarks/second_task.py --out DIR --table                      the table of what is there

Nothing is chosen here: network, rows and settings are those of the `tuned` protocol. The context is patches of a
photograph; FashionMNIST, KMNIST, letters, cellular automata and noise are out of distribution.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pages import write_into

from scalla.benchmark import environment
from scalla.benchmark.clock import now
from scalla.benchmark.images import Images, as_float, checksums
from scalla.benchmark.measure import measure
from scalla.benchmark.methods import ROWS, Problem, seeded_fit
from scalla.benchmark.network import network_settings, trained_network
from scalla.benchmark.out_sets import SIDE, more_out_sets
from scalla.benchmark.records import write_json
from scalla.benchmark.shared_fits import SharedFits
from scalla.data import load, photo_patches

METHODS = (
    "map", "mahalanobis", "gmm", "knn", "lla_last_kron", "scalla", "scalla_biased", "scalla_residual",
    "scalla_biased_residual", "context_classifier",
)  # fmt: skip
SCORES = ("entropy", "gaussian_entropy", "score")


def images_of_mnist() -> Images:
    """As many held out of the training images as in the `tuned` protocol."""
    train, test = (load("MNIST", split, as_uint8=True) for split in ("train", "test"))
    x, y = as_float(train.images), train.labels
    photos = photo_patches("context", 5000, seed=0, size=SIDE)
    others = {name: as_float(load(name, "test", as_uint8=True).images) for name in ("FashionMNIST", "KMNIST")}
    made = {name: x for name, x in more_out_sets().items() if name in ("glyphs", "automata", "noise")}
    return Images(
        train=(x[:54_000], y[:54_000]),
        validation=(x[54_000:], y[54_000:]),
        test=(as_float(test.images), test.labels),
        context=photos[:4000],
        context_held_out=photos[4000:],
        out={**others, **made},
    )


def table(folder: Path) -> str:
    """Markdown: accuracy, NLL, ECE, then AUROC by entropy of the probabilities / by Gaussian entropy (or score)."""
    runs = [json.loads(path.read_text()) for name in METHODS if (path := folder / f"{name}.json").exists()]
    if not runs:
        return "nothing measured yet"
    names = list(runs[0]["metrics"]["ood"])
    lines = [f"| method | ACC | NLL | ECE | {' | '.join(names)} |", "|" + "---|" * (len(names) + 4)]
    for run in runs:
        found = run["metrics"]
        cells = [run["title"]]
        for name, digits, factor in (("accuracy", 2, 100), ("nll", 4, 1), ("ece", 4, 1)):
            cells.append("–" if found[name] is None else f"{factor * found[name]:.{digits}f}")
        for name in names:
            scores = found["ood"][name]
            cells.append(" / ".join(f"{scores[s]['auc']:.3f}" for s in SCORES if s in scores))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run(folder: Path, cache: Path, seed: int, methods: Sequence[str]) -> None:
    images, data = images_of_mnist(), {"task": "MNIST", **checksums()}
    of_network = network_settings("tuned", quick=False)
    network = trained_network(images, of_network, seed=seed, data=data, folder=cache / "networks", progress_bar=True)
    for name in methods:
        path = folder / f"{name}.json"
        if path.exists():
            continue
        row = ROWS[name]
        settings = row.settings_of(next(iter(row.variants_in("tuned"))), "tuned", quick=False)
        fits = SharedFits(cache / "fits", {"network": asdict(of_network), "data": data, "seed": seed})
        problem = Problem(
            network.model,
            images.train,
            images.context,
            seed,
            validation=images.validation,
            progress_bar=True,
            fits=fits,
        )
        began = now()
        method = seeded_fit(row, problem, settings)
        seconds = (now() - began + fits.spent_before).cpu
        found = measure(method, images, num_samples=512)["metrics"]
        about = {"versions": environment.versions(), "hardware": environment.hardware(), "seed": seed}
        about |= {"title": row.title, "settings": dict(settings), "fit_cpu_seconds": seconds}
        write_json(path, {**about, "metrics": {k: found[k] for k in ("accuracy", "nll", "ece", "brier", "ood")}})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--cache", type=Path, default=Path("runs"), help="folder of trained networks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--methods", default=",".join(METHODS), help="rows, separated by commas")
    parser.add_argument("--table", action="store_true", help="print the table of what is there, and measure nothing")
    parser.add_argument("--page", type=Path, help="page that the table is written into")
    options = parser.parse_args()
    if not options.table:
        run(options.out, options.cache, options.seed, options.methods.split(","))
    print(table(options.out))
    if options.page is not None:
        write_into(options.page, table(options.out), source="benchmarks/second_task.py")


if __name__ == "__main__":
    main()
