"""Prior precision, noise and temperature: by evidence, on a grid, by gradient; each against its own definition."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import loader, mlp, normal
from oracles import JacobianFeatures
from scalla import InputError, Prediction, ScaLLA
from scalla.ggn import GGNSums
from scalla.posterior import Posterior
from scalla.tuning import (
    HeldOut,
    by_evidence,
    by_gradient,
    evidence_noise,
    evidence_prior_precision,
    grid_prior_precision,
)

M, NUM_DATA = 5, 40
F64 = torch.float64


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=F64)


def posterior(
    likelihood: Any = "classification",
    *,
    rank: int = 9,
    sigma: Any = 1.0,
    temperature: float = 1.0,
    weights_sq_norm: float = 6.0,
    delta: float = 0.7,
    loss: float = 30.0,
) -> Posterior:
    levels = 3 if likelihood == "regression" else 1
    root = normal(levels, rank, M, seed=1, dtype=F64) * torch.tensor([3.0, 1.5, 1.0, 0.4, 0.1], dtype=F64)
    return Posterior(
        GGNSums(root.mT @ root, loss * (1 + torch.arange(levels, dtype=F64)), NUM_DATA),
        likelihood,
        num_outputs=3,
        prior_precision=scalar(delta),
        sigma_noise=torch.tensor(sigma, dtype=F64),
        temperature=temperature,
        weights_sq_norm=weights_sq_norm,
        num_params=40,
    )


def central_difference(function: Callable[[float], float], at: float, *, step: float = 1e-5) -> float:
    """d/d log of a positive number."""
    return (function(at * math.exp(step)) - function(at * math.exp(-step))) / (2 * step)


# ---------------------------------------------------------------- evidence


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("delta", [1e-3, 0.5, 20.0])
def test_three_derivatives_of_the_evidence_agree(delta: float, temperature: float) -> None:
    """d/dδ: closed form ½[Σ λ/(δ(λ + Tδ)) − ‖θ‖²], automatic, and a finite difference."""
    found = posterior(temperature=temperature)
    values = torch.linalg.eigvalsh(found.ggn[0])
    closed = 0.5 * float((values / (delta * (values + temperature * delta))).sum() - 6.0)
    at = scalar(delta).requires_grad_()
    (automatic,) = torch.autograd.grad(found.log_marginal_likelihood(at), at)
    finite = central_difference(lambda d: float(found.log_marginal_likelihood(scalar(d))), delta) / delta
    assert float(automatic) == pytest.approx(closed, rel=1e-10)
    assert finite == pytest.approx(closed, rel=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.3, 10.0])
@pytest.mark.parametrize("weights_sq_norm", [1e-4, 6.0, 1e5])
def test_the_evidence_is_largest_where_it_is_said_to_be(temperature: float, weights_sq_norm: float) -> None:
    found = posterior(temperature=temperature, weights_sq_norm=weights_sq_norm)
    delta = evidence_prior_precision(found)
    best = float(found.log_marginal_likelihood(scalar(delta)))
    for other in torch.logspace(-8, 8, 400, dtype=F64):
        assert float(found.log_marginal_likelihood(other)) <= best
    at = scalar(delta).requires_grad_()
    (slope,) = torch.autograd.grad(found.log_marginal_likelihood(at), at)
    assert abs(float(slope) * delta) < 1e-8


@pytest.mark.parametrize(("options", "wanted"), [({"rank": 0}, "1e-12"), ({"weights_sq_norm": 0.0}, "1e+12")])
def test_an_evidence_without_maximum_is_told(options: Any, wanted: str) -> None:
    with pytest.warns(UserWarning, match=f"no maximum .* set to {re.escape(wanted)}"):
        assert evidence_prior_precision(posterior(**options)) == pytest.approx(float(wanted), rel=1e-9)


@pytest.mark.parametrize("temperature", [1.0, 0.4])
@pytest.mark.parametrize("sigma", [0.8, (0.5, 1.0, 4.0)], ids=["one noise", "a noise for each output"])
def test_noise_and_prior_of_largest_evidence(sigma: Any, temperature: float) -> None:
    """No direction leads further up, and all that was tuned moved."""
    found = posterior("regression", sigma=sigma, temperature=temperature)
    delta, noise = evidence_noise(found)
    assert noise.shape == found.sigma_noise.shape
    best = float(found.log_marginal_likelihood(scalar(delta), noise))
    assert best > float(found.log_marginal_likelihood()) + 0.1
    logs = torch.cat([scalar(delta)[None], noise.reshape(-1)]).log().requires_grad_()
    evidence = found.log_marginal_likelihood(logs[0].exp(), logs[1:].exp().reshape(noise.shape))
    (slope,) = torch.autograd.grad(evidence, logs)
    assert float(slope.abs().max()) < 1e-4
    for step in 0.3 * torch.cat([torch.eye(len(logs), dtype=F64), normal(20, len(logs), dtype=F64)]):
        for sign in (-1, 1):
            trial = (logs.detach() + sign * step).exp()
            assert float(found.log_marginal_likelihood(trial[0], trial[1:].reshape(noise.shape))) < best


def test_noise_alone_leaves_the_prior_where_it_is() -> None:
    found = posterior("regression", delta=0.02)
    values = by_evidence(found, tune=("sigma_noise",), num_steps=100)
    assert values.prior_precision == 0.02
    slope = central_difference(
        lambda s: float(found.log_marginal_likelihood(None, scalar(s))), float(values.sigma_noise)
    )
    assert abs(slope) < 1e-4
    assert values.loss == -float(found.log_marginal_likelihood(scalar(0.02), values.sigma_noise))


def test_without_features_the_noise_is_that_of_the_residuals() -> None:
    """σ_c² = Σ (y − f)² / NT."""
    found = posterior("regression", rank=0, sigma=(1.0, 1.0, 1.0), temperature=2.0)
    _, noise = evidence_noise(found, with_prior=False)
    wanted = (torch.tensor([30.0, 60.0, 90.0], dtype=F64) / (NUM_DATA * 2.0)).sqrt()
    torch.testing.assert_close(noise, wanted, rtol=1e-6, atol=0)


def test_noise_that_cannot_be_tuned_is_refused() -> None:
    with pytest.raises(InputError, match="a classification, which has no observation noise"):
        evidence_noise(posterior())
    with pytest.raises(InputError, match=r"meets all 40 training targets exactly.*method='gradient'"):
        evidence_noise(posterior("regression", loss=0.0))


# ---------------------------------------------------------------- grid


def held_out(likelihood: str = "classification", num_outputs: int = 3, *, spread: float = 1.0) -> list[HeldOut]:
    """Two batches of unequal size, of labels that are less sure than the outputs."""
    outputs = 3 * normal(60, num_outputs, seed=2, dtype=F64)
    features = normal(60, num_outputs, M, seed=3, dtype=F64)
    generator = torch.Generator().manual_seed(4)
    if likelihood == "regression":
        labels = outputs + spread * torch.randn(60, num_outputs, generator=generator, dtype=F64)
    elif num_outputs == 1:
        labels = torch.bernoulli((outputs[:, 0] / 2).sigmoid(), generator=generator).long()
    else:
        labels = (outputs / 2).softmax(-1).multinomial(1, generator=generator)[:, 0]
    parts = ([t[:45] for t in (outputs, features, labels)], [t[45:] for t in (outputs, features, labels)])
    return [HeldOut(*part) for part in parts]


def predictions(found: Posterior, batches: Sequence[HeldOut], link: Any, noise: Tensor | None) -> list[Prediction]:
    noise_var = found.sigma_noise.reshape(-1).square() if found.likelihood == "regression" else None
    return [
        Prediction(b.outputs, b.features @ found.factor, found.likelihood, link, noise=noise, noise_var=noise_var)
        for b in batches
    ]


def mean_nll(found: Posterior, batches: Sequence[HeldOut], link: Any = "probit", noise: Tensor | None = None) -> float:
    """The NLL of the predictions that this posterior makes."""
    pairs = zip(predictions(found, batches, link, noise), batches, strict=True)
    return -float(torch.cat([p.log_prob(b.labels) for p, b in pairs]).mean())


@pytest.mark.filterwarnings("ignore:the best prior precision")
@pytest.mark.parametrize(
    ("likelihood", "link"),
    [("classification", "probit"), ("classification", "mc"), ("classification", "bridge"), ("regression", "probit")],
)
def test_losses_of_a_grid_are_those_of_the_posterior_set_to_it(likelihood: Any, link: Any) -> None:
    found, grid, noise = posterior(likelihood, sigma=0.8), [1e-4, 0.03, 0.3, 3.0, 1e4], normal(M, 16, dtype=F64)
    batches = held_out(likelihood, spread=2.0)
    before = found.factor
    best, losses = grid_prior_precision(found, batches, grid, link=link, noise=noise)
    assert found.factor is before
    wanted = []
    for delta in grid:
        found.configure(prior_precision=scalar(delta))
        wanted.append(mean_nll(found, batches, link, noise))
    assert losses == pytest.approx(wanted, rel=1e-10)
    assert best == grid[min(range(5), key=wanted.__getitem__)]


def test_a_best_point_on_the_edge_is_told() -> None:
    options: dict[str, Any] = {"link": "probit", "noise": normal(M, 4, dtype=F64)}
    with pytest.warns(UserWarning, match=r"best prior precision, 10, lies on the edge of the grid \(10 to 1e\+03\)"):
        best, _ = grid_prior_precision(posterior(), held_out(), [10.0, 100.0, 1000.0], **options)
    assert best == 10.0
    assert grid_prior_precision(posterior(), held_out(), [10.0], **options)[0] == 10.0  # a grid of one has no edges


@pytest.mark.parametrize(
    ("grid", "loss", "message"),
    [
        ([], None, "empty grid.*grid_size of at least 1"),
        ([1.0, 2.0], lambda p, y: torch.full((len(y),), math.nan), "infinite or NaN for every prior precision"),
        ([1.0, 2.0], lambda p, y: torch.zeros(()), r"gave \(\) for 45 inputs; wanted a function"),
        ([1.0, 2.0], lambda p, y: 0.0, "gave float for 45 inputs"),
    ],
)
def test_a_grid_without_meaning_is_refused(grid: list[float], loss: Any, message: str) -> None:
    options = {} if loss is None else {"loss": loss}
    with pytest.raises(InputError, match=message):
        grid_prior_precision(posterior(), held_out(), grid, link="probit", noise=normal(M, 4, dtype=F64), **options)


def test_points_of_the_grid_without_a_loss_are_passed_over() -> None:
    def loss(prediction: Prediction, labels: Tensor) -> Tensor:
        size = float(prediction.var.mean())
        return torch.full((len(labels),), math.nan if size > 1 else -size)

    found = posterior()
    options: dict[str, Any] = {"link": "probit", "noise": normal(M, 4, dtype=F64), "loss": loss}
    best, losses = grid_prior_precision(found, held_out(), [1e-3, 1.0, 1e3, 1e4], **options)
    assert math.isnan(losses[0])
    assert best == min((v, d) for v, d in zip(losses, (1e-3, 1.0, 1e3, 1e4), strict=True) if not math.isnan(v))[1]


# ---------------------------------------------------------------- gradient

TUNABLE = [
    ("classification", 3, ("prior_precision",)),
    ("classification", 1, ("prior_precision",)),
    ("classification", 3, ("temperature",)),
    ("classification", 1, ("temperature",)),
    ("classification", 3, ("prior_precision", "temperature")),
    ("classification", 1, ("prior_precision", "temperature")),
    ("regression", 3, ("sigma_noise",)),
    ("regression", 3, ("prior_precision", "sigma_noise")),
    ("regression", 3, ("prior_precision", "temperature", "sigma_noise")),
]


def set_to(found: Posterior, values: dict[str, float]) -> None:
    found.configure(
        prior_precision=scalar(values["prior_precision"]),
        temperature=values["temperature"],
        sigma_noise=scalar(values["sigma_noise"]),
    )


@pytest.mark.parametrize(("likelihood", "num_outputs", "tune"), TUNABLE)
def test_the_gradient_ends_where_the_held_out_nll_is_least(
    likelihood: Any, num_outputs: int, tune: tuple[str, ...]
) -> None:
    batches = held_out(likelihood, num_outputs, spread=1.7)
    found = posterior(likelihood, sigma=0.5, delta=5.0)
    start = mean_nll(found, batches)
    chosen = by_gradient(found, batches, tune=tune)
    values = {name: float(getattr(chosen, name)) for name in ("prior_precision", "temperature", "sigma_noise")}
    before = {"prior_precision": 5.0, "temperature": 1.0, "sigma_noise": 0.5}
    for name, value in before.items():
        assert (values[name] == pytest.approx(value, rel=1e-12)) == (name not in tune)
    set_to(found, values)
    best = mean_nll(found, batches)
    assert best < start - 1e-3
    assert chosen.loss == pytest.approx(best, abs=2e-4)  # with the faint pull to the start in it
    for name in tune:

        def nll(value: float, name: str = name) -> float:
            trial = posterior(likelihood, sigma=0.5)
            set_to(trial, {**values, name: value})
            return mean_nll(trial, batches)

        assert abs(central_difference(nll, values[name])) < 1e-3
        assert min(nll(values[name] * factor) for factor in (0.5, 0.8, 1.25, 2.0)) > best - 5e-5


def test_the_noise_that_is_there_is_found() -> None:
    batches = held_out("regression", spread=0.8)
    found = posterior("regression", sigma=0.05, delta=1e8)  # no variance but the noise
    residuals = torch.cat([b.labels - b.outputs for b in batches])
    chosen = by_gradient(found, batches, tune=("sigma_noise",))
    assert float(chosen.sigma_noise) == pytest.approx(float(residuals.square().mean().sqrt()), rel=1e-3)


def test_a_search_begins_where_it_is_told() -> None:
    batches = held_out()
    for init in (1e-3, 1.0, 1e3):
        chosen = by_gradient(
            posterior(delta=0.7), batches, tune=("prior_precision",), init_prior_precision=scalar(init)
        )
        assert chosen.prior_precision == pytest.approx(
            by_gradient(posterior(), batches, tune=("prior_precision",)).prior_precision, rel=0.02
        )
    untouched = by_gradient(
        posterior(delta=0.7), batches, tune=("prior_precision",), num_steps=0, init_prior_precision=scalar(3.0)
    )
    assert untouched.prior_precision == pytest.approx(3.0, rel=1e-12)


# ---------------------------------------------------------------- through ScaLLA


def network(num_outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp(num_outputs).double()


def fitted(likelihood: Any = "classification", **options: Any) -> ScaLLA:
    model = network()
    x = normal(NUM_DATA, 2, dtype=F64)
    y = torch.arange(NUM_DATA) % 3 if likelihood == "classification" else normal(NUM_DATA, 3, seed=7, dtype=F64)
    la = ScaLLA(model, likelihood, num_features=33, surrogate=JacobianFeatures(model), **options)
    return la.fit(loader(x, y, 16), num_steps=0)


def validation(likelihood: str = "classification") -> Any:
    """Labels half as sure as the network, or a little further from it than its noise: δ has a best value."""
    x = normal(60, 2, seed=21, dtype=F64) * 3
    f = network()(x).detach()
    if likelihood == "regression":
        return loader(x, f + 1.5 * normal(60, 3, seed=22, dtype=F64), 25)
    return loader(x, (f / 2).softmax(-1).multinomial(1, generator=torch.Generator().manual_seed(23))[:, 0], 25)


def test_the_evidence_sets_prior_and_noise() -> None:
    la = fitted("regression", sigma_noise=torch.tensor([0.1, 1.0, 10.0]))
    before = float(la.log_marginal_likelihood())
    assert la.optimize_prior_precision("marglik", tune=("prior_precision", "sigma_noise")) is la
    tuned = float(la.log_marginal_likelihood())
    assert tuned > before
    assert la.sigma_noise.shape == (3,)
    assert la.temperature == 1.0
    for factor in (0.7, 1.4):
        assert float(la.log_marginal_likelihood(prior_precision=la.prior_precision * factor)) < tuned
        for output in range(3):
            sigma = la.sigma_noise.clone()
            sigma[output] *= factor
            assert float(la.log_marginal_likelihood(sigma_noise=sigma)) < tuned


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("method", ["gridsearch", "gradient"])
def test_held_out_data_set_the_prior(method: str, likelihood: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"grid_size": 161} if method == "gridsearch" else {}

    def nll(la: ScaLLA) -> float:
        total = torch.cat([-la.predict(x, n_samples=0).log_prob(y) for x, y in validation(likelihood)])
        return float(total.mean())

    la = fitted(likelihood, prior_precision=300.0)
    la.optimize_prior_precision(method=method, val_loader=validation(likelihood), verbose=True, **options)
    assert capsys.readouterr().out == f"prior precision {float(la.prior_precision):.4g}\n"
    best = nll(la)
    for other in torch.logspace(-3.9, 3.9, 8).tolist():
        la.prior_precision = other
        assert nll(la) > best - 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "guess"}, "method='guess'; choose one of marglik, gridsearch, gradient"),
        ({"method": "gridsearch"}, "method='gridsearch' without val_loader"),
        ({"method": "gradient", "val_loader": []}, "val_loader is empty"),
        ({"method": "gradient", "val_loader": validation(), "link_approx": "mc"}, "minimises the NLL of the probit"),
        ({"method": "gradient", "val_loader": validation(), "tune": ("sigma_noise",)}, "no observation noise"),
        ({"method": "gradient", "val_loader": validation(), "tune": ()}, r"tune=\(\).*the gradient can choose from"),
        ({"tune": ("temperature",)}, "the evidence can choose from prior_precision, sigma_noise"),
        ({"tune": ("sigma_noise",)}, "no observation noise"),
        ({"prior_structure": "layerwise"}, "a layer-wise or diagonal prior cannot exist here"),
        ({"init_prior_prec": -1.0}, "init_prior_prec=-1.0"),
        ({"pred_type": "nn"}, "pred_type='nn'"),
        (
            {"method": "gradient", "val_loader": [(torch.full((2, 2), math.nan), torch.zeros(2))]},
            "NaN or infinite values in the inputs of val_loader",
        ),
    ],
)
def test_what_cannot_be_tuned_is_refused_and_nothing_set(options: Any, message: str) -> None:
    la = fitted()
    with pytest.raises(InputError, match=message):
        la.optimize_prior_precision(**options)
    assert float(la.prior_precision) == 1.0
    assert la.temperature == 1.0


def test_one_noise_for_each_output_is_the_evidences_to_tune() -> None:
    la = fitted("regression", sigma_noise=torch.ones(3))
    with pytest.raises(InputError, match=r"tunes one sigma_noise.*method='marglik'"):
        la.optimize_prior_precision(method="gradient", val_loader=validation("regression"), tune=("sigma_noise",))
