"""One script, run on laplace-torch and on ScaLLA: the same calls, the same shapes and types, the same numbers.

With the exact Jacobians in the surrogate's place ScaLLA is laplace-torch's FullLaplace over all weights, so what is
not random must agree in value, and what is random within its Monte-Carlo error.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from cases import loader, mlp, normal
from laplace_reference import RunningNLLMetric, fit_quietly, full_laplace, laplace
from oracles import JacobianFeatures
from scalla import InputError, ScaLLA

SAMPLES = 20_000


def network(num_outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp(num_outputs).double()


def data(likelihood: str, num: int = 40) -> tuple[Tensor, Tensor]:
    x = normal(num, 2, dtype=torch.float64)
    if likelihood == "regression":
        return x, normal(num, 3, seed=7, dtype=torch.float64)
    return x, torch.randint(3, (num,), generator=torch.Generator().manual_seed(7))


theirs = full_laplace


def ours(model: nn.Module, likelihood: str, **options: Any) -> Any:
    return ScaLLA(model, likelihood, surrogate=JacobianFeatures(model), num_features=33, **options)


def fitted(make: Any, likelihood: str, **options: Any) -> Any:
    la = make(network(), likelihood, **options)
    steps = {"num_steps": 0} if isinstance(la, ScaLLA) else {}  # the features are the Jacobians already
    return fit_quietly(la, loader(*data(likelihood)), override=True, progress_bar=False, **steps)


def attributes(la: Any) -> dict[str, Any]:
    names = (
        "prior_precision", "sigma_noise", "temperature", "n_data", "n_outputs", "n_params", "posterior_precision",
        "posterior_covariance", "log_likelihood", "scatter", "log_det_ratio",
    )  # fmt: skip
    return {name: getattr(la, name) for name in names}


def classification_script(la: Any) -> dict[str, Any]:
    """What a user of laplace-torch writes after `fit`; nothing in it is random."""
    x = normal(6, 2, seed=11, dtype=torch.float64)
    found = attributes(la)
    found["plain"] = la(x)
    found["glm"] = la(x, pred_type="glm", link_approx="probit")
    found["bridge"] = la(x, pred_type="glm", link_approx="bridge")
    found["bridge_norm"] = la(x, link_approx="bridge_norm")
    found["joint"] = la(x, joint=True)
    found["evidence"] = la.log_marginal_likelihood()
    delta = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    la_evidence = la.log_marginal_likelihood(delta)
    found["evidence at 3"] = la_evidence.detach()
    found["slope at 3"] = torch.autograd.grad(la_evidence, delta)[0]
    la.prior_precision = 5.0
    found["at 5"] = la(x)
    la.prior_precision = torch.tensor([2.0])
    found["at 2"] = la(x)
    found["set"] = la.prior_precision
    return found


def regression_script(la: Any) -> dict[str, Any]:
    x = normal(6, 2, seed=11, dtype=torch.float64)
    found = attributes(la)
    found["mean"], found["variance"] = la(x)
    found["joint mean"], found["joint covariance"] = la(x, pred_type="glm", joint=True)
    found["mean again"], found["diagonal"] = la(x, diagonal_output=True)
    found["evidence"] = la.log_marginal_likelihood()
    delta, sigma = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (3.0, 0.5))
    evidence = la.log_marginal_likelihood(prior_precision=delta, sigma_noise=sigma)
    found["evidence at 3, 0.5"] = evidence.detach()
    found["slope delta"], found["slope sigma"] = torch.autograd.grad(evidence, (delta, sigma))
    la.sigma_noise = 0.5
    la.prior_precision = 3.0
    _, found["variance at 3, 0.5"] = la(x)
    return found


def close(name: str, left: Any, right: Any) -> None:
    """Same type, same shape, same numbers."""
    assert isinstance(right, Tensor) == isinstance(left, Tensor), name
    if isinstance(left, Tensor):
        assert right.shape == left.shape, name
        assert right.is_floating_point() == left.is_floating_point(), name
    else:
        assert type(right) is type(left), name
    torch.testing.assert_close(
        torch.as_tensor(right).detach().double(),
        torch.as_tensor(left).detach().double(),
        rtol=1e-6,
        atol=1e-8,
        msg=name,
    )


@pytest.mark.parametrize("options", [{}, {"prior_precision": 0.3, "temperature": 2.0, "prior_mean": 0.1}])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_the_same_script_gives_the_same_numbers(likelihood: str, options: dict[str, float]) -> None:
    script = classification_script if likelihood == "classification" else regression_script
    extra = {"sigma_noise": 0.7} if likelihood == "regression" and options else {}
    expected = script(fitted(theirs, likelihood, **options, **extra))
    found = script(fitted(ours, likelihood, **options, **extra))
    assert list(found) == list(expected)
    for name, value in expected.items():
        close(name, value, found[name])


def sampling_script(la: Any, generator: torch.Generator) -> dict[str, Tensor]:
    x = normal(4, 2, seed=11, dtype=torch.float64)
    return {
        "functional": la.functional_samples(x, pred_type="glm", n_samples=SAMPLES, generator=generator),
        "positional": la.functional_samples(x, "glm", 50),
        "predictive": la.predictive_samples(x, pred_type="glm", n_samples=SAMPLES, generator=generator),
        "predictive positional": la.predictive_samples(x, "glm", 50),
        "diagonal": la.functional_samples(x, n_samples=SAMPLES, diagonal_output=True, generator=generator),
        "default": la.functional_samples(x),
    }


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_samples_have_the_same_shapes_and_moments(likelihood: str) -> None:
    results = []
    for make in (theirs, ours):
        la = fitted(make, likelihood, prior_precision=0.3)
        results.append(sampling_script(la, torch.Generator().manual_seed(3)))
    expected, found = results
    for name, wanted in expected.items():
        assert found[name].shape == wanted.shape, name
        if len(wanted) < SAMPLES:
            continue
        error = wanted.std(0) / SAMPLES**0.5
        assert ((found[name].mean(0) - wanted.mean(0)).abs() < 8 * error).all(), name
        torch.testing.assert_close(found[name].std(0), wanted.std(0), rtol=0.06, atol=1e-3, msg=name)
    if likelihood == "classification":
        sums = found["predictive"].sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums))
    # Within an input the outputs are correlated as the covariance says: a transposed factor would show here.
    for index in range(4):
        torch.testing.assert_close(
            torch.cov(found["functional"][:, index].T),
            torch.cov(expected["functional"][:, index].T),
            rtol=0.1,
            atol=0.05,
        )


@pytest.mark.parametrize("diagonal_output", [False, True])
def test_the_monte_carlo_link_agrees_within_its_error(diagonal_output: bool) -> None:
    x = normal(4, 2, seed=11, dtype=torch.float64)
    found = [
        fitted(make, "classification", prior_precision=0.3)(
            x, link_approx="mc", n_samples=SAMPLES, diagonal_output=diagonal_output
        )
        for make in (theirs, ours)
    ]
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=4 * 0.5 / SAMPLES**0.5)


def test_a_generator_decides_what_is_drawn() -> None:
    la = fitted(ours, "classification")
    x = normal(4, 2, seed=11, dtype=torch.float64)
    first, again, other = (
        la(x, link_approx="mc", n_samples=10, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_marglik_finds_no_less_evidence_than_theirs() -> None:
    found = []
    for make in (theirs, ours):
        la = fitted(make, "classification")
        with warnings.catch_warnings():  # theirs reminds of the link, which the evidence has not
            warnings.filterwarnings("ignore", message="By default `link_approx` is `probit`")
            la.optimize_prior_precision(method="marglik", pred_type="glm", init_prior_prec=1.0, n_steps=300)
        assert la.prior_precision.shape == (1,)
        found.append((float(la.prior_precision), float(la.log_marginal_likelihood())))
    (theirs_at, their_evidence), (ours_at, our_evidence) = found
    assert our_evidence >= their_evidence - 1e-9
    assert ours_at == pytest.approx(theirs_at, rel=0.02)


GRID = {"log_prior_prec_min": -3, "log_prior_prec_max": 3, "grid_size": 13, "pred_type": "glm", "method": "gridsearch"}


class FreshNLL(RunningNLLMetric):
    """laplace-torch 0.3 never resets a metric between two points of its grid, and so compares running means."""

    def compute(self) -> Tensor:
        value = super().compute()
        self.reset()
        return value


class FreshGaussianNLL(torchmetrics.Metric):
    """Takes mean, covariance and target, as laplace-torch feeds a metric of a regression; noise of variance 1."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, mean: Tensor, covariance: Tensor, target: Tensor) -> None:
        spread = torch.distributions.MultivariateNormal(mean, covariance + torch.eye(3, dtype=mean.dtype))
        self.total -= spread.log_prob(target).sum()

    def compute(self) -> Tensor:
        value = self.total.clone()
        self.reset()
        return value


