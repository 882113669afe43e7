"""Every family of networks is fitted and predicts, in every precision, and is to the bit what it was."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cases import CASES, BagClassifier, Case, Mappings, Stream, dropout_mlp, loader, normal, tiny_bert, words
from oracles import DenseLLA, outputs_of
from scalla import ScaLLA, UnsupportedModuleError
from untouched import assert_untouched, state_of

NUM_FEATURES = 5


class Own(nn.Module):
    """A surrogate of the user's: a few statistics of the input, and a linear layer."""

    def __init__(self, num_outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_outputs = num_outputs
        self.layer = nn.Linear(3, num_outputs * NUM_FEATURES, dtype=dtype)

    def forward(self, x: Any = None, **keywords: Tensor) -> Tensor:
        given = next(iter(keywords.values())) if x is None else next(iter(x.values())) if isinstance(x, dict) else x
        flat = given.to(self.layer.weight).flatten(1)
        statistics = torch.stack([flat.mean(1), flat.amax(1), flat.amin(1)], -1)
        return self.layer(statistics).view(-1, self.num_outputs, NUM_FEATURES)


def in_midst_of_use(case: Case, dtype: torch.dtype) -> nn.Module:
    """In training mode, a weight frozen, a gradient waiting."""
    model = case.model(dtype=dtype).train()
    weights = list(model.parameters())
    weights[0].requires_grad_(False)
    weights[-1].grad = torch.full_like(weights[-1], 0.25)
    return model


def fitted(case: Case, model: nn.Module, surrogate: str = "mirror", **options: Any) -> ScaLLA:
    dtype = next(p.dtype for p in model.parameters())
    with torch.random.fork_rng():
        own = Own(case.num_outputs, dtype if dtype.itemsize >= 4 else torch.float32)
    settings = {"num_steps": 4, "num_probes": 2, **options}
    la = ScaLLA(model, case.likelihood, num_features=NUM_FEATURES, surrogate=own if surrogate == "own" else surrogate)
    return la.fit(case.loader(), **settings)


def check_predictions(la: ScaLLA, case: Case, *, tolerance: float) -> None:
    """Variance, mean and probabilities against dense algebra on the method's own features."""
    x, (train_x, train_y) = case.inputs(6), (case.inputs(16), case.labels(16))
    with torch.no_grad():
        train_outputs = la.predict(train_x).mean
    dense = DenseLLA(la.features(train_x), train_outputs, train_y, case.likelihood)
    prediction = la.predict(x, link_approx="probit")
    wanted = dense.variance(la.features(x))
    assert prediction.mean.shape == (6, case.num_outputs)
    assert float(wanted.diagonal(dim1=-2, dim2=-1).min()) > 0
    torch.testing.assert_close(prediction.cov.double(), wanted, rtol=tolerance, atol=tolerance)
    scores = la.ood_score(x)
    assert scores.shape == (6,)
    assert bool(torch.isfinite(scores).all())
    if case.likelihood == "regression":
        mean, variance = la(x)
        assert mean.shape == (6, case.num_outputs)
        assert variance.shape == (6, case.num_outputs, case.num_outputs)
        return
    probs = prediction.probs.double()
    assert probs.shape == (6, case.num_outputs)
    if case.num_outputs > 1:
        scaled = prediction.mean.double() / torch.sqrt(1 + math.pi / 8 * wanted.diagonal(dim1=-2, dim2=-1))
        torch.testing.assert_close(probs, scaled.softmax(-1), rtol=tolerance, atol=tolerance)
    else:  # of class 1
        scaled = prediction.mean.double() / torch.sqrt(1 + math.pi / 8 * wanted[:, 0])
        torch.testing.assert_close(probs, scaled.sigmoid(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("surrogate", ["mirror", "trunk", "own"])
@pytest.mark.parametrize("name", CASES)
def test_every_network_fits_and_predicts_and_is_left_as_it_was(name: str, surrogate: str) -> None:
    case = CASES[name]
    model = in_midst_of_use(case, torch.float32)
    before, random_state = state_of(model), torch.get_rng_state()
    la = fitted(case, model, surrogate)
    assert la.n_data == 16
    assert all(math.isfinite(entry.loss) for entry in la.history)
    check_predictions(la, case, tolerance=2e-4)
    assert_untouched(model, before)
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "float64"])
@pytest.mark.parametrize("name", ["mlp", "resnet", "transformer_encoder", "lstm", "regression_three", "dict_keywords"])
def test_half_and_double_precision(name: str, dtype: torch.dtype) -> None:
    """The features of a bf16 network are float32; all others have the network's type."""
    case = CASES[name]
    model = in_midst_of_use(case, dtype)
    before = state_of(model)
    for surrogate in ("mirror", "trunk"):
        la = fitted(case, model, surrogate)
        assert la.features(case.inputs(3)).dtype == (dtype if dtype == torch.float64 else torch.float32)
        assert la.posterior_precision.dtype == torch.float64
        check_predictions(la, case, tolerance=1e-9 if dtype == torch.float64 else 2e-4)
    assert_untouched(model, before)


@pytest.mark.parametrize("name", ["multihead_attention", "lstm", "cnn_batchnorm", "one_logit", "dict_batch"])
def test_the_mean_is_the_networks_own_output_in_evaluation_mode(name: str) -> None:
    case = CASES[name]
    model, x = case.model().train(), case.inputs(6)
    mean = fitted(case, model).predict(x).mean
    with torch.no_grad():
        torch.testing.assert_close(mean, outputs_of(model.eval(), x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["dropout", "cnn_batchnorm", "lstm", "transformer_encoder"])
def test_the_networks_mode_changes_nothing(name: str) -> None:
    case = CASES[name]
    found = [fitted(case, case.model().train(mode)).predict(case.inputs(6)) for mode in (True, False)]
    assert torch.equal(found[0].mean, found[1].mean)
    assert torch.equal(found[0].cov, found[1].cov)


def test_two_classes_by_two_logits() -> None:
    case = Case("two", lambda: nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2)), CASES["mlp"].inputs,
                num_outputs=2)  # fmt: skip
    check_predictions(fitted(case, case.model()), case, tolerance=2e-4)


