"""The head for many classes: how its features co-vary, what it never allocates, that it is saved and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cases
import oracles
from scalla import ScaLLA
from scalla.factored_head import DEFAULT_CLASS_RANK, MAX_DENSE_CLASSES, ClassFactor, class_rank_of
from scalla.types import InputError

KINDS = ("mirror", "trunk")


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
        return out


def fitted(kind: str, num_classes: int, *, m: int = 4, num_steps: int = 2, **options: Any) -> ScaLLA:
    torch.manual_seed(3)
    model = cases.mlp(num_classes, width=6).double()
    la = ScaLLA(model, num_features=m, surrogate=kind, surrogate_options=options, seed=1)
    x, y = cases.normal(24, 2, dtype=torch.float64), torch.arange(24) % num_classes
    return la.fit([(x[:12], y[:12]), (x[12:], y[12:])], num_steps=num_steps)


@pytest.mark.parametrize("kind", KINDS)
def test_rank_over_classes_is_what_was_asked_for(kind: str) -> None:
    x = cases.normal(5, 2, seed=9, dtype=torch.float64)
    for asked, rank in ((3, 3), (None, 8), (8, 8)):  # None: eight classes are few, so dense
        features = fitted(kind, 8, m=20, class_rank=asked).features(x)
        assert features.shape == (5, 8, 20)
        singular = torch.linalg.svdvals(features.transpose(0, 1).flatten(1))  # C against everything else
        assert int((singular > 1e-9 * singular[0]).sum()) == rank


@pytest.mark.parametrize("kind", KINDS)
def test_many_classes_are_factored_unless_asked_otherwise(kind: str) -> None:
    num = MAX_DENSE_CLASSES + 1
    shapes = []
    for options in ({}, {"class_rank": num}):
        surrogate = fitted(kind, num, **options).surrogate
        assert surrogate is not None
        shapes.append({name: tuple(t.shape) for name, t in surrogate.named_parameters()})
    factored, dense = shapes
    assert factored["classes.weight"] == (num, DEFAULT_CLASS_RANK)
    assert "classes.weight" not in dense
    width = {"mirror": "body.2.bias", "trunk": "linear.bias"}[kind]
    assert (factored[width], dense[width]) == ((DEFAULT_CLASS_RANK * 4,), (num * 4,))


def test_classes_start_as_the_last_layer_makes_them_covary() -> None:
    # E[A Aᵀ] ∝ W Wᵀ, to the Monte-Carlo error of r = 20,000 directions
    w = cases.normal(6, 4, dtype=torch.float64)
    factor = ClassFactor(6, 20_000).double()
    factor.initialise(w, torch.Generator().manual_seed(0))
    a = factor.weight.detach()
    assert a.square().sum(-1).mean() == pytest.approx(1)
    wanted = w @ w.T / w.square().sum(-1).mean()
    torch.testing.assert_close(a @ a.T, wanted, atol=0.03, rtol=0)


def test_nothing_is_lost_where_the_kernel_has_that_rank_over_classes() -> None:
    # All weights but the last layer's: J = W Ĵ, so with W of rank 3 the columns of A span those of every K(x, x').
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 9, bias=False)).double()
    with torch.no_grad():
        left, right = torch.randn(9, 3, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
        model[2].weight.copy_(left @ right)
    jacobian = oracles.dense_jacobian(model, cases.normal(7, 2, dtype=torch.float64), ["0.weight", "0.bias"])
    factor = ClassFactor(9, 3).double()
    factor.initialise(model[2].weight, torch.Generator().manual_seed(0))
    q, _ = torch.linalg.qr(factor.weight.detach())
    left_over = jacobian - torch.einsum("cr,dr,bdp->bcp", q, q, jacobian)
    assert left_over.norm() < 1e-12 * jacobian.norm()


def test_product_is_the_matrix_product() -> None:
    factor = ClassFactor(4, 2).double()
    factor.initialise(cases.normal(4, 3, dtype=torch.float64), torch.Generator().manual_seed(1))
    flat = cases.normal(3, 10, dtype=torch.float64)
    for row, features in zip(flat, factor(flat), strict=True):
        torch.testing.assert_close(features, factor.weight @ torch.stack([row[:5], row[5:]]))


@pytest.mark.parametrize("kind", KINDS)
def test_features_begin_with_the_size_of_the_normalised_kernel(kind: str) -> None:
    la = fitted(kind, 80, m=30, num_steps=0)
    features = la.features(cases.normal(200, 2, seed=4, dtype=torch.float64))
    assert 1 / 3 < float(features.square().sum(-1).mean()) < 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_classes_without_the_large_things(kind: str) -> None:
    b, c, m, hidden = 64, 1000, 100, 256
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, c))
    x, y = torch.randn(b, 2), torch.randint(c, (b,))
    la = ScaLLA(model, num_features=m, surrogate=kind)
    with LargestTensor() as largest:
        la.fit([(x, y)], num_steps=1)
        prediction = la.predict(x, n_samples=10)
        probs, score, var = prediction.probs, prediction.gaussian_entropy, prediction.var
        samples = la.functional_samples(x, 10)
    assert largest.numel <= b * c * m < min(b * c * c, c * m * hidden)
    assert samples.shape == (10, b, c)
    for t in (probs, score, var):
        assert torch.isfinite(t).all()


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    la = fitted(kind, 8, class_rank=2)
    la.save(tmp_path / "la.safetensors")
    x = cases.normal(5, 2, seed=9, dtype=torch.float64)
    assert torch.equal(ScaLLA.load(tmp_path / "la.safetensors", la.model).features(x), la.features(x))


@pytest.mark.parametrize("asked", [0, 9, 2.0, True, "all"])
def test_a_rank_that_makes_no_sense_is_refused(asked: Any) -> None:
    with pytest.raises(InputError, match=r"got class_rank=.*wanted a whole number from 1 to C = 8"):
        class_rank_of(asked, 8)
    with pytest.raises(InputError, match="got class_rank="):
        fitted("mirror", 8, class_rank=asked)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_does_not_fit_says_what_to_do(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scalla.surrogate.MAX_HEAD_WEIGHTS", 500)
    with pytest.raises(InputError, match="too many for a widened layer; use a smaller class_rank"):
        fitted(kind, 50)
