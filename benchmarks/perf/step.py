"""One step of a fit ÷ its floor: a bare Jacobian-vector product, and a bare step of the same surrogate."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from networks import Case
from timing import in_turns, median_ratio
from torch import Tensor, nn
from torch.func import functional_call, jvp

from scalla.batches import EndlessBatches, GroupedBatches
from scalla.features import FeatureMap
from scalla.jvp import JacobianProduct, switched
from scalla.probes import draw_probe
from scalla.training import TrainingSettings, TrainingState, train_surrogate


@dataclass(frozen=True, eq=False)
class Prepared:
    """A surrogate ready to be trained on one batch, again and again."""

    features: FeatureMap
    product: JacobianProduct
    batches: GroupedBatches
    x: Tensor
    autocast: torch.dtype | None = None

    @staticmethod
    def of(
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        kind: str,
        num_features: int,
        *,
        context: Tensor | None = None,
        **options: Any,
    ) -> Prepared:
        train = EndlessBatches([(x, y)], seed=0)
        contexts = [] if context is None else [EndlessBatches([(context, None)], seed=0)]
        features = FeatureMap.of_data(
            model,
            train,
            likelihood="classification",
            num_features=num_features,
            parameters="trainable",
            dict_key_y="labels",
        )
        features.build(kind, x, options, 0)
        features.set_training(True)
        return Prepared(
            features, JacobianProduct(features.plain, features.params, x), GroupedBatches(train, contexts), x
        )

    def step(self, num_steps: int = 1, num_probes: int = 1) -> Callable[[], None]:
        """What `fit` does."""
        settings = TrainingSettings(num_steps=num_steps, num_probes=num_probes, autocast=self.autocast)
        optimizer = torch.optim.Adam(self.features.trainable(), lr=1e-6)

        def run() -> None:
            train_surrogate(
                self.features.raw,
                self.batches,
                self.product,
                settings,
                target_scale=1.0,
                optimizer=optimizer,
                state=TrainingState(),
            )

        return run

    def floor(self, num_steps: int = 1) -> Callable[[], None]:
        """What cannot be left out, with nothing around it."""
        network, params, parameters = self.features.plain.twin, self.features.params, self.features.trainable()
        optimizer = torch.optim.Adam(parameters, lr=1e-6)
        direction = draw_probe(params, kind="rademacher", seed=0, step=0)

        def run() -> None:
            for _ in range(num_steps):
                with torch.no_grad(), switched(self.product.route):
                    jvp(lambda p: functional_call(network, p, (self.x,)), (params,), (direction,))
                optimizer.zero_grad(set_to_none=True)
                self.features.raw(self.x).square().mean().backward(inputs=parameters)
                optimizer.step()

        return run


def measure(case: Case, kind: str, *, num_features: int, num_steps: int, repeats: int) -> dict[str, Any]:
    model = case.network()
    prepared = Prepared.of(model, *case.data(), kind, num_features)
    found = in_turns({"step": prepared.step(num_steps), "floor": prepared.floor(num_steps)}, repeats=repeats)
    return {
        "network": case.name,
        "surrogate": kind,
        "classes": case.num_classes,
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch": case.batch,
        "num_features": num_features,
        "step_seconds": statistics.median(found["step"]) / num_steps,
        "floor_seconds": statistics.median(found["floor"]) / num_steps,
        "ratio": median_ratio(found["step"], found["floor"]),
        "repeats": repeats,
    }
