"""What a fit makes of its data: contexts of every kind, groups, sizes of batches, order, sums of the precision."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cases import Stream, loader, mlp, normal
from oracles import dense_ggn, dense_jacobian
from scalla import ScaLLA
from scalla.distributed import ALONE
from scalla.fitting import FitData
from scalla.functional import batch_size
from untouched import same_bits

NUM = 14
X, Y = normal(NUM, 2, dtype=torch.float64), torch.arange(NUM) % 3
CONTEXT = normal(9, 2, seed=8, dtype=torch.float64) + 2


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp().double()


def fitted(batches: Any = None, **options: Any) -> ScaLLA:
    la = ScaLLA(network(), num_features=6, seed=options.pop("seed", 0), **options.pop("settings", {}))
    return la.fit(loader(X, Y, 6) if batches is None else batches, **{"num_steps": 6, "lr": 1e-2, **options})


def assert_same(left: ScaLLA, right: ScaLLA) -> None:
    assert [e.loss for e in left.history] == [e.loss for e in right.history]
    assert same_bits(left.posterior_precision, right.posterior_precision)


def differ(left: ScaLLA, right: ScaLLA) -> bool:
    return [e.loss for e in left.history] != [e.loss for e in right.history]


# ---------------------------------------------------------------- contexts


def blocks(context: Any, *, bias: bool = True, size: int | None = None, batches: Any = None) -> list[Tensor]:
    data = FitData.of(loader(X, Y, 6) if batches is None else batches, context, size, bias, None, 0, ALONE)
    return data.batches.next()  # type: ignore[return-value]


def test_a_context_is_a_tensor_a_dataset_a_loader_or_a_list_of_batches() -> None:
    """A whole batch of each is the same set of inputs; labels are not looked at."""
    labelled = TensorDataset(CONTEXT, torch.full((9,), 99))
    every = [
        CONTEXT,
        TensorDataset(CONTEXT),
        labelled,
        DataLoader(labelled, batch_size=9),
        DataLoader(Stream(CONTEXT, torch.zeros(9)), batch_size=9),
        Stream(CONTEXT, torch.zeros(9)),
        [(CONTEXT, None)],
    ]
    for context in every:
        train, found = blocks(context, size=9)
        assert torch.equal(train, X[:6])
        assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, CONTEXT.tolist()))
    # In the order of the rows, which the sums do not see but for rounding.
    fits = [fitted(loader(X, Y, NUM), context=c, bias=True, context_batch_size=9) for c in every]
    for other in fits[1:]:
        torch.testing.assert_close(other.features(X), fits[0].features(X), rtol=1e-6, atol=1e-8)


def test_a_list_of_several_contexts_is_a_group_of_each() -> None:
    """With bias a context split in two is another target, without it is the same one."""
    together, apart = [CONTEXT[:8]], [CONTEXT[:4], CONTEXT[4:8]]
    assert [len(b) for b in blocks(together, size=8)] == [6, 8]
    assert [len(b) for b in blocks(apart, size=4)] == [6, 4, 4]
    losses = {
        bias: [
            fitted(loader(X, Y, NUM), context=c, bias=bias, context_batch_size=s, num_steps=1).history[0].loss
            for c, s in ((together, 8), (apart, 4))
        ]
        for bias in (False, True)
    }
    # The scale of the target is a mean over the sources, so the losses of one target are those up to its square.
    assert losses[True][0] != pytest.approx(losses[True][1], rel=1e-3)


@pytest.mark.parametrize(("size", "wanted"), [(None, 6), (1, 1), (4, 4), (50, 9)])
def test_context_batches_are_as_large_as_the_training_batches_or_as_said(size: int | None, wanted: int) -> None:
    assert len(blocks(CONTEXT, size=size)[1]) == wanted
    assert len(blocks([CONTEXT, CONTEXT], size=size)[2]) == wanted


def test_a_loaders_own_batch_size_stays() -> None:
    assert len(blocks(DataLoader(TensorDataset(CONTEXT), batch_size=2), size=5)[1]) == 2


def test_the_context_is_used_and_its_group_matters() -> None:
    none, plain, biased = fitted(), fitted(context=CONTEXT), fitted(context=CONTEXT, bias=True)
    assert differ(none, plain)
    assert differ(plain, biased)
    assert none.n_data == plain.n_data == biased.n_data == NUM  # it has no likelihood and stays out of the precision


def test_bias_makes_the_cross_kernel_small() -> None:
    far = CONTEXT + 2
    options: dict[str, Any] = {"context": far, "num_steps": 300, "lr": 2e-2, "targets": "directed"}
    ratios = []
    for bias in (False, True):
        la = fitted(loader(X, Y, NUM), bias=bias, **options)
        g, h = la.features(X).flatten(0, 1), la.features(far).flatten(0, 1)
        ratios.append(float((g @ h.mT).norm() / ((g @ g.mT).norm() * (h @ h.mT).norm()).sqrt()))
    assert ratios[1] < 0.5 * ratios[0]


# ---------------------------------------------------------------- randomness and order


def test_the_fit_is_a_function_of_the_seed_alone() -> None:
    shuffled = {"batches": loader(X, Y, 6, shuffle=True), "context": CONTEXT, "bias": True}
    first = fitted(**shuffled)
    torch.manual_seed(77)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    assert_same(fitted(**shuffled), first)
    assert differ(fitted(**shuffled, seed=1), first)


@pytest.mark.parametrize("surrogate", ["mirror", "trunk"])
@pytest.mark.parametrize("probe", ["rademacher", "gaussian"])
def test_no_random_state_is_touched(probe: str, surrogate: str) -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    la = fitted(
        loader(X, Y, 6, shuffle=True), context=CONTEXT, settings={"probe": probe, "surrogate": surrogate},
        val_loader=loader(CONTEXT, Y[:9], 4, shuffle=True), patience=9,
    )  # fmt: skip
    la.predict(X).probs  # noqa: B018
    la.functional_samples(X)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # noqa: NPY002


@pytest.mark.parametrize("surrogate", ["mirror", "trunk"])
def test_what_the_user_has_set_for_all_of_pytorch_changes_nothing(surrogate: str) -> None:
    trained = network()

    def found() -> ScaLLA:
        return ScaLLA(trained, num_features=6, surrogate=surrogate).fit(loader(X, Y, 6), num_steps=6, lr=1e-2)

    wanted = found()
    torch.set_default_dtype(torch.float64)
    try:
        assert_same(found(), wanted)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        assert_same(found(), wanted)


# ---------------------------------------------------------------- the precision


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_the_precision_is_the_sum_over_the_training_data(likelihood: str) -> None:
    """Over one epoch, however many steps the training took and wherever it stopped in the data."""
    y = Y if likelihood == "classification" else normal(NUM, 3, seed=7, dtype=torch.float64)
    la = ScaLLA(network(), likelihood, num_features=6, prior_precision=0.5)  # type: ignore[arg-type]
    la.fit(loader(X, y, 5, shuffle=True), context=CONTEXT, num_steps=7)
    with torch.no_grad():
        wanted = dense_ggn(la.features(X), network()(X), likelihood) + 0.5 * torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(la.posterior_precision, wanted, rtol=1e-10, atol=1e-10)
    assert la.n_data == NUM


def test_without_override_the_data_are_added() -> None:
    la = fitted(loader(X[:8], Y[:8], 4))
    features = la.features(X)
    la.fit(loader(X[8:], Y[8:], 4), override=False)
    with torch.no_grad():
        wanted = dense_ggn(la.features(X), network()(X), "classification") + torch.eye(6, dtype=torch.float64)
    assert torch.equal(la.features(X), features)
    torch.testing.assert_close(la.posterior_precision, wanted, rtol=1e-10, atol=1e-10)
    first = ScaLLA(network(), num_features=6).fit(loader(X, Y, 6), num_steps=6, lr=1e-2, override=False)
    assert_same(first, fitted())  # nothing to add to yet


def test_a_second_fit_starts_anew() -> None:
    la = fitted(loader(X[:8], Y[:8], 4))
    assert_same(la.fit(loader(X, Y, 6), num_steps=6, lr=1e-2), fitted())


# ---------------------------------------------------------------- some of the weights


class WithAdapter(nn.Module):
    """A frozen layer with a low-rank correction, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.lora_a = nn.Linear(2, 5), nn.Linear(2, 1, bias=False)
        self.lora_b, self.head = nn.Linear(1, 5, bias=False), nn.Linear(5, 3)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.base(x) + self.lora_b(self.lora_a(x))))


