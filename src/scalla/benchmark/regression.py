"""The second task: regression on two tables that come inside scikit-learn, and a toy in one dimension.

    diabetes, wine_alcohol   split at random by the seed; columns over the test part, in units of the target's std
    toy                      train on both sides of a gap; test on the curve inside the data, and in the gap apart

Every row has the same network, trained with the weight decay of its prior, δ = 1, and the same noise to begin with:
σ² is the mean squared error on the validation part. LLA and ScaLLA then take δ by marginal likelihood.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scalla import ScaLLA
from scalla.baselines.lla import LLA
from scalla.baselines.map import MAP
from scalla.benchmark.batches import TensorBatches
from scalla.benchmark.clock import Seconds, now
from scalla.benchmark.environment import peak_memory_mb, restart_peak_memory
from scalla.benchmark.images import digest
from scalla.benchmark.records import Run
from scalla.data import regression_table, toy_1d
from scalla.metrics import crps_gaussian, gaussian_nll, interval_coverage, rmse
from scalla.types import InputError

NAME = "regression"
#: one way of running it; called by the data's name in `Run.variant`
PROTOCOLS = ("evidence",)
TABLES = ("diabetes", "wine_alcohol", "toy")
NUM_SEEDS = 5

TITLES = {
    "map": "MAP",
    "lla_last_full": "LLA, last layer, full",
    "lla_all_full": "LLA, all layers, full",
    "scalla": "ScaLLA",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "map": {},
    "lla_last_full": {"subset": "last_layer"},
    "lla_all_full": {"subset": "all"},
    "scalla": {"num_features": 50, "start": "trained", "num_steps": 2000, "batch_size": 64, "lr": 1e-3},
}
NETWORK = {"width": 50, "num_epochs": 300, "batch_size": 32, "lr": 5e-3, "prior_precision": 1.0}


@dataclass(frozen=True, eq=False)
class Data:
    """Standardised inputs and targets; `gap` is where the toy has no data."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    grid: tuple[Tensor, Tensor] | None = None
    gap: tuple[Tensor, Tensor] | None = None


def method_names() -> list[str]:
    return list(TITLES)


def plan(
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    protocols: Sequence[str] = PROTOCOLS,
    *,
    quick: bool = False,
    data_root: Path | None = None,
    network_seed: int | None = None,
) -> list[Run]:
    unknown = sorted(set(methods or ()) - set(TITLES))
    if unknown:
        raise InputError(f"got methods {unknown}; choose from {', '.join(TITLES)}")
    if network_seed is not None:
        raise InputError("got network_seed for the regression, whose networks go with the splits of the data")
    network = {**NETWORK, "num_epochs": 50} if quick else NETWORK
    runs = []
    for table in TABLES:
        for name in (n for n in TITLES if methods is None or n in methods):
            settings = dict(SETTINGS[name])
            if quick and "num_steps" in settings:
                settings["num_steps"] = 200
            for seed in seeds or range(1, 2 if quick else NUM_SEEDS + 1):
                data = load_data(table, seed)
                runs.append(
                    Run(
                        NAME,
                        name,
                        table,
                        PROTOCOLS[0],
                        seed,
                        quick,
                        settings={"method": settings, "network": network},
                        data={f"{table}/seed{seed}": digest(*data.train, *data.test)},
                    )
                )
    return runs


def execute(run: Run, *, data_root: Path | None, cache: Path, progress_bar: bool = False) -> dict[str, Any]:
    data = load_data(run.variant, run.seed)
    network, network_time = train(data, run.settings["network"], run.seed)
    with torch.no_grad():
        residual = data.validation[1] - network(data.validation[0])
    sigma = float(residual.square().mean().sqrt().clamp_min(1e-3))
    restart_peak_memory()
    began = now()
    method = fit(run, network, data, sigma, progress_bar)
    fitted = now()
    if isinstance(method, LLA):
        method.optimize_prior_precision()
    elif isinstance(method, ScaLLA):
        method.optimize_prior_precision(method="marglik")
    tuned = now()
    metrics: dict[str, Any] = {"sigma_noise": sigma, **columns(method, *data.test)}
    metrics["prior_precision"] = prior_precision(method)
    metrics["gap"] = None if data.gap is None else columns(method, *data.gap)
    curves = {} if data.grid is None else {"toy": toy_curve(method, data)}
    error, history = None, None
    if isinstance(method, ScaLLA):
        error = method.kernel_error(data.test[0][:100])
        history = [asdict(entry) for entry in method.history]
    metrics["kernel_error"] = None if error is None else {"error": error.error, "floor": error.floor}
    return {
        "title": TITLES[run.method],
        "kind": "method",
        "note": "",
        "metrics": metrics,
        "curves": curves,
        "cost": {
            **(fitted - began).named("fit"),
            **(tuned - fitted).named("tuning"),
            **network_time.named("network"),
            "peak_memory_mb": peak_memory_mb(),
        },
        "history": history,
    }


