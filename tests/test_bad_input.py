"""Bad input to a fit or a prediction: what came, what was wanted, what to do; and nothing is changed by it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from cases import KeywordClassifier, Stream, images, loader, mlp, normal, words
from scalla import InputError, NotFittedError, ScaLLA
from untouched import assert_untouched, state_of

NUM = 12
X, Y = normal(NUM, 2), torch.arange(NUM) % 3
T = normal(NUM, 3, seed=7)


def refused(message: str, batches: Any, *, likelihood: str = "classification", model: nn.Module | None = None,
            **options: Any) -> None:  # fmt: skip
    """`fit` raises InputError with this message; the network is untouched and the method still unfitted."""
    model = mlp() if model is None else model
    before, random_state = state_of(model), torch.get_rng_state()
    la = ScaLLA(model, likelihood, num_features=4)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        la.fit(batches, **{"num_steps": 3, **options})
    assert_untouched(model, before)
    assert torch.equal(torch.get_rng_state(), random_state)
    with pytest.raises(NotFittedError):
        la.predict(X)


def with_value(t: Tensor, value: float, row: int = 5) -> Tensor:
    changed = t.clone()
    changed[row] = value
    return changed


# ---------------------------------------------------------------- loaders


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "train_loader is empty; wanted at least one batch"),
        (DataLoader(TensorDataset(X, Y), batch_size=NUM + 1, drop_last=True), "train_loader is empty"),
        (loader(X[:0], Y[:0]), "train_loader is empty"),
        ([(X[:0], Y[:0])], "train_loader yielded an empty batch; wanted at least one input in each"),
        (None, "train_loader of type NoneType; wanted a DataLoader or a list of batches"),
        (TensorDataset(X, Y), "train_loader of type TensorDataset; wanted a DataLoader"),
        (iter([(X, Y)]), "train_loader is an iterator, which can be gone through once only"),
        ([X], "batch of type Tensor without labels; wanted"),
        ([(X,)], "batch of type tuple without labels"),
        ([(X.numpy(), Y)], r"inputs of type ndarray.*; wanted"),
    ],
)
def test_loaders(batches: Any, message: str) -> None:
    refused(message, batches)


def test_mappings_without_labels() -> None:
    refused(r"keys \['attention_mask', 'input_ids'\]; wanted labels under 'labels' \(set dict_key_y\)", [words(NUM)],
            model=KeywordClassifier())  # fmt: skip


# ---------------------------------------------------------------- inputs


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_inputs_that_are_not_finite(value: float) -> None:
    bad = with_value(X, value)
    refused(r"NaN or infinite values in the inputs of train_loader \(1 of 12 inputs\); remove or impute them",
            loader(bad, Y, 4))  # fmt: skip
    refused(r"inputs of the first training batch \(1 of 8 inputs\)", [(bad[:8], Y[:8]), (X[8:], Y[8:])])
    # Data that do not lie in memory are looked at as they come; without training in the pass of the precision.
    later = Stream(bad, Y)
    refused("loss became nan by step", DataLoader(later, batch_size=4), num_steps=6)
    refused(r"inputs of batch 1 \(1 of 4 inputs\)", DataLoader(later, batch_size=4), num_steps=1)
    refused(r"inputs of context 1 \(1 of 12 inputs\)", loader(X, Y, NUM), context=bad)
    refused(r"inputs of context 2", loader(X, Y, NUM), context=[X, bad])


def test_rows_that_the_sampler_leaves_out_are_no_fault() -> None:
    bad = TensorDataset(with_value(X, math.nan), Y)
    rows = SubsetRandomSampler([i for i in range(NUM) if i != 5])
    la = ScaLLA(mlp(), num_features=4).fit(DataLoader(bad, batch_size=4, sampler=rows), num_steps=2)
    assert la.n_data == NUM - 1
    floats = TensorDataset(X, Y.float())

    def collate(pairs: list[Any]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs]).long()

    assert ScaLLA(mlp(), num_features=4).fit(DataLoader(floats, 4, collate_fn=collate), num_steps=2).n_data == NUM


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_inputs_of_predictions_that_are_not_finite(value: float) -> None:
    la = ScaLLA(mlp(), num_features=4).fit(loader(X, Y), num_steps=2)
    bad = with_value(X, value)
    for call in (la, la.predict, la.features, la.ood_score, la.functional_variance, la.functional_samples):
        with pytest.raises(InputError, match=r"NaN or infinite values in the inputs of this batch \(1 of 12"):
            call(bad)
    for call in (la, la.predict):
        with pytest.raises(InputError, match="inputs of type ndarray; wanted a tensor"):
            call(np.zeros((3, 2)))
    before = la.posterior_precision
    for change in (la.update, la.forget):
        with pytest.raises(InputError, match="NaN or infinite values in the inputs of batch 0"):
            change([(bad, Y)])
    assert torch.equal(la.posterior_precision, before)


# ---------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (with_value(Y, 3), "class labels from 0 to 3; wanted 0 to 2, as the network has 3 outputs"),
        (with_value(Y, -1), "class labels from -1 to 2; wanted 0 to 2"),
        (Y.float(), r"class labels of type torch.float32; wanted integers: use y.long\(\)"),
        (with_value(Y.double(), math.nan), "class labels of type torch.float64; wanted integers"),
        (Y.to(torch.complex64), "class labels of type torch.complex64; wanted integers"),
        (nn.functional.one_hot(Y), r"labels of shape \(12, 3\); wanted \(12,\).*into integers by y.argmax"),
        (Y[:, None, None], r"labels of shape \(12, 1, 1\); wanted \(12,\)"),
    ],
)  # fmt: skip
def test_class_labels(y: Tensor, message: str) -> None:
    refused(message, loader(X, y, NUM))
    refused(message, [(X, y)])


def test_class_labels_that_come_later() -> None:
    """In memory they are seen before the training; in a stream when they come."""
    bad = with_value(Y, 7, row=9)
    refused("class labels from 0 to 7; wanted 0 to 2", loader(X, bad, 4), num_steps=10**9)
    refused("class labels from 1 to 7; wanted 0 to 2", DataLoader(Stream(X, bad), batch_size=4))


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (with_value(T, math.nan), "NaN or infinite regression targets; remove or impute them before the fit"),
        (with_value(T, math.inf), "NaN or infinite regression targets"),
        (T[:, :2], r"regression targets of shape \(12, 2\); wanted \(12, 3\), one column for each"),
        (T[:, 0], r"regression targets of shape \(12,\); wanted \(12, 3\)"),
        (T > 0, "regression targets of type torch.bool; wanted real numbers"),
        (T.to(torch.complex64), "regression targets of type torch.complex64; wanted real numbers"),
    ],
)
def test_regression_targets(y: Tensor, message: str) -> None:
    refused(message, loader(X, y, NUM), likelihood="regression")


def test_labels_that_are_no_tensor() -> None:
    refused("got labels of type list; wanted a tensor", [(X, ["cat"] * NUM)])
    assert ScaLLA(mlp(), num_features=4).fit([(X, Y.tolist())], num_steps=1).n_data == NUM


# ---------------------------------------------------------------- networks


class Shaped(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.layer, self.shape = nn.Linear(2, 6), shape

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).reshape(self.shape)


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ((NUM, 2, 3), r"\(12, 2, 3\)"), ((-1,), r"\(72,\)"), ((2 * NUM, 3), r"\(24, 3\)"),
        ((NUM, 1, 1, 6), r"\(12, 1, 1, 6\)"),
    ],
)  # fmt: skip
def test_outputs_that_are_no_matrix(shape: tuple[int, ...], found: str) -> None:
    refused(rf"network's output has shape {found} for 12 inputs; wanted \(B, C\).*Wrap the network", [(X, Y)],
            model=Shaped(*shape))  # fmt: skip


def test_outputs_that_are_not_finite() -> None:
    model = mlp()
    with torch.no_grad():
        model[2].bias[0] = math.nan
    refused("the outputs of the network are NaN or infinite for finite inputs; check the network's weights", [(X, Y)],
            model=model)  # fmt: skip


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> str:
        return "cat"


def test_a_network_that_returns_no_tensor() -> None:
    refused(r"the network returned str, in which there are no logits; wanted a \(B, C\) tensor", [(X, Y)], model=Text())


def test_a_network_without_a_linear_head() -> None:
    model = nn.Sequential(nn.Linear(2, 5), nn.Unflatten(1, (5, 1)), nn.AdaptiveMaxPool2d((3, 1)), nn.Flatten())
    refused(
        "no linear or convolutional layer with C = 3 outputs in Sequential; give a surrogate", [(X, Y)], model=model
    )


def test_weights_that_are_not_there() -> None:
    la = ScaLLA(mlp(), num_features=4, parameters=["*.lora_*"])
    with pytest.raises(InputError, match=r"selects none of the network's 4 weights \(0.weight, 0.bias, .*\); give"):
        la.fit([(X, Y)], num_steps=1)


def test_a_kernel_of_zero() -> None:
    """Weights that no output depends on."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 3), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    la = ScaLLA(Half(), num_features=4, parameters=["unused.*"])
    with pytest.raises(InputError, match=r"do not depend on the chosen weights.*the kernel is zero there; check param"):
        la.fit([(X, Y)], num_steps=1)