def grid_search(make: Any, likelihood: str, **options: Any) -> float:
    """Held-out data for which the best point lies inside the grid: labels half as sure as the network."""
    x = normal(400, 2, seed=21, dtype=torch.float64) * 3
    f = network()(x).detach()
    if likelihood == "classification":
        y = (f / 2).softmax(-1).multinomial(1, generator=torch.Generator().manual_seed(23))[:, 0]
    else:
        y = f + 1.5 * normal(400, 3, seed=22, dtype=torch.float64)
    la = fitted(make, likelihood)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if make is ours else "ignore", UserWarning)  # ours warns of an edge
        la.optimize_prior_precision(val_loader=loader(x, y, 50), **GRID, **options)
    return float(la.prior_precision)


def test_gridsearch_chooses_the_same_point() -> None:
    found = grid_search(ours, "classification", link_approx="probit", progress_bar=False)
    assert found == pytest.approx(grid_search(theirs, "classification", loss=FreshNLL()), rel=1e-5)


@pytest.mark.parametrize(
    ("likelihood", "metric"),
    [("classification", FreshNLL), ("regression", FreshGaussianNLL)],
    ids=["nll", "gaussian_nll"],
)
def test_gridsearch_takes_a_metric(likelihood: str, metric: Any) -> None:
    found, expected = (grid_search(make, likelihood, loss=metric()) for make in (ours, theirs))
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_metric_begins_anew_at_every_point_of_the_grid() -> None:
    """The one metric that laplace-torch ships with, which it does not reset itself."""
    found = grid_search(ours, "classification", loss=RunningNLLMetric())
    assert found == grid_search(ours, "classification", loss=FreshNLL())


