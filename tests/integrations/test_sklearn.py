"""scikit-learn's own checks, and the numbers beside closed forms on standardised tables."""

from __future__ import annotations

import pickle
import unittest
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris, make_moons
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator
from torch import Tensor, nn

from cases import mlp, normal
from oracles import DenseLLA, JacobianFeatures, probit_probs
from scalla import InputError
from scalla.integrations.sklearn import ScaLLAClassifier, ScaLLARegressor
from scalla.metrics import auroc

SHORT = {"hidden": (16,), "num_epochs": 20, "num_features": 8, "num_steps": 5, "random_state": 0}
#: which scikit-learn skips: these want an environment variable of SciPy's, and pandas
LEFT_OUT = {"check_array_api_input", "check_classifier_data_not_an_array", "check_regressor_data_not_an_array"}


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [ScaLLAClassifier, ScaLLARegressor])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
def test_scikit_learns_checks(estimator: Any) -> None:
    """All of them in one test: they are fifty, and most take a few milliseconds."""
    failed, skipped, passed = {}, set(), 0
    for instance, check in estimator_checks_generator(estimator(**SHORT)):
        try:
            check(instance)
            passed += 1
        except unittest.SkipTest:
            skipped.add(check.func.__name__)
        except Exception as error:
            failed[check.func.__name__] = repr(error)
    assert failed == {}
    assert skipped <= LEFT_OUT
    assert passed >= 45


