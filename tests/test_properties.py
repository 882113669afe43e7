"""What holds of every method, whatever it is: one table of methods, one test for each property."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cases import loader, normal
from scalla import InputError, NotFittedError, Prediction, ScaLLA
from scalla.baselines.controls import Brightness, ContextClassifier, PriorScore
from scalla.baselines.detectors import FDBD, KNN, MSP, Energy, GaussianMixture, Mahalanobis, ReAct, ViM
from scalla.baselines.ella import ELLA
from scalla.baselines.fmgp import FMGP
from scalla.baselines.lla import LLA
from scalla.baselines.map import MAP
from scalla.baselines.mfvi import MFVI
from scalla.baselines.protocol import Detector, Method
from scalla.baselines.sngp import SNGP
from scalla.baselines.valla import VaLLA
from untouched import assert_untouched, state_of

NUM_DATA, NUM_CLASSES = 40, 3
#: function samples; fewer than inputs, so that neither number can stand for the other
NUM_SAMPLES = 16

Options = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """How a method is built, with settings that make it tiny, and what is fitted."""

    build: Callable[..., Any]
    settings: Options
    fit: Options
    #: another seed gives another posterior or other samples
    random: bool = True
    #: the setting that scales a prior centred on the network: Σ without data is proportional to its inverse
    prior: str | None = "prior_precision"
    #: settings with which data of no information leave the prior; None where the variance is learned from them
    uninformed: Options | None = None

    def unfitted(self, model: nn.Module, likelihood: str = "classification", **options: Any) -> Any:
        return self.build(model, likelihood, **{**self.settings, **options})

    def fitted(
        self, model: nn.Module, likelihood: str = "classification", *, batches: Any = None, **options: Any
    ) -> Any:
        method = self.unfitted(model, likelihood, **options)
        fit = {k: v() if callable(v) else v for k, v in self.fit.items()}
        return method.fit(train_loader(likelihood) if batches is None else batches, **fit)


def context() -> Tensor:
    return normal(24, 2, seed=31, dtype=torch.float64) + 4


def scalla(surrogate: str, **fit: Any) -> Entry:
    settings = {"num_features": 8, "surrogate": surrogate}
    return Entry(ScaLLA, settings, {"num_steps": 15, **fit}, uninformed={})


def lla(**settings: Any) -> Entry:
    return Entry(LLA, settings, {}, uninformed={})


METHODS: dict[str, Entry] = {
    "map": Entry(MAP, {}, {}, random=False, prior=None),
    "lla last layer kron": lla(),
    "lla last layer full": lla(structure="full"),
    "lla last layer diag": lla(structure="diag"),
    "lla all kron": lla(subset="all"),
    "lla all full": lla(subset="all", structure="full"),
    "lla all diag": lla(subset="all", structure="diag"),
    "ella": Entry(ELLA, {"num_points": 20, "num_features": 12}, {}, uninformed={}),
    # L starts at I and is trained, so that the variance of few steps is below the prior's whatever the data say.
    "valla": Entry(VaLLA, {"num_inducing": 6, "num_steps": 10, "batch_size": 16, "learn_prior": False}, {}),
    "fmgp": Entry(FMGP, {"num_inducing": 6, "num_steps": 10, "lr": 1e-2}, {}, prior=None),
    # The prior is centred on zero weights, not on those of the network.
    "mfvi": Entry(MFVI, {"num_steps": 10}, {}, prior=None),
    "sngp": Entry(SNGP, {"num_epochs": 0, "num_features": 16}, {}, prior="ridge", uninformed={}),
    "scalla mirror": scalla("mirror"),
    "scalla trunk": scalla("trunk"),
    "scalla biased": scalla("mirror", context=context, bias=True),
    "scalla trunk biased": scalla("trunk", context=context, bias=True),
}
#: trained enough to have weights of its own
METHODS["sngp trained"] = Entry(SNGP, {"num_epochs": 2, "num_features": 16}, {}, prior=None)

DETECTORS: dict[str, Callable[[nn.Module], Any]] = {
    "msp": MSP,
    "energy": Energy,
    "react": ReAct,
    "mahalanobis": Mahalanobis,
    "relative mahalanobis": lambda model: Mahalanobis(model, relative=True),
    "gaussian mixture": GaussianMixture,
    "knn": lambda model: KNN(model, num_neighbours=5),
    "vim": lambda model: ViM(model, num_principal=2),
    "fdbd": FDBD,
    "prior logdet": PriorScore,
    "prior trace": lambda model: PriorScore(model, statistic="trace"),
    "brightness": lambda model: Brightness(),
    "context classifier": lambda model: ContextClassifier(num_epochs=2),
}

every_method = pytest.mark.parametrize("name", METHODS)
every_detector = pytest.mark.parametrize("name", DETECTORS)


def network() -> nn.Module:
    """With dropout and batch normalisation, whose modes and statistics a method could change."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, NUM_CLASSES)
        ).double()
        with torch.no_grad():
            model[1].running_mean.uniform_(-0.5, 0.5)
            model[1].running_var.uniform_(0.5, 2)
    return model.eval()