def load_data(table: str, seed: int) -> Data:
    if table != "toy":
        found = regression_table(table, seed=seed)
        return Data(*((part.x, part.y) for part in (found.train, found.val, found.test)))
    toy = toy_1d(seed)
    order = torch.randperm(len(toy.x), generator=torch.Generator().manual_seed(seed))
    validation, train = order[:30], order[30:]
    unseen = toy_1d(seed + 1000)
    low, high = toy.gap
    inside = (toy.x_grid[:, 0] > low) & (toy.x_grid[:, 0] < high)
    noise = toy.noise_std * torch.randn(int(inside.sum()), 1, generator=torch.Generator().manual_seed(seed))
    return Data(
        train=(toy.x[train], toy.y[train]),
        validation=(toy.x[validation], toy.y[validation]),
        test=(unseen.x, unseen.y),
        grid=(toy.x_grid, toy.f_grid),
        gap=(toy.x_grid[inside], toy.f_grid[inside] + noise),
    )


def train(data: Data, settings: dict[str, Any], seed: int) -> tuple[nn.Module, Seconds]:
    """Two hidden tanh layers by Adam, on the negative log posterior with noise variance one tenth of the target's."""
    x, y = data.train
    began = now()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        width = settings["width"]
        layers = [nn.Linear(x.shape[1], width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
        network = nn.Sequential(*layers, nn.Linear(width, y.shape[1]))
        optimizer = torch.optim.Adam(network.parameters(), lr=settings["lr"])
        noise_var = 0.1 * float(y.var())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings["num_epochs"])
        for _ in range(settings["num_epochs"]):
            for inputs, targets in TensorBatches(x, y, settings["batch_size"], shuffle=True):
                sq_norm = torch.stack([p.square().sum() for p in network.parameters()]).sum()
                fit_term = 0.5 * (network(inputs) - targets).square().sum(-1).mean() / noise_var
                loss = fit_term + 0.5 * settings["prior_precision"] / len(x) * sq_norm
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            schedule.step()
    return network.eval(), now() - began


def fit(run: Run, network: nn.Module, data: Data, sigma: float, progress_bar: bool) -> MAP | LLA | ScaLLA:
    settings = run.settings["method"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        if run.method == "map":
            return MAP(network, "regression", sigma_noise=sigma, seed=run.seed).fit([])
        if run.method == "scalla":
            method = ScaLLA(
                network,
                "regression",
                num_features=settings["num_features"],
                sigma_noise=sigma,
                surrogate_options={"start": settings["start"]},
                seed=run.seed,
            )
            return method.fit(
                TensorBatches(*data.train, settings["batch_size"], shuffle=True),
                context=None if data.grid is None else data.grid[0],
                num_steps=settings["num_steps"],
                lr=settings["lr"],
                progress_bar=progress_bar,
            )
        lla = LLA(
            network,
            "regression",
            subset=settings["subset"],
            structure="full",
            sigma_noise=sigma,
            seed=run.seed,
        )
        return lla.fit(TensorBatches(*data.train, 64))


@torch.no_grad()
def columns(method: MAP | LLA | ScaLLA, x: Tensor, y: Tensor) -> dict[str, float]:
    prediction = method.predict(x, n_samples=1)
    mean, var = prediction.mean, prediction.var_with_noise
    return {
        "rmse": rmse(mean, y),
        "nll": gaussian_nll(mean, var, y),
        "crps": crps_gaussian(mean, var, y),
        "coverage": interval_coverage(mean, var, y, 0.95),
    }


@torch.no_grad()
def toy_curve(method: MAP | LLA | ScaLLA, data: Data) -> dict[str, list[float]]:
    assert data.grid is not None
    x, truth = (t[::3] for t in data.grid)
    prediction = method.predict(x, n_samples=1)
    return {
        "x": x[:, 0].tolist(),
        "truth": truth[:, 0].tolist(),
        "mean": prediction.mean[:, 0].tolist(),
        "std": prediction.var[:, 0].sqrt().tolist(),
        "std_with_noise": prediction.var_with_noise[:, 0].sqrt().tolist(),
        "train_x": data.train[0][:, 0].tolist(),
        "train_y": data.train[1][:, 0].tolist(),
    }


def prior_precision(method: MAP | LLA | ScaLLA) -> float | None:
    if isinstance(method, LLA):
        return method.fitted_prior_precision
    return float(method.prior_precision) if isinstance(method, ScaLLA) else None
