"""−log p(y|f), its Hessian through a factor, and the checks on labels, each against a definition by loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cases import normal
from oracles import dense_ggn
from scalla.likelihoods import check_labels, hessian_factor, loss_sums
from scalla.types import InputError, Likelihood

KINDS: list[tuple[Likelihood, int]] = [
    ("classification", 1),
    ("classification", 2),
    ("classification", 5),
    ("regression", 1),
    ("regression", 3),
]


def labels_for(likelihood: Likelihood, num_outputs: int, num: int = 7) -> Tensor:
    if likelihood == "regression":
        return normal(num, num_outputs, seed=9, dtype=torch.float64)
    return torch.arange(num) % max(num_outputs, 2)


# ---------------------------------------------------------------- losses and Hessians


@pytest.mark.parametrize(("likelihood", "num_outputs"), KINDS)
def test_loss_sums_one_input_after_the_other(likelihood: Likelihood, num_outputs: int) -> None:
    f, y = 3 * normal(7, num_outputs, dtype=torch.float64), labels_for(likelihood, num_outputs)
    found = loss_sums(likelihood, f, y)
    if likelihood == "regression":
        wanted = [sum(float(y[i, c] - f[i, c]) ** 2 for i in range(7)) for c in range(num_outputs)]
    elif num_outputs == 1:
        p = [1 / (1 + math.exp(-float(v))) for v in f[:, 0]]
        wanted = [-sum(math.log(q if c else 1 - q) for q, c in zip(p, y.tolist(), strict=True))]
    else:
        log_norm = [math.log(sum(math.exp(float(v)) for v in row)) for row in f]
        wanted = [-sum(float(f[i, c]) - log_norm[i] for i, c in enumerate(y.tolist()))]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("likelihood", "num_outputs"), KINDS)
def test_the_loss_is_the_hessians_own(likelihood: Likelihood, num_outputs: int) -> None:
    """AᵀA is the second derivative of the loss (half of it for squares, which carry no ½) through f = f₀ + g w."""
    f, g = normal(7, num_outputs, dtype=torch.float64), normal(7, num_outputs, 4, seed=8, dtype=torch.float64)
    y = labels_for(likelihood, num_outputs)

    def loss(w: Tensor) -> Tensor:
        return loss_sums(likelihood, f + g @ w, y).sum()

    hessian = torch.autograd.functional.hessian(loss, torch.zeros(4, dtype=torch.float64))
    a = hessian_factor(likelihood, f, g)
    found = (a.mT @ a).sum(0)
    torch.testing.assert_close(found, hessian / (2 if likelihood == "regression" else 1), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("likelihood", "num_outputs"), KINDS)
def test_hessian_factor_by_the_dense_lambda(likelihood: Likelihood, num_outputs: int) -> None:
    f, g = 3 * normal(7, num_outputs, dtype=torch.float64), normal(7, num_outputs, 4, seed=8, dtype=torch.float64)
    a = hessian_factor(likelihood, f, g)
    torch.testing.assert_close((a.mT @ a).sum(0), dense_ggn(g, f, likelihood), rtol=1e-12, atol=1e-12)
    if likelihood == "regression":  # one matrix for each output, so that each can have a noise of its own
        sigma = torch.linspace(0.3, 2, num_outputs, dtype=torch.float64)
        found = torch.einsum("r,rij->ij", sigma**-2, a.mT @ a)
        torch.testing.assert_close(found, dense_ggn(g, f, likelihood, sigma), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_outputs", [1, 2, 5])
def test_saturated_logits_stay_finite_and_positive(num_outputs: int) -> None:
    f = torch.zeros(3, num_outputs)
    f[:, 0] = torch.tensor([1e4, -1e4, 80.0])
    a = hessian_factor("classification", f, normal(3, num_outputs, 4))
    assert a.dtype == torch.float64
    assert torch.isfinite(a).all()
    assert torch.linalg.eigvalsh((a.mT @ a)[0]).min() >= -1e-15
    assert torch.isfinite(loss_sums("classification", f, torch.zeros(3, dtype=torch.long))).all()


def test_the_direction_of_all_logits_together_is_not_informed() -> None:
    """Λ·1 = 0."""
    g = normal(6, 1, 4, dtype=torch.float64).expand(-1, 5, -1)
    a = hessian_factor("classification", normal(6, 5, dtype=torch.float64), g)
    assert float(a.abs().max()) < 1e-14


def test_sums_are_in_float64_whatever_comes() -> None:
    f, y = normal(7, 3, dtype=torch.bfloat16), labels_for("classification", 3)
    assert loss_sums("classification", f, y).dtype == torch.float64
    torch.testing.assert_close(
        loss_sums("classification", f, y), loss_sums("classification", f.double(), y), rtol=0, atol=0
    )


# ---------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("likelihood", "num_outputs", "y", "wanted"),
    [
        ("classification", 3, torch.tensor([0, 1, 2]), [0, 1, 2]),
        ("classification", 3, torch.tensor([0, 1, 2], dtype=torch.uint8), [0, 1, 2]),
        ("classification", 3, torch.tensor([[0], [1], [2]]), [0, 1, 2]),
        ("classification", 3, [0, 1, 2], [0, 1, 2]),
        ("classification", 3, np.array([0, 1, 2]), [0, 1, 2]),
        ("classification", 2, torch.tensor([False, True, True]), [0, 1, 1]),
        ("classification", 1, torch.tensor([0, 1, 1]), [0, 1, 1]),
        ("classification", 1, torch.tensor([0.0, 1.0, 1.0]), [0, 1, 1]),  # as BCEWithLogitsLoss wants them
        ("classification", 1, torch.tensor([[0.0], [1.0], [1.0]]), [0, 1, 1]),
    ],
)
def test_class_labels_that_are_understood(likelihood: Likelihood, num_outputs: int, y: Any, wanted: list[int]) -> None:
    found = check_labels(likelihood, torch.zeros(3, num_outputs), y)
    assert found.tolist() == wanted
    assert found.dtype == torch.int64


def test_targets_that_are_understood() -> None:
    outputs = torch.zeros(3, 1, dtype=torch.float64)
    column = check_labels("regression", outputs, torch.tensor([1.0, 2.0, 3.0]))
    assert column.shape == (3, 1)
    assert column.dtype == torch.float64
    assert check_labels("regression", outputs, [1, 2, 3]).tolist() == [[1.0], [2.0], [3.0]]
    both = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert torch.equal(check_labels("regression", torch.zeros(2, 2), both), both)


BAD_LABELS: list[tuple[str, int, Any, str]] = [
    ("classification", 3, torch.tensor([0, 1, 3]), r"from 0 to 3; wanted 0 to 2, as the network has 3 outputs"),
    ("classification", 3, torch.tensor([-100, 1, 2]), r"from -100 to 2; wanted 0 to 2"),
    ("classification", 1, torch.tensor([0, 1, 2]), r"from 0 to 2; wanted 0 to 1"),
    ("classification", 3, torch.tensor([0.0, 1.0, 2.0]), r"type torch.float32; wanted integers: use y.long\(\)"),
    ("classification", 1, torch.tensor([0.0, 0.5, 1.0]), r"type torch.float32; wanted integers"),
    ("classification", 1, torch.tensor([0.0, math.nan, 1.0]), r"type torch.float32; wanted integers"),
    ("classification", 3, torch.zeros(3, dtype=torch.complex64), r"type torch.complex64; wanted integers"),
    ("classification", 3, torch.eye(3), r"shape \(3, 3\); wanted \(3,\).*y.argmax\(-1\)"),
    ("classification", 3, torch.tensor([0, 1]), r"shape \(2,\); wanted \(3,\)"),
    ("classification", 3, "abc", r"labels of type str; wanted a tensor"),
    ("classification", 3, None, r"labels of type NoneType; wanted a tensor"),
    ("regression", 2, torch.zeros(3), r"shape \(3,\); wanted \(3, 2\), one column for each"),
    ("regression", 1, torch.zeros(3, 2), r"shape \(3, 2\); wanted \(3, 1\)"),
    ("regression", 1, torch.tensor([0.0, math.nan, 1.0]), r"NaN or infinite regression targets; remove or impute"),
    ("regression", 1, torch.tensor([0.0, math.inf, 1.0]), r"NaN or infinite regression targets"),
    ("regression", 1, torch.zeros(3, dtype=torch.complex64), r"type torch.complex64; wanted real numbers"),
    ("regression", 1, torch.zeros(3, dtype=torch.bool), r"type torch.bool; wanted real numbers"),
]


@pytest.mark.parametrize(("likelihood", "num_outputs", "y", "message"), BAD_LABELS)
def test_labels_that_cannot_be_right_are_refused(
    likelihood: Likelihood, num_outputs: int, y: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_labels(likelihood, torch.zeros(3, num_outputs), y)