def test_more_data_by_override_false() -> None:
    x, y = data("classification")
    found = []
    for make in (theirs, ours):
        la = make(network(), "classification")
        steps = {"num_steps": 0} if isinstance(la, ScaLLA) else {}
        la.fit(loader(x[:16], y[:16]), **steps)
        la.fit(loader(x[16:], y[16:]), override=False)
        found.append(la)
    assert found[1].n_data == found[0].n_data == len(x)
    close("precision", found[0].posterior_precision, found[1].posterior_precision)


def test_defaults_are_theirs() -> None:
    """Every argument that peers share has the same default."""
    wanted = {
        "__call__": ("forward", ("pred_type", "joint", "link_approx", "n_samples", "diagonal_output", "generator")),
        "fit": ("fit", ("override", "progress_bar")),
        "functional_samples": ("functional_samples", ("pred_type", "n_samples", "diagonal_output", "generator")),
        "predictive_samples": ("predictive_samples", ("pred_type", "n_samples", "diagonal_output", "generator")),
        "log_marginal_likelihood": ("log_marginal_likelihood", ("prior_precision", "sigma_noise")),
        "optimize_prior_precision": (
            "optimize_prior_precision",
            ("pred_type", "method", "n_steps", "init_prior_prec", "prior_structure", "val_loader", "loss",
             "log_prior_prec_min", "log_prior_prec_max", "grid_size", "link_approx", "n_samples", "verbose",
             "progress_bar", "log_prior_prec_base"),
        ),
        "__init__": ("__init__", ("sigma_noise", "prior_precision", "prior_mean", "temperature", "enable_backprop",
                                  "dict_key_y")),
    }  # fmt: skip
    for theirs_name, (ours_name, arguments) in wanted.items():
        reference = inspect.signature(getattr(laplace.ParametricLaplace, theirs_name)).parameters
        present = inspect.signature(getattr(ScaLLA, ours_name)).parameters
        for argument in arguments:
            default = reference[argument].default
            assert present[argument].default == getattr(default, "value", default), f"{theirs_name}({argument})"


def test_their_enumerations_are_understood() -> None:
    la = fitted(ours, laplace.Likelihood.CLASSIFICATION)
    x = normal(4, 2, seed=11, dtype=torch.float64)
    found = la(x, pred_type=laplace.PredType.GLM, link_approx=laplace.LinkApprox.PROBIT)
    assert torch.equal(found, la(x, pred_type="glm", link_approx="probit"))
    la.optimize_prior_precision(method=laplace.TuningMethod.MARGLIK, prior_structure=laplace.PriorStructure.SCALAR)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda la, x: la(x, pred_type="nn"), "pred_type='glm'"),
        (lambda la, x: la.functional_samples(x, "nn", 5), "pred_type='glm'"),
        (lambda la, x: la.optimize_prior_precision(prior_structure="layerwise"), "use 'scalar'"),
        (lambda la, x: setattr(la, "prior_precision", torch.ones(4)), "give one number"),
        (lambda la, x: la.optimize_prior_precision(method="gridsearch"), "val_loader"),
        (lambda la, x: la.optimize_prior_precision(init_prior_prec=-1.0), "init_prior_prec"),
        (lambda la, x: la.log_marginal_likelihood(sigma_noise=torch.tensor(2.0)), "no observation noise"),
    ],
)
def test_what_cannot_exist_here_says_so(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(fitted(ours, "classification"), normal(4, 2, seed=11, dtype=torch.float64))
