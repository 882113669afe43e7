"""Time to quality: what a fit has cost when its held-out kernel error first falls below 1.5, 1.2, 1.1 times the floor.

The benchmark's network (trained, `paper` protocol), m = 100, FashionMNIST with MNIST as context. The error is exact, of
100 + 100 inputs that no fit sees; measuring it is not counted. Recipes:

published     one Rademacher probe a step, 5 + 5 inputs, Adam 5e-5, mirror from random weights
probes        this library's default: 64 + 64 inputs, Adam 1e-3 on a cosine, mirror from the trained weights
directed      the same with targets="directed", one pool of inputs; the pool is in the cost
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scalla.batches import EndlessBatches, GroupedBatches
from scalla.benchmark.batches import TensorBatches
from scalla.benchmark.clock import now
from scalla.benchmark.images import checksums, load_images, sizes_of
from scalla.benchmark.network import network_settings, trained_network
from scalla.features import FeatureMap
from scalla.functional import FrozenNetwork
from scalla.jvp import JacobianProduct
from scalla.kernel_error import exact_kernel, kernel_error
from scalla.probes import mix_seed
from scalla.targets import DirectedTargets, directed_targets, gather_pool
from scalla.training import HistoryEntry, TrainingSettings, TrainingState, estimate_target_scale, train_surrogate
from scalla.types import Inputs

NUM_FEATURES = 100
FACTORS = (1.5, 1.2, 1.1)


@dataclass(frozen=True)
class Recipe:
    name: str
    settings: TrainingSettings
    batch: int = 64
    surrogate: str = "mirror"
    options: dict[str, Any] = field(default_factory=dict)


def recipes(*, steps: int, pool_size: int) -> list[Recipe]:
    directed = TrainingSettings(num_steps=steps, targets="directed", pool_size=pool_size)
    return [
        Recipe("probes", TrainingSettings(num_steps=steps)),
        Recipe("directed", directed),
        Recipe("directed trunk", directed, surrogate="trunk"),
        Recipe(
            "published",
            TrainingSettings(num_steps=1_000_000, lr=5e-5, schedule="constant"),
            batch=5,
            options={"start": "random"},
        ),
    ]


@dataclass(frozen=True, eq=False)
class Setting:
    model: nn.Module
    train: tuple[Tensor, Tensor]
    context: Tensor
    held: Tensor
    kernel: Tensor

    @staticmethod
    def load(cache: Path, data_root: Path | None, *, quick: bool) -> Setting:
        images = load_images(sizes_of("paper", quick=quick), data_root)
        settings = network_settings("paper", quick=quick)
        network = trained_network(images, settings, seed=1, data=checksums(data_root), folder=cache / "networks")
        num = 5 if quick else 100
        (x, y), context = images.train, images.context
        held = torch.cat([x[-num:], context[-num:]])
        frozen = FrozenNetwork(network.model)
        kernel = exact_kernel(frozen, {k: p.detach() for k, p in network.model.named_parameters()}, held)
        return Setting(network.model, (x[:-num], y[:-num]), context[:-num], held, kernel)


def measure(
    recipe: Recipe,
    setting: Setting,
    *,
    max_seconds: float,
    num_landmarks: int,
    pools: dict[int, tuple[DirectedTargets, float]],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """The curve of (seconds of the processor, JVP'd inputs, error), and when it passed each factor of the floor.

    `pools`: targets that an earlier recipe made of the same inputs, with the seconds that they cost, counted again.
    """
    began = now().cpu
    train = EndlessBatches(TensorBatches(*setting.train, recipe.batch, shuffle=True), seed=mix_seed(0, 101))
    context = TensorBatches(
        setting.context, torch.zeros(len(setting.context), dtype=torch.long), recipe.batch, shuffle=True
    )
    batches = GroupedBatches(train, [EndlessBatches(context, seed=mix_seed(0, 102), name="context")])
    features = FeatureMap.of_data(
        setting.model,
        train,
        likelihood="classification",
        num_features=NUM_FEATURES,
        parameters="trainable",
        dict_key_y="labels",
    )
    blocks = batches.peek()
    features.build(recipe.surrogate, blocks[0], recipe.options, 0)
    product = JacobianProduct(features.plain, features.params, blocks[0])
    scale = estimate_target_scale(blocks, product, recipe.settings)
    settings, jvp_inputs, directed = recipe.settings, 0, None
    spent = now().cpu - began
    if settings.targets == "directed":
        pool = gather_pool(batches, settings.pool_size)
        if settings.pool_size not in pools:
            began = now().cpu
            found = directed_targets(product, pool, NUM_FEATURES, bias=False, num_landmarks=num_landmarks)
            pools[settings.pool_size] = found, now().cpu - began
        directed, spent_on_pool = pools[settings.pool_size]
        spent += spent_on_pool
        # q directions of every input, and the sketch of the landmarks
        jvp_inputs = round(1.25 * NUM_FEATURES + 4) * (sum(len(t) for t in directed.targets) + num_landmarks)
        progress(f"{recipe.name}: pool after {spent:.0f} s")
    features_of: Callable[[Inputs], Tensor] = features.raw
    if directed is not None and recipe.surrogate == "trunk":  # as a fit does
        assert features.surrogate is not None
        directed, features_of = directed.through(features.penultimate), features.surrogate
    curve: list[dict[str, float]] = []
    floor = kernel_error(setting.kernel.new_zeros(len(setting.held), 10, NUM_FEATURES), setting.kernel).floor
    norm = setting.kernel.norm()
    not_counted = 0.0
    began = now().cpu - spent

    def note(entry: HistoryEntry) -> bool:
        nonlocal not_counted
        paused = now().cpu
        if curve and entry.step < min(1.1 * curve[-1]["step"], settings.num_steps):
            return paused - began - not_counted > max_seconds
        features.set_training(False)
        with torch.no_grad():
            g = torch.cat([features.raw(part) for part in setting.held.split(100)]) * scale
        features.set_training(True)
        flat = g.double().flatten(0, 1)
        error = float((flat @ flat.mT - setting.kernel).norm() / norm)
        seen = jvp_inputs if directed is not None else 2 * recipe.batch * entry.step * settings.num_probes
        spent = paused - began - not_counted
        curve.append({"step": entry.step, "seconds": spent, "jvp_inputs": seen, "error": error})
        progress(f"{recipe.name}: step {entry.step}, {spent:.0f} s, error {error:.3f}")
        not_counted += now().cpu - paused
        return spent > max_seconds

    features.set_training(True)
    train_surrogate(
        features_of,
        batches,
        product,
        settings,
        target_scale=scale,
        optimizer=torch.optim.Adam(features.trainable(), lr=settings.lr),
        state=TrainingState(),
        callback=note,
        directed=directed,
        batch_sizes=[recipe.batch] * 2,
    )
    return {
        "recipe": recipe.name,
        "settings": asdict(settings),
        "num_landmarks": num_landmarks if directed is not None else None,
        "surrogate": recipe.surrogate,
        "floor": floor,
        "curve": curve,
        "reached": {str(f): next((p for p in curve if p["error"] <= f * floor), None) for f in FACTORS},
    }


def compared(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The published recipe's last error: what the others had spent when they first reached it."""
    published = next((row for row in found if row["recipe"] == "published" and row["curve"]), None)
    if published is None:
        return []
    last = published["curve"][-1]
    rows = []
    for row in found:
        point = next((p for p in row["curve"] if p["error"] <= last["error"]), None)
        if row is not published and point is not None:
            rows.append(
                {
                    "recipe": row["recipe"],
                    "error": last["error"],
                    "share_of_seconds": point["seconds"] / last["seconds"],
                    "share_of_jvp_inputs": point["jvp_inputs"] / last["jvp_inputs"],
                }
            )
    return rows
