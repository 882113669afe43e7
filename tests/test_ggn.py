"""Σ gᵀΛg streamed over batches against the dense sum, and the checks on what comes in."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import CASES, mlp, normal
from oracles import JacobianFeatures, dense_ggn, dense_jacobian
from scalla import ScaLLA
from scalla.ggn import GGNSums, accumulate_ggn, check_finite, check_inputs, empty_sums
from scalla.types import InputError, Inputs, Likelihood

KINDS: list[tuple[Likelihood, int]] = [
    ("classification", 1),
    ("classification", 2),
    ("classification", 3),
    ("regression", 1),
    ("regression", 3),
]
NUM = 13


def data_of(likelihood: Likelihood, num_outputs: int) -> tuple[Tensor, Tensor]:
    x = normal(NUM, 2, dtype=torch.float64)
    if likelihood == "regression":
        return x, normal(NUM, num_outputs, seed=3, dtype=torch.float64)
    return x, torch.arange(NUM) % max(num_outputs, 2)


def batches_of(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def linear_map(num_outputs: int) -> Callable[[Inputs], tuple[Tensor, Tensor]]:
    """Outputs and features (m = 4) that depend on each input alone."""
    weights = normal(2, num_outputs, seed=1, dtype=torch.float64)
    lift = normal(2, num_outputs * 4, seed=2, dtype=torch.float64)

    def evaluate(x: Inputs) -> tuple[Tensor, Tensor]:
        assert isinstance(x, Tensor)
        return x @ weights, torch.sin(x @ lift).unflatten(-1, (num_outputs, 4))

    return evaluate


def summed(likelihood: Likelihood, num_outputs: int, size: int) -> GGNSums:
    start = empty_sums(likelihood, num_outputs, 4, torch.device("cpu"))
    batches = batches_of(*data_of(likelihood, num_outputs), size)
    return accumulate_ggn(start, batches, linear_map(num_outputs), likelihood)


@pytest.mark.parametrize(("likelihood", "num_outputs"), KINDS)
def test_streamed_sums_are_the_dense_ones_whatever_the_batch_size(likelihood: Likelihood, num_outputs: int) -> None:
    x, y = data_of(likelihood, num_outputs)
    outputs, features = linear_map(num_outputs)(x)
    for size in (NUM, 5, 1):
        sums = summed(likelihood, num_outputs, size)
        assert (sums.num_data, sums.num_batches) == (NUM, -(-NUM // size))
        assert sums.ggn.shape == ((num_outputs if likelihood == "regression" else 1), 4, 4)
        assert sums.ggn.dtype == torch.float64
        torch.testing.assert_close(sums.ggn.sum(0), dense_ggn(features, outputs, likelihood), rtol=1e-12, atol=1e-12)
        if likelihood == "regression":
            torch.testing.assert_close(sums.loss, (y - outputs).square().sum(0), rtol=1e-12, atol=0)
            sigma = torch.linspace(0.3, 2, num_outputs, dtype=torch.float64)
            torch.testing.assert_close(
                torch.einsum("r,rij->ij", sigma**-2, sums.ggn),
                dense_ggn(features, outputs, likelihood, sigma),
                rtol=1e-12,
                atol=1e-12,
            )
        elif num_outputs > 1:
            wanted = -outputs.log_softmax(-1)[torch.arange(NUM), y].sum()
            torch.testing.assert_close(sums.loss[0], wanted, rtol=1e-12, atol=0)


def test_it_goes_on_from_given_sums_and_shows_every_state() -> None:
    batches = batches_of(*data_of("classification", 3), 4)
    start = empty_sums("classification", 3, 4, torch.device("cpu"))
    seen: list[GGNSums] = []
    whole = accumulate_ggn(start, batches, linear_map(3), "classification", after_batch=seen.append)
    assert [s.num_batches for s in seen] == [1, 2, 3, 4]
    rest = accumulate_ggn(seen[1], batches[2:], linear_map(3), "classification")
    assert torch.equal(rest.ggn, whole.ggn)
    assert torch.equal(rest.loss, whole.loss)
    assert rest.num_data == whole.num_data == NUM
    assert start.num_data == 0
    assert float(start.ggn.abs().max()) == 0


# ---------------------------------------------------------------- of a whole fit, with exact Jacobians as features


@pytest.mark.parametrize(("likelihood", "num_outputs"), KINDS)
def test_a_fit_and_a_fit_in_pieces_give_the_dense_precision(likelihood: Likelihood, num_outputs: int) -> None:
    """Exact Jacobians in the features' place: the sums of LLA itself."""
    model = mlp(num_outputs).double()
    x, y = data_of(likelihood, num_outputs)
    num_params = sum(p.numel() for p in model.parameters())
    sigma = {"sigma_noise": torch.linspace(0.5, 1.5, num_outputs)} if likelihood == "regression" else {}

    def method() -> ScaLLA:
        surrogate = JacobianFeatures(model)
        return ScaLLA(model, likelihood, surrogate=surrogate, num_features=num_params, prior_precision=2.0, **sigma)

    dense = dense_ggn(dense_jacobian(model, x), model(x).detach(), likelihood, sigma.get("sigma_noise", 1.0))
    wanted = dense + 2.0 * torch.eye(num_params, dtype=torch.float64)
    at_once = method().fit(batches_of(x, y, 6), num_steps=0)
    torch.testing.assert_close(at_once.posterior_precision, wanted, rtol=1e-10, atol=1e-10)
    assert at_once.n_data == NUM

    in_pieces = method().fit(batches_of(x[:4], y[:4], 4), num_steps=0)
    in_pieces.update(batches_of(x[4:9], y[4:9], 2))
    in_pieces.fit(batches_of(x[9:], y[9:], 3), override=False)
    assert in_pieces.n_data == NUM
    torch.testing.assert_close(in_pieces.posterior_precision, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(in_pieces.log_likelihood, at_once.log_likelihood, rtol=1e-12, atol=1e-12)


def test_context_stays_out_of_the_precision() -> None:
    model = mlp().double()
    x, y = data_of("classification", 3)

    def precision(**context: Any) -> Tensor:
        la = ScaLLA(model, surrogate=JacobianFeatures(model), num_features=33)
        return la.fit(batches_of(x, y, 6), num_steps=0, **context).posterior_precision

    assert torch.equal(precision(), precision(context=normal(9, 2, seed=4), bias=True))


# ---------------------------------------------------------------- checks


def test_a_bad_batch_is_named() -> None:
    start = empty_sums("classification", 3, 4, torch.device("cpu"))
    batches = batches_of(*data_of("classification", 3), 4)
    batches[2][0][1, 0] = math.nan
    with pytest.raises(InputError, match=r"inputs of batch 2 \(1 of 4 inputs\); remove or impute them"):
        accumulate_ggn(start, batches, linear_map(3), "classification")


@pytest.mark.parametrize(
    ("outputs", "features", "message"),
    [
        (torch.zeros(4), torch.zeros(4, 3, 4), r"output has shape \(4,\) for 4 inputs; wanted \(B, C\)"),
        (torch.zeros(4, 3, 2), torch.zeros(4, 3, 4), r"output has shape \(4, 3, 2\) for 4 inputs"),
        (torch.zeros(5, 3), torch.zeros(5, 3, 4), r"output has shape \(5, 3\) for 4 inputs"),
        (torch.full((4, 3), math.nan), torch.zeros(4, 3, 4), "outputs of the network are NaN or infinite"),
        (torch.zeros(4, 3), torch.full((4, 3, 4), math.inf), "features are NaN or infinite"),
    ],
)
def test_what_comes_back_must_be_right(outputs: Tensor, features: Tensor, message: str) -> None:
    start = empty_sums("classification", 3, 4, torch.device("cpu"))
    batch = (torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))
    with pytest.raises(InputError, match=message):
        accumulate_ggn(start, [batch], lambda x: (outputs, features), "classification")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: {"x": t, "mask": None}, lambda t: (t, 3), lambda t: [t]])
