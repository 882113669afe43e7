"""One dimension, two clumps of data: the band of ScaLLA widens where exact linearized Laplace's does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from oracles import DenseLLA, dense_jacobian

SCRIPT = Path(__file__).resolve().parent.parent / "docs" / "scripts" / "regression_band.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script that draws the picture of the documentation."""
    spec = importlib.util.spec_from_file_location("regression_band_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def column(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_the_band_widens_away_from_the_data_as_the_exact_one_does(script: ModuleType) -> None:
    x, y = script.data()
    model = script.trained(x, y)
    exact, la = script.exact(model, x, y), script.approximate(model, x, y)
    dense = DenseLLA(
        dense_jacobian(model, x), model(x).detach(), y, "regression", sigma=script.NOISE, delta=script.PRIOR_PRECISION
    )
    grid = torch.linspace(-4, 4, 41, dtype=torch.float64)[:, None]
    std, wanted = la.predict(grid).var.sqrt()[:, 0], exact.predict(grid).var.sqrt()[:, 0]
    oracle = dense.variance(dense_jacobian(model, grid)).flatten().sqrt()
    torch.testing.assert_close(wanted, oracle, rtol=1e-6, atol=0)
    # ScaLLA with far fewer features: the same shape, and the same size where there are data and where there are none.
    assert float(torch.corrcoef(torch.stack([std, wanted]))[0, 1]) > 0.98
    assert float((std - wanted).norm() / wanted.norm()) < 0.15
    for la_or_exact in (la, exact):
        at_data, gap, beyond = (
            la_or_exact.predict(column(points)).var.sqrt()
            for points in (script.AT_DATA, script.IN_THE_GAP, script.BEYOND)
        )
        assert float(at_data.max()) < script.NOISE
        assert float(gap.min()) > 10 * float(at_data.max())
        assert float(beyond.min()) > 10 * float(at_data.max())
