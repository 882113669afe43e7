"""Regression: the tables that come inside scikit-learn, and a toy in one dimension with a gap."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import TensorDataset

from scalla.data.bundled import frozen_rng, sklearn_datasets
from scalla.types import InputError

#: name -> (scikit-learn's table, the column to predict from the others; None: the table's own targets)
TABLES: dict[str, tuple[str, str | None]] = {
    "diabetes": ("diabetes", None),
    "linnerud": ("linnerud", None),
    "wine_alcohol": ("wine", "alcohol"),
    "iris_petal_width": ("iris", "petal width (cm)"),
}


@dataclass(frozen=True, eq=False)
class Table:
    """Inputs and targets, standardised."""

    x: Float[Tensor, "N features"]
    y: Float[Tensor, "N C"]

    def __len__(self) -> int:
        return len(self.y)

    def dataset(self) -> TensorDataset:
        """(x, y) pairs, for a DataLoader."""
        return TensorDataset(self.x, self.y)


@dataclass(frozen=True, eq=False)
class RegressionTable:
    """A table split in three. The moments are those of `train` alone: y = y_mean + y_std · standardised."""

    name: str
    feature_names: tuple[str, ...]
    target_names: tuple[str, ...]
    train: Table
    val: Table
    test: Table
    x_mean: Float[Tensor, " features"]
    x_std: Float[Tensor, " features"]
    y_mean: Float[Tensor, " C"]
    y_std: Float[Tensor, " C"]


def regression_table(
    name: str = "diabetes",
    *,
    seed: int = 0,
    val_share: float = 0.1,
    test_share: float = 0.2,
    dtype: torch.dtype = torch.float32,
) -> RegressionTable:
    """A table split at random and standardised.

    diabetes (442 x 10), linnerud (20 x 3, three targets), and two tables of classes with a measurement as the
    target: wine_alcohol (178 x 12) and iris_petal_width (150 x 3).
    """
    if name not in TABLES:
        raise InputError(f"got name={name!r}; wanted one of {', '.join(TABLES)}")
    x, y, feature_names, target_names = _columns(name)
    num_test, num_val = round(test_share * len(x)), round(val_share * len(x))
    if min(test_share, val_share) < 0 or len(x) - num_test - num_val < 2:
        raise InputError(
            f"got val_share={val_share} and test_share={test_share}, which leave "
            f"{len(x) - num_test - num_val} of {len(x)} rows to train on; "
            "wanted shares ≥ 0 that leave at least 2"
        )
    order = frozen_rng(seed).permutation(len(x))
    test, val, train = np.split(order, [num_test, num_test + num_val])
    (x_mean, x_std), (y_mean, y_std) = _mean_and_std(x[train]), _mean_and_std(y[train])

    def part(rows: np.ndarray) -> Table:
        return Table(
            torch.from_numpy((x[rows] - x_mean) / x_std).to(dtype),
            torch.from_numpy((y[rows] - y_mean) / y_std).to(dtype),
        )

    moments = [torch.from_numpy(a).to(dtype) for a in (x_mean, x_std, y_mean, y_std)]
    return RegressionTable(name, feature_names, target_names, part(train), part(val), part(test), *moments)


def _columns(name: str) -> tuple[np.ndarray, np.ndarray, tuple[str, ...], tuple[str, ...]]:
    table, target = TABLES[name]
    bunch = getattr(sklearn_datasets(), f"load_{table}")()
    x = np.asarray(bunch.data, dtype=np.float64)
    features = [str(f) for f in bunch.feature_names]
    if target is None:
        y = np.asarray(bunch.target, dtype=np.float64).reshape(len(x), -1)
        targets = [str(t) for t in bunch.get("target_names", ["disease progression"])]
        return x, y, tuple(features), tuple(targets)
    column = features.index(target)
    others = [f for f in features if f != target]
    return np.delete(x, column, 1), x[:, [column]], tuple(others), (target,)


def _mean_and_std(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    std = values.std(0)
    return values.mean(0), np.where(std > 0, std, 1.0)  # a constant column becomes zeros


@dataclass(frozen=True, eq=False)
class Toy1D:
    """Noisy points of a curve on both sides of a gap, and the curve itself on a wider grid."""

    x: Float[Tensor, "N 1"]
    y: Float[Tensor, "N 1"]
    x_grid: Float[Tensor, "G 1"]
    f_grid: Float[Tensor, "G 1"]
    noise_std: float
    gap: tuple[float, float]

    def dataset(self) -> TensorDataset:
        """(x, y) pairs, for a DataLoader."""
        return TensorDataset(self.x, self.y)


def toy_1d(seed: int = 0, *, num: int = 200, noise_std: float = 0.1, dtype: torch.dtype = torch.float32) -> Toy1D:
    """y = sin(2x) + x/3 + noise, with x uniform on [−3, −1] ∪ [1, 3]; the grid is 301 points of [−5, 5]."""
    if num < 1 or noise_std < 0:
        raise InputError(f"got num={num} and noise_std={noise_std}; wanted num ≥ 1 and noise_std ≥ 0")
    rng = frozen_rng(seed)
    side = rng.randint(2, size=num) * 2 - 1
    x = np.sort(side * rng.uniform(1, 3, num))[:, None]
    y = _curve(x) + noise_std * rng.standard_normal((num, 1))
    grid = np.linspace(-5, 5, 301)[:, None]
    points = [torch.from_numpy(a).to(dtype) for a in (x, y, grid, _curve(grid))]
    return Toy1D(points[0], points[1], points[2], points[3], noise_std, (-1.0, 1.0))


def _curve(x: np.ndarray) -> np.ndarray:
    return np.sin(2 * x) + x / 3