def test_one_logit_and_two_logits_of_its_two_halves_agree() -> None:
    """p = σ(f) is softmax(0, f): with the features of the second logit alone both are the same posterior."""
    x, y = normal(16, 2, dtype=torch.float64), torch.arange(16) % 2
    one = nn.Linear(2, 1, dtype=torch.float64)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = one

        def forward(self, x: Tensor) -> Tensor:
            f = self.one(x)
            return torch.cat([torch.zeros_like(f), f], -1)

    class Features(nn.Module):
        def __init__(self, num_outputs: int) -> None:
            super().__init__()
            self.num_outputs = num_outputs

        def forward(self, x: Tensor) -> Tensor:
            g = torch.cat([x, torch.ones_like(x[:, :1])], -1)[:, None]
            return g if self.num_outputs == 1 else torch.cat([torch.zeros_like(g), g], 1)

    fits = [
        ScaLLA(model, num_features=3, surrogate=Features(c)).fit(loader(x, y), num_steps=0)
        for c, model in ((1, one), (2, Two()))
    ]
    torch.testing.assert_close(fits[0].posterior_precision, fits[1].posterior_precision, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        fits[0].log_marginal_likelihood(), fits[1].log_marginal_likelihood(), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(fits[0].predict(x).var[:, 0], fits[1].predict(x).var[:, 1], rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- data of every kind


def test_mappings_from_a_dataset_of_mappings() -> None:
    for name in ("dict_keywords", "dict_starred", "dict_batch", "bert"):
        model = CASES[name].model()
        la = ScaLLA(model, num_features=NUM_FEATURES)
        la.fit(DataLoader(Mappings(), batch_size=8), context=words(8, seed=6), bias=True, num_steps=2)
        assert la.n_data == 16
        assert la(words(5)).shape == (5, 3)
        assert torch.equal(la(words(5)), la({**words(5), "labels": torch.zeros(5)}))  # labels are not looked at


def test_labels_under_another_name() -> None:
    batches = [{**words(8), "target": torch.arange(8) % 3}]
    la = ScaLLA(CASES["dict_keywords"].model(), num_features=NUM_FEATURES, dict_key_y="target")
    assert la.fit(batches, num_steps=2).n_data == 8


def test_an_iterable_dataset_gives_what_the_same_data_in_memory_give() -> None:
    x, y = normal(20, 2), torch.arange(20) % 3
    fits = [
        ScaLLA(CASES["mlp"].model(), num_features=NUM_FEATURES).fit(batches, num_steps=5)
        for batches in (DataLoader(Stream(x, y), batch_size=8), loader(x, y, 8), [*loader(x, y, 8)])
    ]
    assert fits[0].n_data == 20
    for other in fits[1:]:
        assert torch.equal(other.posterior_precision, fits[0].posterior_precision)


def test_batches_of_three_and_inputs_in_tuples() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, 3)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.head(torch.cat([a, b], -1))

    a, b, y, w = normal(8, 2), normal(8, 3, seed=6), torch.arange(8) % 3, torch.ones(8)
    la = ScaLLA(Pair(), num_features=NUM_FEATURES).fit([((a, b), y, w)], num_steps=3)
    assert la((a, b)).shape == (8, 3)
    assert torch.equal(la((a, b))[:4], la((a[:4], b[:4])))


# ---------------------------------------------------------------- what cannot be differentiated


def test_a_module_without_a_derivative_is_named() -> None:
    ids = torch.randint(10, (8, 4), generator=torch.Generator().manual_seed(0))
    model = BagClassifier()
    before = state_of(model)
    la = ScaLLA(model, num_features=NUM_FEATURES)
    with pytest.raises(UnsupportedModuleError, match=r"module 'words' \(EmbeddingBag\).*Embedding and a mean"):
        la.fit([(ids, torch.arange(8) % 3)], num_steps=2)
    assert_untouched(model, before)
    remedied = ScaLLA(model, num_features=NUM_FEATURES, parameters=["head.*"])
    assert remedied.fit([(ids, torch.arange(8) % 3)], num_steps=2)(ids).shape == (8, 3)


def test_predictions_do_not_depend_on_the_rest_of_the_batch() -> None:
    for model in (dropout_mlp().train(), tiny_bert().train()):
        x = normal(8, 2) if isinstance(model, nn.Sequential) else words(8)
        batch = (x, torch.arange(8) % 3) if isinstance(x, Tensor) else {**x, "labels": torch.arange(8) % 3}
        la = ScaLLA(model, num_features=NUM_FEATURES).fit([batch], num_steps=2)
        parts = [
            la.predict({k: v[i : i + 3] for k, v in x.items()} if isinstance(x, dict) else x[i : i + 3])
            for i in (0, 3, 6)
        ]
        torch.testing.assert_close(la.predict(x).probs, torch.cat([p.probs for p in parts]), rtol=1e-5, atol=1e-6)