@pytest.mark.parametrize(
    ("parameters", "names"),
    [
        ("trainable", ["head.bias", "head.weight", "lora_a.weight", "lora_b.weight"]),
        ("all", ["base.bias", "base.weight", "head.bias", "head.weight", "lora_a.weight", "lora_b.weight"]),
        ("last_layer", ["head.bias", "head.weight"]),
        (["*lora_*"], ["lora_a.weight", "lora_b.weight"]),
        ("base.*", ["base.bias", "base.weight"]),
        (lambda name, p: p.ndim == 1, ["base.bias", "head.bias"]),
    ],
    ids=["trainable", "all", "last layer", "lora", "frozen", "function"],
)
def test_the_kernel_is_that_of_the_chosen_weights(parameters: Any, names: list[str]) -> None:
    """Whatever requires a gradient; after a fit on directed targets the error is small against that very kernel."""
    torch.manual_seed(0)
    model = WithAdapter().double()
    la = ScaLLA(model, num_features=30, parameters=parameters)
    la.fit(loader(X, Y, NUM), num_steps=400, lr=2e-2, targets="directed")
    assert la.n_params == sum(p.numel() for n, p in model.named_parameters() if n in names)
    jacobian = dense_jacobian(model, X, names).flatten(0, 1)
    kernel = jacobian @ jacobian.mT
    features = la.features(X).flatten(0, 1)
    error = float((features @ features.mT - kernel).norm() / kernel.norm())
    assert la.kernel_error(X).error == pytest.approx(error, rel=1e-6)
    assert error < 0.25
    squared = sum(float(p.detach().square().sum()) for n, p in model.named_parameters() if n in names)
    assert float(la.scatter) == pytest.approx(squared, rel=1e-9)
    assert [p.requires_grad for p in model.base.parameters()] == [False, False]


def test_batches_of_one_input() -> None:
    la = fitted(loader(X, Y, 1), context=CONTEXT, bias=True)
    assert la.n_data == NUM
    assert batch_size(blocks(CONTEXT, batches=loader(X, Y, 1))[1]) == 1
