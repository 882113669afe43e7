"""How far a score learned against a generated context carries: `python benchmarks/context_quality.py`.

For FashionMNIST and the benchmark's trained network (`tuned`, seed 1), two small classifiers learn to tell training
images from each context of `scalla.context`: `pixels`, a CNN on the images, and `gate`, an MLP on the network's
penultimate features (`scalla.baselines.controls.ContextClassifier` both). Then they score images of neither kind.

choice  held-out training images against scikit-learn's digits, patches of a photograph, and what each of the
        generators makes of held-out training images: these columns alone choose the default
test    FashionMNIST test images against KMNIST, MNIST, glyphs, automata and noise: no choice looks at them

Rows: every part alone; the mixture of all; that mixture without each part (not at reduced size); the default; and, for
comparison, the published context, MNIST's test images, which are data of another source. What chooses is the column
"beside the default": the mean AUROC over both classifiers and those sets of choice that neither this context nor the
default makes, for this context and for the default. A context knows its own images, so these would say nothing.

What is measured is in <out>/context_quality.json after each fit, and not measured again; the table goes to standard
output and into the page of documentation, between its markers.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pages import write_into
from torch import Tensor

import scalla.context
from scalla.baselines.controls import ContextClassifier
from scalla.baselines.detectors.features import Penultimate
from scalla.benchmark import environment
from scalla.benchmark.images import Images, checksums, load_images, sizes_of
from scalla.benchmark.network import network_settings, trained_network
from scalla.benchmark.records import digest_of, write_json
from scalla.context import (
    Context,
    Extrapolation,
    FeatureExtrapolation,
    ImageMix,
    Mixture,
    PatchShuffle,
    PhaseScramble,
    Strokes,
    StrongAugment,
    Textures,
    read_inputs,
)
from scalla.context.choice import DEFAULTS
from scalla.metrics import auroc

PARTS = (
    PatchShuffle,
    StrongAugment,
    ImageMix,
    PhaseScramble,
    Textures,
    Strokes,
    Extrapolation,
    FeatureExtrapolation,
)
PUBLISHED = "MNIST test images"
JUDGES = ("pixels", "gate")
MADE = tuple(part.__name__ for part in PARTS)
CHOICE, TEST = ("digits", "photos", *MADE), ("KMNIST", "MNIST", "glyphs", "automata", "noise")


@dataclass(frozen=True)
class Settings:
    """All that decides the numbers, besides data and code."""

    num_train: int = 54_000
    num_context: int = 10_000
    num_scored: int = 2000
    num_epochs: int = 8
    network_seed: int = 1
    quick: bool = False


SIZES = {
    "full": Settings(),
    "reduced": Settings(num_train=20_000, num_context=3000, num_scored=500, num_epochs=6),
    "quick": Settings(num_train=4000, num_context=500, num_scored=200, num_epochs=2, quick=True),
}


class Material:
    """The images of every kind, and the network's features of them."""

    def __init__(self, settings: Settings, data: dict[str, str], *, cache: Path, data_root: Path | None) -> None:
        images = load_images(sizes_of("tuned", quick=settings.quick), data_root, allow_subset=settings.quick)
        network = trained_network(
            images,
            network_settings("tuned", quick=settings.quick),
            seed=settings.network_seed,
            data=data,
            folder=cache / "networks",
            progress_bar=True,
        ).model
        self.features = features_of(network)
        self.published = images.context
        train = images.train[0][: settings.num_train]
        self.parts = parts_of(train, network)
        sets = scored_sets(images, network, settings.num_scored)
        self.train = {"pixels": train, "gate": self.features(train)}
        self.scored = {"pixels": sets, "gate": {name: self.features(x) for name, x in sets.items()}}