# ---------------------------------------------------------------- contexts


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (normal(5, 3), r"context inputs of shape \(3,\) beside training inputs of shape \(2,\); wanted the same shape"),
        (images(5), r"context inputs of shape \(1, 6, 6\) beside training inputs of shape \(2,\)"),
        ([X, normal(5, 4)], r"context inputs of shape \(4,\)"),
        (words(5), "context inputs of type dict beside training inputs of type Tensor; wanted the same kind"),
        (torch.zeros(5, 2, dtype=torch.uint8), "context inputs of type torch.uint8 .*pixels from 0 to 255"),
        (X[:0], "empty context; wanted at least one input"),
        ([], "context is empty"),
        (7, "context of type int; wanted a DataLoader"),
        (iter([X]), "context is an iterator"),
    ],
)
def test_contexts(context: Any, message: str) -> None:
    for bias in (False, True):
        refused(message, loader(X, Y), context=context, bias=bias)


def test_bias_wants_a_context() -> None:
    refused("bias=True without context; wanted inputs unlike the training data", loader(X, Y), bias=True)


@pytest.mark.parametrize("size", [0, -3, 2.5, "many"])
def test_the_size_of_context_batches(size: Any) -> None:
    refused(f"context_batch_size={size!r}; wanted a whole number of at least 1", loader(X, Y), context=X,
            context_batch_size=size)  # fmt: skip


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prior_precision": 0.0}, "prior_precision=0.0; wanted a positive number"),
        ({"prior_precision": -1.0}, "prior_precision=-1.0; wanted a positive number"),
        ({"prior_precision": math.nan}, "prior_precision=nan; wanted a positive number"),
        ({"prior_precision": math.inf}, "prior_precision=inf; wanted a positive number"),
        ({"prior_precision": "large"}, "prior_precision='large'; wanted a positive number"),
        ({"prior_precision": torch.ones(3)}, "prior_precision of 3 entries.*layer-wise or diagonal prior cannot exist"),
        ({"temperature": 0}, "temperature=0; wanted a positive number"),
        ({"sigma_noise": 0.5}, "sigma_noise=0.5 for a classification, which has no observation noise"),
        ({"num_features": 0}, "num_features=0; wanted a whole number of at least 1"),
        ({"num_features": 2.5}, "num_features=2.5; wanted a whole number"),
        ({"surrogate": "branch"}, "surrogate='branch'; choose 'mirror', 'trunk' or give a module"),
        ({"surrogate": 3}, "surrogate=3; choose"),
        ({"probe": "uniform"}, "probe='uniform'; choose one of rademacher, gaussian"),
        ({"likelihood": "poisson"}, "likelihood='poisson'; choose 'classification' or 'regression'"),
    ],
)  # fmt: skip
def test_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ScaLLA(mlp(), **settings)
    if "prior_precision" in settings or "temperature" in settings:
        la = ScaLLA(mlp(), num_features=4).fit(loader(X, Y), num_steps=1)
        before = la.posterior_precision
        with pytest.raises(InputError, match=message):
            setattr(la, *next(iter(settings.items())))
        assert torch.equal(la.posterior_precision, before)


