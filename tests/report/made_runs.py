"""A folder of results as the benchmark writes it, with made-up numbers: what the report is tested on."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scalla.benchmark import regression
from scalla.benchmark.methods import ROWS
from scalla.benchmark.records import SCHEMA_VERSION, Run, write_json

SETS = ("KMNIST", "MNIST", "digits", "photos", "glyphs", "automata", "noise")
METHOD_SCORES = ("entropy", "double_softmax", "max_prob")
GAUSSIAN_SCORES = ("mutual_information", "gaussian_entropy", "gaussian_entropy_projected", "variance")
SEVERITIES = {"rotation": (0.0, 15.0, 30.0, 45.0, 60.0, 90.0), "noise": (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)}
VERSIONS = {"python": "3.11.7", "scalla": "0.1.0", "torch": "2.13.0+cpu"}
HARDWARE = {"cpu": "A processor", "cores": 2, "threads": 1, "ram_gb": 23.5, "system": "Linux x86_64", "device": "cpu"}
CHECKSUMS = {"FashionMNIST/train": "a" * 64, "FashionMNIST/test": "b" * 64, "KMNIST/test": "c" * 64}


def write_results(
    folder: Path,
    *,
    protocols: Sequence[str] = ("paper", "tuned"),
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] = (1, 2, 3),
    with_regression: bool = True,
) -> None:
    for protocol in protocols:
        for seed in seeds:
            run = Run("fmnist", "network", "", protocol, seed, settings={"network": {"lr": 1e-3}}, data=CHECKSUMS)
            write_json(run.done_path(folder), network_record(run))
        for row in ROWS.values():
            if protocol in row.protocols and (methods is None or row.name in methods):
                for variant in row.variants_in(protocol):
                    for seed in seeds:
                        run = run_of(row.name, variant, protocol, seed)
                        write_json(run.done_path(folder), record_of(run))
    if with_regression:
        for table in regression.TABLES:
            for name in regression.TITLES:
                for seed in seeds:
                    run = Run("regression", name, table, "evidence", seed, data={f"{table}/seed{seed}": "d" * 64})
                    write_json(run.done_path(folder), regression_record(run))


def run_of(method: str, variant: str, protocol: str, seed: int, **settings: Any) -> Run:
    given = {"method": {"num_samples": 2048, "lr": 1e-3, **settings}, "network": {"lr": 1e-3}}
    return Run("fmnist", method, variant, protocol, seed, settings=given, data=CHECKSUMS)


def fail(folder: Path, run: Run, message: str = "matrix is <not> positive & definite") -> None:
    error = {"type": "LinAlgError", "message": message, "traceback": ["scalla/ella.py:12 in fit"]}
    write_json(run.failed_path(folder), {**_head(run), "status": "failed", "error": error})


def record_of(run: Run, **metrics: Any) -> dict[str, Any]:
    """A done run; `metrics` in place of the made-up ones."""
    row = ROWS[run.method]
    rng = np.random.default_rng([run.seed, *run.method.encode(), *run.variant.encode()])
    gaussian = row.kind == "method" and not run.method.startswith("map")
    scores = ["score"] if row.kind != "method" else [*METHOD_SCORES, *(GAUSSIAN_SCORES if gaussian else ())]
    return {
        **_head(run),
        "status": "done",
        "title": row.title,
        "kind": row.kind,
        "note": row.note,
        "chosen": {"prior_precision": 10.0} if run.protocol == "tuned" and row.trials else {},
        "trials": [{**t, "value": float(rng.normal())} for t in row.trials] if run.protocol == "tuned" else [],
        "warnings": {"NumericalWarning: jitter of 1e-8 was added": 2} if run.method == "ella" else {},
        "cost": _cost(rng),
        "history": _history(rng) if run.method.startswith("scalla") else None,
        "metrics": {**_metrics(rng, row.kind, scores, run), **metrics},
        "curves": _curves(rng, row.kind, [s for s in ("entropy", "gaussian_entropy", "score") if s in scores]),
        "gallery": _gallery(rng, "gaussian_entropy" if gaussian else scores[0]),
    }


def network_record(run: Run) -> dict[str, Any]:
    history = [{"epoch": e + 1, "loss": 1 / (e + 1), "lr": 1e-3, "validation_accuracy": 0.9} for e in range(3)]
    cost = {"fit_seconds": 512.3, "peak_memory_mb": 512.0}
    return {
        **_head(run),
        "status": "done",
        "title": "network",
        "kind": "network",
        "note": "",
        "warnings": {},
        "metrics": {},
        "cost": cost,
        "history": history,
    }


def regression_record(run: Run) -> dict[str, Any]:
    rng = np.random.default_rng([run.seed, *run.method.encode()])

    def columns() -> dict[str, float]:
        return {"rmse": float(rng.random()), "nll": float(rng.random()), "crps": float(rng.random()), "coverage": 0.94}

    x = np.linspace(-4, 4, 60)
    toy = {
        "x": x.tolist(), "truth": np.sin(x).tolist(), "mean": (np.sin(x) + 0.1).tolist(),
        "std": (0.1 + 0.02 * x**2).tolist(), "std_with_noise": (0.2 + 0.02 * x**2).tolist(),
        "train_x": x[::4].tolist(), "train_y": np.sin(x[::4]).tolist(),
    }  # fmt: skip
    return {
        **_head(run),
        "status": "done",
        "title": regression.TITLES[run.method],
        "kind": "method",
        "note": "",
        "warnings": {},
        "metrics": {
            **columns(),
            "sigma_noise": 0.3,
            "prior_precision": None if run.method == "map" else 2.0,
            "gap": columns() if run.variant == "toy" else None,
            "kernel_error": {"error": 0.1, "floor": 0.02} if run.method == "scalla" else None,
        },
        "curves": {"toy": toy} if run.variant == "toy" else {},
        "cost": {"fit_seconds": 1.5, "tuning_seconds": 0.1, "network_seconds": 2.0, "peak_memory_mb": 300.0},
        "history": None,
    }


def _head(run: Run) -> dict[str, Any]:
    return {
        "schema": SCHEMA_VERSION,
        "run": run.to_json(),
        "started": f"2026-01-0{min(run.seed, 9)}T10:00:00+00:00",
        "versions": VERSIONS,
        "hardware": HARDWARE,
        "seconds": 100.0,
        "wall_seconds": 110.0,
    }


def _cost(rng: np.random.Generator) -> dict[str, float]:
    us = float(10 ** rng.uniform(1.5, 3.5))
    return {
        "fit_seconds": float(10 ** rng.uniform(0, 3.5)), "tuning_seconds": float(rng.random()),
        "us_map_forward": 30.0, "us_per_prediction": us, "us_per_prediction_mc": 3 * us, "ratio_to_map": us / 30,
        "peak_memory_fit_mb": 900.0, "peak_memory_mb": 1200.0, "memory_before_mb": 500.0, "timing_batch": 500,
    }  # fmt: skip


def _history(rng: np.random.Generator) -> list[dict[str, Any]]:
    return [
        {
            "step": s,
            "loss": 1.0,
            "lr": 1e-3,
            "seconds": s / 10,
            "kernel_score": 0.1 + 100 / (100 + s) + rng.random() / 99,
        }
        for s in range(200, 4001, 200)
    ]


def _metrics(rng: np.random.Generator, kind: str, scores: Sequence[str], run: Run) -> dict[str, Any]:
    quality = dict.fromkeys(("accuracy", "nll", "ece", "brier", "rejection_area"))
    if kind == "method":
        quality = {
            "accuracy": 0.91 + 0.002 * float(rng.normal()), "nll": 0.255 + 0.004 * float(rng.normal()),
            "ece": 0.01 + 0.004 * float(rng.random()), "brier": 0.13, "rejection_area": 0.98,
        }  # fmt: skip

    def detection() -> dict[str, float]:
        return {"auc": float(rng.uniform(0.7, 1)), "fpr95": float(rng.random()), "aupr": float(rng.random())}

    ood: dict[str, dict[str, Any]] = {name: {score: detection() for score in scores} for name in SETS}
    published = None
    if "gaussian_entropy" in scores:
        published = {"accuracy": 0.909, "nll": 0.26, "ece": 0.02, "auc": {name: float(rng.random()) for name in SETS}}
    choice = None
    if run.protocol == "tuned" and kind == "method":
        choice = {"score": scores[-1], "held_out_auc": dict.fromkeys(scores, 0.9)}
        for found in ood.values():
            found["chosen"] = found[scores[-1]]

    def entry(step: int, severity: float) -> dict[str, Any]:
        quality = {
            "accuracy": 0.9 - 0.1 * step,
            "nll": 0.3 + 0.4 * step + 0.1 * rng.random(),
            "ece": 0.01 + 0.05 * step,
        }
        means = {"scores": {s: float(step) for s in scores}, "auc": dict.fromkeys(scores, 0.5 + 0.08 * step)}
        return {"severity": severity, **(quality if kind == "method" else {}), **means}

    shift = {name: [entry(i, s) for i, s in enumerate(severities)] for name, severities in SEVERITIES.items()}
    found = {**quality, "ood": ood, "shift": shift, "as_published": published, "ood_choice": choice, "found": {}}
    if run.method.startswith("scalla"):
        found |= {"found": {"prior_precision": 12.5}, "kernel_error": {"error": 0.2, "floor": 0.05}}
    return found


def _curves(rng: np.random.Generator, kind: str, scores: Sequence[str]) -> dict[str, Any]:
    rate = np.linspace(0, 1, 101)
    edges = np.linspace(0, 2.3, 41)
    curves: dict[str, Any] = {"ood": {}}
    for score in scores:
        power = {name: float(rng.uniform(0.1, 0.6)) for name in SETS}
        counts = {
            name: np.histogram(rng.gamma(shape, 0.2, 10_000).clip(0, 2.3), edges)[0].tolist()
            for shape, name in enumerate(("FashionMNIST", *SETS), 1)
        }
        curves["ood"][score] = {
            "histogram": {"edges": edges.tolist(), "counts": counts},
            "roc": {name: {"fpr": rate.tolist(), "tpr": (rate**p).tolist()} for name, p in power.items()},
        }
    if kind == "method":
        middle = (np.arange(15) + 0.5) / 15
        counts_ = [0, 0, 3, 10, 20, 30, 50, 70, 90, 120, 200, 300, 500, 1000, 7607]
        known = [float(m) if n else None for m, n in zip(middle, counts_, strict=True)]
        accuracy = [None if m is None else min(1.0, m + 0.03 * float(rng.normal())) for m in known]
        curves["reliability"] = {
            "edges": (np.arange(16) / 15).tolist(), "confidence": known, "accuracy": accuracy, "count": counts_,
        }  # fmt: skip
        share = np.linspace(0, 0.99, 50)
        curves["rejection"] = {"rejected": share.tolist(), "accuracy": (0.91 + 0.09 * share**0.5).clip(0, 1).tolist()}
    return curves


def _gallery(rng: np.random.Generator, score: str) -> dict[str, Any]:
    def item(name: str, i: int) -> dict[str, Any]:
        side = np.linspace(-1, 1, 28)
        blob = np.exp(-(side[:, None] ** 2 + (side[None] - 0.1 * i) ** 2) * (1 + len(name)))
        pixels = (255 * blob).astype(np.uint8).tobytes()
        found = {"index": i, "score": float(rng.normal()), "image": base64.b64encode(zlib.compress(pixels, 9)).decode()}
        return found | ({"label": i, "predicted": 9 - i} if name == "FashionMNIST" else {})

    ends = {
        name: {end: [item(name, i) for i in range(6)] for end in ("least", "most")} for name in ("FashionMNIST", *SETS)
    }
    return {"score": score, "sets": ends}