class Measurement:
    """Two classifiers for each context."""

    def __init__(self, settings: Settings, *, cache: Path, data_root: Path | None) -> None:
        self.settings, self.cache, self.data_root = settings, cache, data_root
        self.data = checksums(data_root, allow_subset=settings.quick)
        self.identity = digest_of(
            {"settings": dataclasses.asdict(settings), "data": self.data, "code": source_digest()}
        )

    @cached_property
    def material(self) -> Material:
        """Made when something is to be measured; a table of what has been needs none."""
        return Material(self.settings, self.data, cache=self.cache, data_root=self.data_root)

    def of(self, names: Sequence[str], seed: int) -> dict[str, Any]:
        """AUROC of both classifiers on every set, learned against the mixture of these parts."""
        material, began = self.material, time.process_time()
        if names == (PUBLISHED,):
            made = material.published[: self.settings.num_context]
        else:
            parts = tuple(material.parts[name] for name in names)
            made = Mixture(parts, seed=seed).generate(self.settings.num_context)
        record: dict[str, Any] = {"context": " + ".join(names), "seed": seed, "num_context": len(made)}
        record["generating_seconds"] = time.process_time() - began
        for judge in JUDGES:
            classifier = ContextClassifier(num_epochs=self.settings.num_epochs, seed=seed)
            classifier.fit([material.train[judge]], context=made if judge == "pixels" else material.features(made))
            scores = {name: classifier.score(part) for name, part in material.scored[judge].items()}
            record[judge] = {name: auroc(scores["validation"], scores[name]) for name in CHOICE} | {
                name: auroc(scores["test"], scores[name]) for name in TEST
            }
        record["seconds"] = time.process_time() - began
        return record


def features_of(network: torch.nn.Module) -> Callable[[Tensor], Tensor]:
    penultimate = Penultimate(network)
    return lambda x: torch.cat([penultimate(part)[0].float() for part in x.split(1000)])


def parts_of(images: Tensor, network: torch.nn.Module) -> dict[str, Context]:
    inputs = read_inputs(images)
    parts: dict[str, Context] = {part.__name__: part(inputs) for part in PARTS if part is not FeatureExtrapolation}
    return parts | {FeatureExtrapolation.__name__: FeatureExtrapolation(inputs, network)}


def scored_sets(images: Images, network: torch.nn.Module, num: int) -> dict[str, Tensor]:
    assert images.validation is not None
    # Made of images, and by seeds, that no classifier is trained with.
    made = {name: part.generate(num, seed=1_000_003) for name, part in parts_of(images.validation[0], network).items()}
    out = {name: x[:num] for name, x in images.out.items()}
    return {"validation": images.validation[0][:num], "test": images.test[0][:num]} | made | out


def source_digest() -> str:
    """Of the generators' own code: another generator is another measurement. Which of them is chosen is not."""
    files = sorted(p for p in Path(scalla.context.__file__).parent.glob("*.py") if p.stem not in ("__init__", "choice"))
    return hashlib.sha256(b"".join(p.read_bytes() for p in files)).hexdigest()


class Records:
    """What has been measured so far, in one JSON."""

    def __init__(self, path: Path, measurement: Measurement, *, afresh: bool) -> None:
        self.path = path
        self.content: dict[str, Any] = {
            "identity": measurement.identity,
            "settings": dataclasses.asdict(measurement.settings),
            "versions": environment.versions(),
            "hardware": environment.hardware(),
            "runs": [],
        }
        if path.is_file() and not afresh:
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored.get("identity") == measurement.identity:
                self.content = stored
        self.measurement = measurement

    def of(self, names: Sequence[str], seed: int) -> dict[str, Any]:
        title = " + ".join(names)
        for run in self.content["runs"]:
            if (run["context"], run["seed"]) == (title, seed):
                return run
        run = self.measurement.of(names, seed)
        self.content["runs"].append(run)
        write_json(self.path, self.content)
        print(f"{title}, seed {seed}: {run['seconds']:.0f} s", file=sys.stderr, flush=True)
        return run


@dataclass(frozen=True)
class Row:
    """Means over the seeds, and the largest standard deviation over them of any column."""

    names: tuple[str, ...]
    means: dict[tuple[str, str], float]
    spread: float

    def mean(self, judge: str, names: Sequence[str]) -> float | None:
        return statistics.mean(self.means[judge, name] for name in names) if names else None

    def beside(self, other: Row) -> tuple[float, float]:
        """Mean AUROC of this and of the other, on the sets of choice that neither of them makes."""
        unseen = [name for name in CHOICE if name not in self.names and name not in other.names]
        own, others = (statistics.mean(r.means[j, name] for j in JUDGES for name in unseen) for r in (self, other))
        return own, others