class LinearFeatures(nn.Module):
    """g(x) = [x, 1] for each of the outputs: the Jacobian of a linear layer, its outputs apart."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.num_outputs = num_outputs

    def forward(self, x: Tensor) -> Tensor:
        row = torch.cat([x, torch.ones_like(x[:, :1])], 1)
        return torch.stack([torch.kron(e, row) for e in torch.eye(self.num_outputs, dtype=x.dtype)], 1)


def linear(num_inputs: int, num_outputs: int) -> nn.Module:
    return nn.Linear(num_inputs, num_outputs, dtype=torch.float64)


def table(num: int, *, targets: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    x = normal(num, 3, dtype=torch.float64).numpy() * [1, 20, 0.1] + [5, -40, 0]
    shape = (num,) if targets is None else (num, targets)
    return x, normal(*shape, seed=6, dtype=torch.float64).numpy() * 30 + 100


@pytest.mark.parametrize("targets", [None, 2])
def test_error_bars_are_those_of_bayesian_linear_regression(targets: int | None) -> None:
    """In standardised units Σ = [x,1] (Σ_n [x,1]ᵀ[x,1]/σ² + δI)⁻¹ [x,1]ᵀ, with σ = 1 as nothing was trained."""
    x, y = table(30, targets=targets)
    regressor = ScaLLARegressor(
        linear, surrogate=LinearFeatures(targets or 1), num_features=4 * (targets or 1), num_steps=0, num_epochs=0,
        tune=False, prior_precision=2.0, random_state=3,
    ).fit(x, y)  # fmt: skip
    new = table(7)[0] + 1
    design, rows = (np.column_stack([(a - x.mean(0)) / x.std(0), np.ones(len(a))]) for a in (x, new))
    inverse = np.linalg.inv(design.T @ design + 2.0 * np.eye(4))
    var = np.einsum("bi,ij,bj->b", rows, inverse, rows)
    mean, std = regressor.predict(new, return_std=True)
    np.testing.assert_array_equal(regressor.predict(new), mean)
    assert mean.shape == std.shape == y[:7].shape
    scale = y.std(0)
    wanted = np.sqrt(var + 1)[:, None] * scale
    np.testing.assert_allclose(std.reshape(7, -1), wanted.reshape(7, -1), rtol=1e-9)
    _, alone = regressor.predict(new, return_std=True, with_noise=False)
    np.testing.assert_allclose(alone.reshape(7, -1), (np.sqrt(var)[:, None] * scale).reshape(7, -1), rtol=1e-9)
    layer = regressor.scalla_.model
    f = rows @ np.column_stack([layer.weight.detach().numpy(), layer.bias.detach().numpy()]).T * scale + y.mean(0)
    np.testing.assert_allclose(mean.reshape(7, -1), f, rtol=1e-9)
    samples = regressor.sample_y(new, 4000, random_state=1)
    assert samples.shape == (*y[:7].shape, 4000)
    np.testing.assert_allclose(samples.std(-1), alone, rtol=0.1)
    np.testing.assert_allclose(samples.mean(-1), mean, atol=5 * float(alone.max()) / 4000**0.5)
    np.testing.assert_allclose(regressor.sample_y(new, 3, random_state=1), samples[..., :3], rtol=1e-12)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_probabilities_are_those_of_the_dense_laplace_approximation(num_classes: int) -> None:
    x = table(30)[0]
    labels = torch.arange(30) % num_classes
    names = np.array(["ash", "beech", "cedar"])
    classifier = ScaLLAClassifier(
        linear, surrogate=LinearFeatures(num_classes), num_features=4 * num_classes, num_steps=0, num_epochs=3,
        tune=False, random_state=3,
    ).fit(x, names[labels.numpy()])  # fmt: skip
    inputs, new = (torch.from_numpy((a - x.mean(0)) / x.std(0)) for a in (x, table(9)[0] * 1.1))
    network, features = classifier.scalla_.model, LinearFeatures(num_classes)
    dense = DenseLLA(features(inputs), network(inputs).detach(), labels, "classification")
    wanted = probit_probs(network(new).detach(), dense.variance(features(new))).numpy()
    found = classifier.predict_proba(table(9)[0] * 1.1)
    np.testing.assert_allclose(found, wanted, rtol=1e-8)
    np.testing.assert_allclose(classifier.predict_log_proba(table(9)[0] * 1.1), np.log(wanted), rtol=1e-8)
    assert classifier.classes_.tolist() == names[:num_classes].tolist()
    assert classifier.predict(table(9)[0] * 1.1).tolist() == names[wanted.argmax(1)].tolist()


def test_a_trained_network_is_used_as_it_is() -> None:
    network = mlp(1, inputs=3).double()
    before = {k: v.clone() for k, v in network.state_dict().items()}
    x, y = table(20)
    regressor = ScaLLARegressor(
        network, surrogate=JacobianFeatures(network), num_features=26, num_steps=0, tune=False
    ).fit(x, y)
    inputs, new = torch.from_numpy(x), table(5)[0] + 1
    features = JacobianFeatures(network)
    dense = DenseLLA(features(inputs), network(inputs).detach(), torch.from_numpy(y)[:, None], "regression")
    mean, std = regressor.predict(new, return_std=True, with_noise=False)
    np.testing.assert_allclose(std**2, dense.variance(features(torch.from_numpy(new)))[:, 0, 0], rtol=1e-8)
    np.testing.assert_allclose(mean, network(torch.from_numpy(new)).detach()[:, 0])
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())


def test_images_and_a_single_logit_with_a_network_of_ones_own() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 1))
    x, y = normal(12, 1, 4, 4).numpy(), np.arange(12) % 2
    classifier = ScaLLAClassifier(network, num_features=4, num_steps=2, random_state=0).fit(x, y)
    probs = classifier.predict_proba(x)
    assert probs.shape == (12, 2)
    np.testing.assert_allclose(probs.sum(1), 1, rtol=1e-6)
    np.testing.assert_allclose(probs[:, 1], classifier.scalla_(torch.from_numpy(x))[:, 0], rtol=1e-5)


def test_it_learns() -> None:
    x, y = load_iris(return_X_y=True)
    classifier = ScaLLAClassifier(hidden=(16,), num_epochs=80, num_features=20, num_steps=30, random_state=0)
    assert cross_val_score(classifier, x, y, cv=3).min() > 0.9
    z = np.linspace(-2, 2, 150)
    targets = np.sin(2 * z) + 0.1 * np.random.default_rng(0).normal(size=150)
    regressor = ScaLLARegressor(num_epochs=60, num_features=20, num_steps=200, random_state=0)
    _, std = regressor.fit(z[:, None], targets).predict(z[:, None], return_std=True)
    assert regressor.score(z[:, None], targets) > 0.95
    assert 0.07 < np.median(std) < 0.15  # the noise is 0.1
    far = regressor.predict([[6.0]], return_std=True)[1]
    assert far[0] > 2 * std.max()


def test_a_generated_context_makes_an_outlier_score() -> None:
    x, y = make_moons(200, noise=0.1, random_state=0)
    options = SHORT | {"num_steps": 150, "num_epochs": 30}
    classifier = ScaLLAClassifier(context="generated", bias=True, **options).fit(x, y)
    away = 5 * np.column_stack([np.cos(t := np.linspace(0, 6, 100)), np.sin(t)])
    inside, outside = (torch.from_numpy(classifier.ood_score(a)) for a in (x, away))
    assert auroc(inside, outside) > 0.9
    given = ScaLLAClassifier(context=away, bias=True, **options).fit(x, y)
    assert given.ood_score(away, "variance").shape == (100,)
    assert not np.allclose(given.ood_score(x), classifier.ood_score(x))


def test_seeds_copies_and_pickles() -> None:
    x, y = load_iris(return_X_y=True)
    first = ScaLLAClassifier(**SHORT).fit(x, y)
    again = clone(first).fit(x, y)
    other = ScaLLAClassifier(**SHORT | {"random_state": 1}).fit(x, y)
    np.testing.assert_array_equal(first.predict_proba(x), again.predict_proba(x))
    assert not np.allclose(first.predict_proba(x), other.predict_proba(x))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(first)).predict_proba(x), first.predict_proba(x))  # noqa: S301


def test_pipelines_and_grids() -> None:
    x, y = load_iris(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), ScaLLAClassifier(**SHORT | {"tune": False}))
    grid = {"scallaclassifier__prior_precision": [1.0, 1e4]}
    search = GridSearchCV(pipeline, grid, cv=2, scoring="neg_log_loss").fit(x, y)
    assert search.best_params_ == {"scallaclassifier__prior_precision": 1.0}  # 1e4 leaves the prior alone


@pytest.mark.parametrize(
    ("options", "labels", "message"),
    [
        ({}, np.zeros(20), "got labels of one class, '0.0' alone; wanted at least two classes"),
        ({"context": "noise"}, None, "got context='noise'; wanted an array with the columns of X, or 'generated'"),
        ({"model": 3}, None, "got a model of type int; wanted None, a trained torch.nn.Module or a function"),
        ({"model": mlp(3, inputs=3)}, None, "labels of 2 classes for a network with 3 outputs; wanted labels of every"),
        ({"bias": True}, None, "context"),
    ],
)
def test_errors_say_what_to_do(options: dict[str, Any], labels: Any, message: str) -> None:
    labels = np.arange(20) % 2 if labels is None else labels
    with pytest.raises(InputError, match=message):
        ScaLLAClassifier(**SHORT | options).fit(table(20)[0], labels)