def plain_network() -> nn.Module:
    """Without the batch normalisation that laplace-torch's Kronecker factors over all layers cannot take."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, NUM_CLASSES)).double().eval()


def network_for(name: str) -> nn.Module:
    return plain_network() if name.startswith("lla all") else network()


def data(likelihood: str = "classification") -> tuple[Tensor, Tensor]:
    x = normal(NUM_DATA, 2, dtype=torch.float64)
    if likelihood == "regression":
        return x, normal(NUM_DATA, NUM_CLASSES, seed=7, dtype=torch.float64)
    return x, torch.arange(NUM_DATA) % NUM_CLASSES


def train_loader(likelihood: str = "classification", **options: Any) -> DataLoader[Any]:
    return loader(*data(likelihood), 16, **options)


def test_points() -> Tensor:
    return normal(11, 2, seed=11, dtype=torch.float64) * 2


test_points.__test__ = False  # type: ignore[attr-defined]


def same(left: Prediction, right: Prediction, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    for what in ("mean", "var", "cov", "probs", "entropy", "gaussian_entropy", "mutual_information"):
        torch.testing.assert_close(getattr(left, what), getattr(right, what), rtol=rtol, atol=atol, msg=what)


# ---------------------------------------------------------------- the network it is given


def marked_network(name: str, *, training: bool) -> nn.Module:
    """A network in the midst of use: some weights frozen, a gradient waiting."""
    model = network_for(name).train(training)
    model[0].bias.requires_grad_(False)
    model[0].weight.grad = torch.full_like(model[0].weight, 0.25)
    return model


@every_method
@pytest.mark.parametrize("training", [False, True])
def test_the_network_is_left_alone(name: str, training: bool) -> None:
    model = marked_network(name, training=training)
    before, random_state = state_of(model), torch.get_rng_state()
    method = METHODS[name].fitted(model)
    assert isinstance(method, Method)
    prediction = method.predict(test_points(), n_samples=NUM_SAMPLES)
    _ = prediction.probs, prediction.mutual_information, prediction.cov
    assert_untouched(model, before)
    assert torch.equal(torch.get_rng_state(), random_state)


@every_detector
def test_a_detector_leaves_the_network_alone(name: str) -> None:
    model = marked_network(name, training=True)
    before, random_state = state_of(model), torch.get_rng_state()
    detector = DETECTORS[name](model)
    assert isinstance(detector, Detector)
    assert detector.fit(train_loader(shuffle=True), context=context()) is detector
    detector.score(test_points())
    assert_untouched(model, before)
    assert torch.equal(torch.get_rng_state(), random_state)


@every_method
def test_the_mode_of_the_network_does_not_matter(name: str) -> None:
    """Dropout is off and statistics are the running ones, whatever the network's mode."""
    predictions = []
    for training in (False, True):
        method = METHODS[name].fitted(network_for(name).train(training))
        predictions.append(method.predict(test_points(), n_samples=NUM_SAMPLES))
    same(*predictions)


# ---------------------------------------------------------------- randomness


@every_method
def test_the_seed_decides(name: str) -> None:
    """With a loader that shuffles, and whatever the global random state."""
    predictions = []
    for seed, global_seed in ((3, 0), (3, 1), (4, 0)):
        torch.manual_seed(global_seed)
        method = METHODS[name].fitted(network_for(name), batches=train_loader(shuffle=True), seed=seed)
        predictions.append(method.predict(test_points(), n_samples=NUM_SAMPLES))
    first, again, other = predictions
    same(first, again)
    assert torch.equal(first.mutual_information, other.mutual_information) != METHODS[name].random