def test_a_model_that_is_no_module() -> None:
    with pytest.raises(InputError, match=r"model of type function; wanted a torch.nn.Module"):
        ScaLLA(lambda x: x)  # type: ignore[arg-type, return-value]


def test_noise_of_another_number_of_outputs() -> None:
    la = ScaLLA(mlp(), "regression", num_features=4, sigma_noise=torch.ones(2))
    with pytest.raises(InputError, match="sigma_noise with 2 entries for 3 outputs; give one, or one for each output"):
        la.fit(loader(X, T), num_steps=1)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("__call__", (X,)), ("predict", (X,)), ("features", (X,)), ("ood_score", (X,)), ("functional_variance", (X,)),
        ("functional_samples", (X,)), ("predictive_samples", (X,)), ("log_marginal_likelihood", ()),
        ("optimize_prior_precision", ()), ("update", ([(X, Y)],)), ("forget", ([(X, Y)],)), ("kernel_error", (X,)),
        ("save", ("nowhere",)),
    ],
)  # fmt: skip
def test_before_the_fit(name: str, arguments: tuple[Any, ...]) -> None:
    la = ScaLLA(mlp(), num_features=4)
    with pytest.raises(NotFittedError, match=r"has no (posterior|features) yet; call fit\(train_loader\) first"):
        getattr(la, name)(*arguments)
    for attribute in ("n_data", "posterior_precision", "log_det_ratio"):
        with pytest.raises(NotFittedError, match="call fit"):
            getattr(la, attribute)


def test_a_failed_fit_leaves_the_fit_before() -> None:
    la = ScaLLA(mlp(), num_features=4).fit(loader(X, Y), num_steps=2)
    before = la.predict(X)
    for batches in ([], loader(X, with_value(Y, 9)), DataLoader(Stream(with_value(X, math.nan, 9), Y), batch_size=4)):
        with pytest.raises(InputError):
            la.fit(batches, num_steps=2)
        after = la.predict(X)
        assert torch.equal(after.probs, before.probs)
        assert torch.equal(after.cov, before.cov)
