"""A regression in one dimension: the band of exact linearized Laplace beside that of ScaLLA.

    python docs/scripts/regression_band.py    writes docs/images/regression_band.png, prints the standard deviations

Exact linearized Laplace is ScaLLA with the Jacobians themselves as features, 481 of them for this network.
"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from scalla import ScaLLA
from scalla.plots import regression_band

NOISE, PRIOR_PRECISION, NUM_FEATURES = 0.1, 1.0, 20
#: where the band is looked at: at the data, in the gap between them, and beyond them
AT_DATA, IN_THE_GAP, BEYOND = (-1.5, 1.5), (0.0,), (-3.5, 3.5)


class Jacobians(nn.Module):
    """x → J(x) of shape (B, C, P)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        params = {name: p.detach() for name, p in self.model.named_parameters()}
        jacobians = vmap(jacrev(lambda p, row: functional_call(self.model, p, (row,))), (None, 0))(params, x)
        return torch.cat([j.flatten(2) for j in jacobians.values()], -1)


def data() -> tuple[Tensor, Tensor]:
    """sin 2x with noise, on both sides of a gap."""
    generator = torch.Generator().manual_seed(0)
    side = torch.rand(30, 1, generator=generator, dtype=torch.float64) * 1.2 + 0.8
    x = torch.cat([-side[:15], side[15:]])
    return x, (2 * x).sin() + NOISE * torch.randn(30, 1, generator=generator, dtype=torch.float64)


def trained(x: Tensor, y: Tensor) -> nn.Module:
    """A small network at the maximum a posteriori."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(1500):
        prior = 0.5 * PRIOR_PRECISION * sum(p.square().sum() for p in model.parameters())
        loss = 0.5 * (model(x) - y).square().sum() / NOISE**2 + prior
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def exact(model: nn.Module, x: Tensor, y: Tensor) -> ScaLLA:
    num_params = sum(p.numel() for p in model.parameters())
    la = ScaLLA(
        model,
        "regression",
        num_features=num_params,
        surrogate=Jacobians(model),
        sigma_noise=NOISE,
        prior_precision=PRIOR_PRECISION,
    )
    return la.fit([(x, y)], num_steps=0)


def approximate(model: nn.Module, x: Tensor, y: Tensor, *, num_steps: int = 3000) -> ScaLLA:
    """The kernel is matched at the data and, through inputs without labels, wherever it will be looked at."""
    la = ScaLLA(model, "regression", num_features=NUM_FEATURES, sigma_noise=NOISE, prior_precision=PRIOR_PRECISION)
    around = torch.linspace(-4, 4, 200, dtype=torch.float64)[:, None]
    return la.fit([(x, y)], context=around, context_batch_size=100, num_steps=num_steps, targets="directed", lr=1e-2)


def main() -> None:
    x, y = data()
    model = trained(x, y)
    grid = torch.linspace(-4, 4, 401, dtype=torch.float64)[:, None]
    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    print("standard deviation of f       x =", *(f"{v:6.1f}" for v in (*BEYOND, *AT_DATA, *IN_THE_GAP)))
    for ax, la, title in zip(
        axes,
        (exact(model, x, y), approximate(model, x, y)),
        ("exact linearized Laplace, 481 features", f"ScaLLA, {NUM_FEATURES} features"),
        strict=True,
    ):
        regression_band(grid, la.predict(grid), data=(x, y), truth=(2 * grid).sin(), ax=ax, title=title)
        points = torch.tensor([*BEYOND, *AT_DATA, *IN_THE_GAP], dtype=torch.float64)[:, None]
        print(f"{title:40s}", *(f"{v:6.3f}" for v in la.predict(points).var.sqrt().flatten().tolist()))
    path = Path(__file__).resolve().parent.parent / "images" / "regression_band.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"wrote {path.parent.parent.name}/{path.parent.name}/{path.name}")


if __name__ == "__main__":
    main()
