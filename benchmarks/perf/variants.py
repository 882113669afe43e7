"""One step of a fit on the FashionMNIST network, run in other ways: each ÷ the plain step in float32.

bfloat16 by `fit(..., autocast=torch.bfloat16)`; channels_last, the memory format of network and inputs; the surrogate
under torch.compile, for which a C++ compiler is needed; four probes instead of one. Half of a batch is context.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from networks import Case
from step import Prepared
from timing import in_turns, median_ratio

from scalla.benchmark.clock import now
from scalla.jvp import JacobianProduct
from scalla.probes import draw_probe

BF16 = "bfloat16 autocast"
COMPILED = "surrogate compiled"


def measure(case: Case, *, num_features: int, num_steps: int, repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each way: seconds of a step and their ratio, or why there are none."""
    plain = prepared(case, num_features)
    channels_last = prepared(case, num_features, memory_format=torch.channels_last)
    lowered = {BF16: in_bfloat16(plain), f"channels_last, {BF16}": in_bfloat16(channels_last)}
    ways = {
        "float32": plain.step(num_steps),
        "channels_last": channels_last.step(num_steps),
        **{way: ready.step(num_steps) for way, ready in lowered.items()},
        "4 probes": plain.step(num_steps, num_probes=4),
    }
    compiler = compiler_here()
    with fresh_compilations():
        began = now().wall
        if compiler is not None:
            compiled = prepared(case, num_features)
            assert compiled.features.surrogate is not None
            compiled.features.surrogate.compile()
            compiled.step()()
            ways[COMPILED] = compiled.step(num_steps)
        about_compiled = {"compiler": compiler, "compile_wall_seconds": now().wall - began}
        found = in_turns(ways, repeats=repeats)
    about = {"network": case.name, "surrogate": "mirror", "batch": case.batch, "num_features": num_features}
    for way, seconds in found.items():
        yield {
            **about,
            "way": way,
            "step_seconds": statistics.median(seconds) / num_steps,
            "ratio": median_ratio(seconds, found["float32"]),
            "repeats": repeats,
            **(about_compiled if way == COMPILED else {}),
            **({"product_error": product_error(lowered[way], plain)} if way in lowered else {}),
        }
    if compiler is None:
        yield {**about, "way": COMPILED, "failed": "not measured: there is no C++ compiler"}


def prepared(case: Case, num_features: int, memory_format: torch.memory_format = torch.contiguous_format) -> Prepared:
    x, y = case.data()
    train, context = x.tensor_split(2)
    if memory_format != torch.contiguous_format:
        train, context = (t.contiguous(memory_format=memory_format) for t in (train, context))
    model = case.network().to(memory_format=memory_format)
    return Prepared.of(model, train, y[: len(train)], "mirror", num_features, context=context)


def in_bfloat16(plain: Prepared) -> Prepared:
    """The same surrogate, trained by products and passes in bfloat16."""
    features, dtype = plain.features, torch.bfloat16
    product = JacobianProduct(features.plain, features.params, plain.x, autocast=dtype)
    return replace(plain, product=product, autocast=dtype)


def product_error(found: Prepared, wanted: Prepared) -> float:
    """‖J̃v − Jv‖ / ‖Jv‖ over a batch and eight probes."""
    directions = [draw_probe(wanted.features.params, kind="rademacher", seed=0, step=s) for s in range(8)]
    exact = wanted.product(wanted.x, directions)
    return float((found.product(wanted.x, directions) - exact).norm() / exact.norm())


def compiler_here() -> str | None:
    """The C++ compiler that torch.compile would call."""
    return next((name for name in (os.environ.get("CXX"), "g++", "clang++") if name and shutil.which(name)), None)


@contextlib.contextmanager
def fresh_compilations() -> Iterator[None]:
    """What earlier runs have compiled is not found, and nothing is left behind."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before