@every_method
def test_a_generator_decides_the_samples_alone(name: str) -> None:
    method, x = METHODS[name].fitted(network_for(name)), test_points()
    first, again, other = (
        method.predict(x, n_samples=NUM_SAMPLES, generator=torch.Generator().manual_seed(s)) for s in (5, 5, 6)
    )
    same(first, again)
    if name != "mfvi":  # whose moments are those of its samples
        assert torch.equal(first.mean, other.mean)
        assert torch.equal(first.var, other.var)
    assert torch.equal(first.mutual_information, other.mutual_information) != METHODS[name].random


@every_detector
def test_a_detector_is_reproducible(name: str) -> None:
    scores = []
    for global_seed in (0, 1):
        torch.manual_seed(global_seed)
        detector = DETECTORS[name](network()).fit(train_loader(shuffle=True), context=context())
        scores.append(detector.score(test_points()))
    assert torch.equal(*scores)


# ---------------------------------------------------------------- batches


@every_method
def test_predictions_do_not_depend_on_the_batch(name: str) -> None:
    method, x = METHODS[name].fitted(network_for(name)), test_points()
    whole = method.predict(x, n_samples=NUM_SAMPLES)
    for sizes in ([1] * len(x), [4, 6, 1]):
        parts = [method.predict(rows, n_samples=NUM_SAMPLES) for rows in x.split(sizes)]
        for what in ("mean", "cov", "probs", "entropy", "gaussian_entropy", "mutual_information"):
            joined = torch.cat([getattr(p, what) for p in parts])
            torch.testing.assert_close(joined, getattr(whole, what), rtol=1e-8, atol=1e-10, msg=what)


@every_detector
def test_scores_do_not_depend_on_the_batch(name: str) -> None:
    detector, x = DETECTORS[name](network()).fit(train_loader(), context=context()), test_points()
    whole = detector.score(x)
    assert whole.shape == (len(x),)
    assert whole.dtype == torch.float64
    assert bool(torch.isfinite(whole).all())
    torch.testing.assert_close(torch.cat([detector.score(r) for r in x.split([4, 6, 1])]), whole, rtol=1e-6, atol=1e-9)


# ---------------------------------------------------------------- what comes out


@every_method
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_covariances_are_positive_semi_definite(name: str, likelihood: str) -> None:
    method = METHODS[name].fitted(network_for(name), likelihood)
    found = method.predict(test_points(), n_samples=NUM_SAMPLES)
    assert found.mean.shape == found.var.shape == (len(test_points()), NUM_CLASSES)
    assert torch.equal(found.cov, found.cov.mT)
    values = torch.linalg.eigvalsh(found.cov.double())
    assert float(values.min()) >= -1e-12 * float(values.max())
    torch.testing.assert_close(found.var, found.cov.diagonal(dim1=-2, dim2=-1), rtol=1e-10, atol=1e-14)
    assert bool((found.var > 0).all()) == (name != "map")
    if likelihood == "regression":
        assert bool((found.var_with_noise > found.var).all())
        assert bool(torch.isfinite(found.log_prob(torch.zeros_like(found.mean))).all())
    else:
        torch.testing.assert_close(found.probs.sum(-1), torch.ones(len(found), dtype=torch.float64))
        assert bool((found.probs > 0).all() & torch.isfinite(found.log_probs).all())
        assert bool((found.entropy >= 0).all() & (found.mutual_information >= 0).all())


@every_method
def test_a_copy_is_equal_and_apart(name: str) -> None:
    method = METHODS[name].fitted(network_for(name))
    x = test_points()
    before = method.predict(x, n_samples=NUM_SAMPLES)
    clone = copy.deepcopy(method)
    same(clone.predict(x, n_samples=NUM_SAMPLES), before)
    clone.fit([(x + 1, torch.zeros(len(x), dtype=torch.long))] * 2, **({"num_steps": 1} if "scalla" in name else {}))
    same(method.predict(x, n_samples=NUM_SAMPLES), before)


