"""The speed and memory of fits and predictions, as ratios within one run: JSON, a table and plots.

    python benchmarks/perf/run.py --out docs/measured/perf             everything but the hour of `quality`
    python benchmarks/perf/run.py --out DIR --parts step matching      some of it
    python benchmarks/perf/run.py --out DIR --parts quality --minutes 60
    python benchmarks/perf/run.py --out DIR --quick                    all parts on tiny networks: does it run?
    python benchmarks/perf/run.py --out DIR --table                    the table of what is there
    python benchmarks/perf/run.py --out DIR --table --page docs/performance.md     and put into that page

Seconds are those of the processor on one thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import class_rank
import matching
import memory
import prediction
import quality
import scaling
import step
import torch
import variants
from networks import CLASSES, FMNIST, LARGE, QUICK
from plots import draw
from table import filled, tables

from scalla.benchmark import environment
from scalla.benchmark.records import write_json

PARTS = ("step", "variants", "matching", "prediction", "memory", "scaling", "classes", "quality")
KINDS = ("mirror", "trunk")


def rows_of(part: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The measurements of one part, one by one."""
    quick, repeats = given.quick, 1 if given.quick else given.repeats
    small, large = (QUICK[:1], QUICK[1:]) if quick else ((FMNIST,), LARGE)
    chosen = [c for c in (*small, *(() if quick else CLASSES), *large) if c.name in (given.networks or [c.name])]
    if part == "step":
        for case in chosen:
            for kind in KINDS:
                fast = case not in large
                yield step.measure(
                    case,
                    kind,
                    num_features=5 if quick else 100,
                    num_steps=10 if fast and not quick else 1,
                    repeats=repeats if fast else min(repeats, 3),
                )
    elif part == "variants":
        yield from variants.measure(
            small[0], num_features=5 if quick else 100, num_steps=1 if quick else 10, repeats=repeats
        )
    elif part == "matching":
        for batch, classes in ((8, 3), (16, 3)) if quick else ((16, 10), (64, 10), (128, 10), (512, 10), (64, 100)):
            yield matching.measure(batch, classes, 5 if quick else 100, repeats=repeats)
    elif part == "prediction":
        sizes = (60, 20) if quick else (given.inputs, given.inputs // 50)
        yield prediction.measure(
            small[0], num_inputs=sizes[0], num_slow=sizes[1], num_features=5 if quick else 100, repeats=min(repeats, 3)
        )
    elif part == "memory":
        for case in [c for c in chosen if c not in CLASSES]:
            yield memory.measure(case, "mirror")
    elif part == "scaling":
        yield from scaling.measure(quick=quick, repeats=repeats, progress=print_now)
    elif part == "classes":
        yield from class_rank.measure(quick=quick)
    elif part == "quality":
        setting = quality.Setting.load(given.cache, given.data, quick=quick)
        found, pools = [], {}
        for recipe in quality.recipes(steps=given.steps, pool_size=given.pool_size):
            if given.recipes and recipe.name not in given.recipes:
                continue
            row = quality.measure(
                recipe,
                setting,
                max_seconds=60 * given.minutes,
                num_landmarks=given.landmarks,
                pools=pools,
                progress=print_now,
            )
            found.append(row)
            yield row
        yield from quality.compared(found)


def print_now(text: str) -> None:
    print(text, flush=True)


def run(part: str, given: argparse.Namespace, write: Callable[[Path, dict[str, Any]], object] = write_json) -> None:
    path = given.out / f"{part}.json"
    before = json.loads(path.read_text())["rows"] if given.networks and path.is_file() else []
    rows = [row for row in before if row.get("network") not in given.networks]
    for row in rows_of(part, given):
        rows.append(row)
        about = {"versions": environment.versions(), "hardware": environment.hardware(), "quick": given.quick}
        write(path, {"part": part, "rows": rows, **about})
        print_now(f"{part}: {json.dumps({k: v for k, v in row.items() if k not in ('curve', 'settings')})}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON files, the table and the plots")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: all but quality; with --quick those too")
    parser.add_argument("--networks", nargs="+", help="step and memory of these alone; other rows of a file stay")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--inputs", type=int, default=10_000, help="inputs of `prediction`; a fiftieth for all layers")
    parser.add_argument("--steps", type=int, default=2500, help="training steps of the recipes of `quality`")
    parser.add_argument("--pool-size", type=int, default=5000, help="pool of its directed recipes")
    parser.add_argument("--landmarks", type=int, default=400, help="landmarks of that pool")
    parser.add_argument("--recipes", nargs="+", help="recipes of `quality`; default: all")
    parser.add_argument("--minutes", type=float, default=60, help="the most that one of its recipes may take")
    parser.add_argument("--cache", type=Path, default=Path("runs"), help="folder of the trained network")
    parser.add_argument("--data", type=Path, help="folder of the image data")
    parser.add_argument("--page", type=Path, help="a Markdown page whose tables to replace")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--table", action="store_true", help="print the table of what is there, run nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if not given.table:
        for part in given.parts or PARTS[:-1]:
            run(part, given)
    found = {p.stem: json.loads(p.read_text()) for p in given.out.glob("*.json") if p.stem in PARTS}
    text = tables(found)
    (given.out / "table.md").write_text(text)
    draw(found, given.out)
    if given.page is not None:
        given.page.write_text(filled(given.page.read_text(), found))
    print(text)


if __name__ == "__main__":
    main()