def test_inputs_of_every_kind_are_checked(bad: float, wrap: Callable[[Tensor], Any]) -> None:
    x = torch.zeros(5, 2, 3)
    check_inputs(wrap(x), "here")
    x[1, 0, 2] = x[1, 1, 1] = x[4, 0, 0] = bad
    with pytest.raises(InputError, match=r"NaN or infinite values in the inputs of here \(2 of 5 inputs\)"):
        check_inputs(wrap(x), "here")


def test_inputs_of_one_dimension_and_of_none() -> None:
    with pytest.raises(InputError, match=r"\(1 of 3 inputs\)"):
        check_inputs(torch.tensor([0.0, math.nan, 1.0]), "here")
    with pytest.raises(InputError, match="inputs of here"):
        check_inputs({"x": torch.zeros(3), "scale": torch.tensor(math.nan)}, "here")
    check_inputs({"ids": torch.tensor([1, 2])}, "here")


def test_check_finite_names_what_is_not() -> None:
    check_finite(torch.zeros(3), "features")
    with pytest.raises(InputError, match="the features are NaN or infinite for finite inputs"):
        check_finite(torch.tensor([math.nan]), "features")


def test_mappings_carry_their_labels() -> None:
    case = CASES["dict_keywords"]
    la = ScaLLA(case.model(dtype=torch.float64), num_features=4).fit(case.loader(13, batch_size=5), num_steps=0)
    assert la.n_data == 13
    x = case.inputs(13)
    outputs = case.model(dtype=torch.float64)(**x).logits.detach()
    eye = torch.eye(4, dtype=torch.float64)
    wanted = dense_ggn(la.features(x), outputs, "classification") + eye
    torch.testing.assert_close(la.posterior_precision, wanted, rtol=1e-10, atol=1e-10)
