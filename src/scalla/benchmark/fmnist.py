"""`scalla benchmark fmnist`: the published table. What is to be run, and how one run of it goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from scalla import ScaLLA
from scalla.baselines.protocol import Detector
from scalla.benchmark import images as image_data
from scalla.benchmark.clock import now
from scalla.benchmark.environment import peak_memory_mb, restart_peak_memory
from scalla.benchmark.images import Images, load_images, sizes_of
from scalla.benchmark.measure import measure, prediction_cost
from scalla.benchmark.methods import ROWS, Problem
from scalla.benchmark.network import NetworkSettings, TrainedNetwork, network_settings, trained_network
from scalla.benchmark.records import Run
from scalla.benchmark.shared_fits import SharedFits
from scalla.benchmark.tuning import choose_score, fit_row, tune_row
from scalla.types import InputError

NAME = "fmnist"
PROTOCOLS = ("paper", "tuned")
#: the run that trains the network, before the rows that need it
NETWORK = "network"
NUM_WATCHED, NUM_KERNEL, NUM_TIMED = 128, 100, 500


def method_names() -> list[str]:
    return list(ROWS)


def plan(
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    protocols: Sequence[str] = PROTOCOLS,
    *,
    quick: bool = False,
    data_root: Path | None = None,
    network_seed: int | None = None,
) -> list[Run]:
    """Networks first, then each row's variants and seeds; seeds of None are as many as the row wants (one if quick)."""
    unknown = sorted(set(methods or ()) - set(ROWS))
    if unknown:
        raise InputError(f"got methods {unknown}; choose from {', '.join(ROWS)}")
    wrong = sorted(set(protocols) - set(PROTOCOLS))
    if wrong:
        raise InputError(f"got protocol {wrong}; choose 'paper' or 'tuned'")
    data = image_data.checksums(data_root, allow_subset=quick)
    rows: list[Run] = []
    networks: dict[tuple[str, int], Run] = {}
    for protocol in protocols:
        trained = asdict(network_settings(protocol, quick=quick))
        sizes = asdict(sizes_of(protocol, quick=quick))
        for row in (ROWS[name] for name in ROWS if methods is None or name in methods):
            if protocol not in row.protocols:
                if methods is not None and not any(p in row.protocols for p in protocols):
                    raise InputError(f"{row.name} is a row of the protocols {', '.join(row.protocols)} only")
                continue
            for seed in seeds or range(1, 2 if quick else row.num_seeds + 1):
                common: dict[str, Any] = {"protocol": protocol, "quick": quick, "data": data}
                of_network = seed if network_seed is None else network_seed
                networks.setdefault(
                    (protocol, of_network),
                    Run(NAME, NETWORK, seed=of_network, settings={"network": trained, "sizes": sizes}, **common),
                )
                for variant in row.variants_in(protocol):
                    settings: dict[str, Any] = {
                        "method": row.settings_of(variant, protocol, quick=quick),
                        "network": trained,
                        "sizes": sizes,
                    }
                    if protocol == "tuned":
                        settings |= {"trials": list(row.trials), "trial": dict(row.trial)}
                    rows.append(
                        Run(NAME, row.name, variant, seed=seed, network_seed=network_seed, settings=settings, **common)
                    )
    return [*networks.values(), *rows]


def execute(run: Run, *, data_root: Path | None, cache: Path, progress_bar: bool = False) -> dict[str, Any]:
    """One run, from the data to the numbers."""
    images = load_images(sizes_of(run.protocol, quick=run.quick), data_root, allow_subset=run.quick)
    seed = run.seed if run.network_seed is None else run.network_seed
    network = trained_network(
        images,
        NetworkSettings(**run.settings["network"]),
        seed=seed,
        data=dict(run.data),
        folder=cache / "networks",
        progress_bar=progress_bar,
    )
    if run.method == NETWORK:
        return _network_record(network)
    row = ROWS[run.method]
    settings = run.settings["method"]
    fits = SharedFits(
        cache / "fits",
        {"run": [run.protocol, run.seed, seed, run.quick], "data": run.data}
        | {k: run.settings[k] for k in ("network", "sizes")},
    )
    watched = images.test[0] if images.validation is None else images.validation[0]
    problem = Problem(
        network.model,
        images.train,
        images.context,
        run.seed,
        validation=images.validation,
        watched=watched[:NUM_WATCHED],
        progress_bar=progress_bar,
        fits=fits,
    )
    restart_peak_memory()
    before = peak_memory_mb()
    tuned = run.protocol == "tuned"
    result = tune_row(row, problem, images, settings) if tuned else fit_row(row, problem, settings)
    peak_of_fit = max(peak_memory_mb(), fits.peak_before_mb)

    began = now()
    timed = images.test[0][:NUM_TIMED]
    cost: dict[str, Any] = prediction_cost(
        result.method, network.model, timed, num_samples=row.num_samples, seconds=2.0 if run.quick else 10.0
    )
    record = measure(result.method, images, num_samples=row.num_samples, published=not tuned)
    if tuned and row.kind == "method":
        choice = choose_score(result.method, images, settings)
        record["metrics"]["ood_choice"] = choice
        for found in record["metrics"]["ood"].values():
            found["chosen"] = found[choice["score"]]
    record["metrics"]["kernel_error"] = _kernel_error(result.method, images, run, settings)
    record["metrics"]["found"] = row.found(result.method) if row.found is not None else {}
    cost |= {
        **(result.fit_time + fits.spent_before).named("fit"),
        **result.tuning_time.named("tuning"),
        **network.time.named("network"),
        **(now() - began).named("measuring"),
        "memory_before_mb": before,
        "peak_memory_fit_mb": peak_of_fit,
        "peak_memory_mb": max(peak_memory_mb(), fits.peak_before_mb),
    }
    history = [asdict(entry) for entry in result.method.history] if isinstance(result.method, ScaLLA) else None
    return {
        "title": row.title,
        "kind": row.kind,
        "note": row.note,
        "chosen": {k: v for k, v in result.settings.items() if v != settings.get(k)},
        "trials": result.trials,
        "cost": cost,
        "history": history,
        **record,
    }


def _network_record(network: TrainedNetwork) -> dict[str, Any]:
    return {
        "title": "network",
        "kind": "network",
        "note": "",
        "metrics": {},
        "cost": {**network.time.named("fit"), "peak_memory_mb": peak_memory_mb()},
        "history": network.history,
    }


def _kernel_error(method: Any, images: Images, run: Run, settings: dict[str, Any]) -> dict[str, Any] | None:
    """On held-out images of both kinds, FashionMNIST and MNIST; of a biased kernel, its own (biased) target."""
    if isinstance(method, Detector) or not isinstance(method, ScaLLA):
        return None
    count = 10 if run.quick else NUM_KERNEL
    inside, outside = images.test[0][:count], images.out["MNIST"][:count]
    if settings["bias"]:
        error = method.kernel_error(inside, context=outside)
    else:
        error = method.kernel_error(torch.cat([inside, outside]))
    return {"error": error.error, "floor": error.floor, "num_inputs": [len(inside), len(outside)]}