@pytest.mark.parametrize("name", [n for n in METHODS if n.startswith("scalla")])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_what_is_loaded_equals_what_was_saved(name: str, likelihood: str, tmp_path: Path) -> None:
    """The one method of the table that is more than a row of a benchmark."""
    model, x = network(), test_points()
    noise = {"sigma_noise": [0.5, 1.0, 2.0]} if likelihood == "regression" else {}
    method = METHODS[name].fitted(model, likelihood, prior_precision=0.3, temperature=1.5, seed=9, **noise)
    method.save(tmp_path / "posterior.safetensors")
    loaded = ScaLLA.load(tmp_path / "posterior.safetensors", network())
    left, right = (m.predict(x, n_samples=NUM_SAMPLES) for m in (method, loaded))
    for what in ("mean", "var", "cov") if likelihood == "regression" else ("mean", "cov", "probs", "entropy"):
        assert torch.equal(getattr(left, what), getattr(right, what)), what
    assert torch.equal(method.functional_samples(x), loaded.functional_samples(x))
    assert torch.equal(method.log_marginal_likelihood(), loaded.log_marginal_likelihood())


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize("name", [n for n, e in METHODS.items() if e.prior == "prior_precision"])
def test_a_huge_prior_precision_gives_map(name: str) -> None:
    model, x = network_for(name), test_points()
    found = METHODS[name].fitted(model, prior_precision=1e12).predict(x, n_samples=NUM_SAMPLES)
    wanted = MAP(model).predict(x)
    torch.testing.assert_close(found.mean, wanted.mean, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.probs, wanted.probs, rtol=0, atol=1e-4)
    assert float(found.var.max()) < 1e-9
    assert float(found.mutual_information.max()) < 1e-9


@pytest.mark.parametrize("name", [n for n, e in METHODS.items() if e.uninformed is not None])
def test_data_that_say_nothing_leave_the_prior(name: str) -> None:
    """Noise of 1e8: Σ is proportional to 1/δ, as the prior's alone is, and above that of informative data."""
    entry, x = METHODS[name], test_points()
    assert entry.prior is not None
    prior, wide = (
        entry.fitted(network_for(name), "regression", sigma_noise=1e8, **{entry.prior: delta}).predict(x).cov
        for delta in (4.0, 1.0)
    )
    torch.testing.assert_close(wide, 4 * prior, rtol=1e-7, atol=1e-12)
    posterior = entry.fitted(network_for(name), "regression", sigma_noise=0.1, **{entry.prior: 4.0}).predict(x).cov
    assert float(torch.linalg.eigvalsh(prior - posterior).min()) > -1e-9
    before, after = (float(c.diagonal(dim1=-2, dim2=-1).sum()) for c in (prior, posterior))
    assert after < 0.9 * before
    homogeneous = entry.fitted(network_for(name), "regression", sigma_noise=0.1, **{entry.prior: 1.0}).predict(x).cov
    assert not torch.allclose(homogeneous, 4 * posterior, rtol=0.05)


@pytest.mark.parametrize("name", [n for n in METHODS if n.startswith("scalla")])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_no_data_give_the_prior(name: str, likelihood: str) -> None:
    x = test_points()
    method = METHODS[name].fitted(network(), likelihood, prior_precision=0.5)
    method.forget(train_loader(likelihood))
    prior = torch.stack([g @ g.T for g in method.features(x)]) / 0.5
    torch.testing.assert_close(method.functional_variance(x), prior, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------- bad input


@every_method
def test_predicting_before_the_fit_is_refused(name: str) -> None:
    method = METHODS[name].unfitted(network_for(name))
    if name == "map":  # nothing to fit
        assert method.predict(test_points()).probs.shape == (len(test_points()), NUM_CLASSES)
        return
    with pytest.raises(NotFittedError, match=r"call fit\(train_loader\)"):
        method.predict(test_points())


@every_method
def test_settings_that_make_no_sense_are_refused(name: str) -> None:
    entry, model = METHODS[name], network_for(name)
    with pytest.raises(InputError, match=r"likelihood='poisson'.*'classification' or 'regression'"):
        entry.unfitted(model, "poisson")
    for value in (0.0, -1.0, float("nan"), float("inf"), "much"):
        with pytest.raises(InputError, match=r"sigma_noise.*wanted a positive number"):
            entry.unfitted(model, "regression", sigma_noise=value)
        if entry.prior is not None:
            with pytest.raises(InputError, match=f"{entry.prior}.*wanted a positive number"):
                entry.unfitted(model, **{entry.prior: value})


@pytest.mark.parametrize("name", [n for n in METHODS if n != "map"])  # which reads no data
def test_an_empty_loader_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="is empty; wanted at least one batch"):
        METHODS[name].fitted(network_for(name), batches=[])