def measured(records: Records, names: Sequence[str], seeds: Sequence[int]) -> Row:
    runs = [records.of(names, seed) for seed in seeds]
    columns = [(judge, name) for judge in JUDGES for name in (*CHOICE, *TEST)]
    values = {c: [run[c[0]][c[1]] for run in runs] for c in columns}
    spread = max(statistics.stdev(v) for v in values.values()) if len(runs) > 1 else 0.0
    return Row(tuple(names), {c: statistics.mean(v) for c, v in values.items()}, spread)


def all_rows(records: Records, seeds: Sequence[int], *, leave_one_out: bool) -> list[tuple[str, Row]]:
    """Titles and rows."""
    mixtures = {"all": MADE}
    if leave_one_out:
        mixtures |= {f"all but {name}": tuple(n for n in MADE if n != name) for name in MADE}
    mixtures["default"] = tuple(part.__name__ for part in DEFAULTS["images"])
    wanted = {name: (name,) for name in MADE} | {PUBLISHED: (PUBLISHED,)} | mixtures
    return [(title, measured(records, names, seeds)) for title, names in wanted.items()]


def table(rows: Sequence[tuple[str, Row]], content: dict[str, Any], seeds: Sequence[int]) -> str:
    """Markdown: for each column AUROC of pixels / gate."""
    default = dict(rows)["default"]
    header = ("context", "beside the default", "own", "others", "digits", "photos", *TEST)
    lines = ["| " + " | ".join(header) + " |", "| --- " * len(header) + "|"]
    for title, row in rows:
        own = [name for name in MADE if name in row.names]
        columns = (own, [name for name in MADE if name not in own], ["digits"], ["photos"], *([name] for name in TEST))
        cells = [" / ".join(number(row.mean(judge, names)) for judge in JUDGES) for names in columns]
        beside = "–" if row is default else " : ".join(number(value) for value in row.beside(default))
        lines.append(f"| {title} | {beside} | " + " | ".join(cells) + " |")
    versions, hardware, settings = content["versions"], content["hardware"], content["settings"]
    lines += [
        "",
        f"AUROC of pixels / gate, {_seeds(rows, seeds)}; {settings['num_train']} training images and "
        f"{settings['num_context']} of context, at most "
        f"{settings['num_epochs']} epochs, up to {settings['num_scored']} images of each set. Python "
        f"{versions['python']}, torch {versions['torch']}, scalla {versions['scalla']}; {hardware['threads']} thread "
        f"of {hardware['cpu']}.",
    ]
    return "\n".join(lines)


def _seeds(rows: Sequence[tuple[str, Row]], seeds: Sequence[int]) -> str:
    if len(seeds) == 1:
        return "one seed"
    spread = max(row.spread for _, row in rows)
    return f"means over {len(seeds)} seeds (largest standard deviation of any one {spread:.3f})"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--size",
        choices=list(SIZES),
        default="full",
        help="full: about fifteen minutes of one core; reduced: one, without the rows that leave one part out; quick: "
        "does it run? (twenty seconds)",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="of contexts and classifiers")
    parser.add_argument("--out", type=Path, default=Path("results/context"), help="folder of the JSON")
    parser.add_argument("--cache", type=Path, default=Path("runs"), help="folder with networks/ of `scalla benchmark`")
    parser.add_argument("--data-root", type=Path, default=None, help="image data; see scalla.data.load")
    parser.add_argument("--page", type=Path, default=None, help="page that the table is written into")
    parser.add_argument("--afresh", action="store_true", help="measure again what has been measured")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    measurement = Measurement(SIZES[options.size], cache=options.cache, data_root=options.data_root)
    name = "context_quality.json" if options.size == "full" else f"context_quality-{options.size}.json"
    records = Records(options.out / name, measurement, afresh=options.afresh)
    text = table(
        all_rows(records, options.seeds, leave_one_out=options.size != "reduced"), records.content, options.seeds
    )
    print(text)
    if options.page is not None:
        write_into(options.page, text, source="benchmarks/context_quality.py")


if __name__ == "__main__":
    main()
