"""The surrogate's training: the loss it steps on, the schedule, record, early stop, callback and what a fit reaches."""

from __future__ import annotations

import io
import math
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cases import loader, mlp, normal
from oracles import dense_jacobian, pairwise_matching_loss
from scalla import InputError, ScaLLA
from scalla.features import FeatureMap
from scalla.functional import FrozenNetwork, select_parameters
from scalla.jvp import JacobianProduct
from scalla.kernel_loss import GramSums, matching_loss
from scalla.probes import draw_probe, mix_seed
from scalla.training import (
    HistoryEntry,
    TrainingSettings,
    TrainingState,
    estimate_target_scale,
    learning_rate,
)

NUM = 10


def network(num_outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp(num_outputs).double()


def data(num: int = NUM, *, seed: int = 5) -> DataLoader[Any]:
    return loader(normal(num, 2, seed=seed, dtype=torch.float64), torch.arange(num) % 3, num)


def fitted(**options: Any) -> ScaLLA:
    settings = {"num_steps": 40, "lr": 1e-2, **options}
    return ScaLLA(network(), num_features=6).fit(settings.pop("train_loader", data()), **settings)


def probed(model: nn.Module, x: Tensor, *, seed: int, num_probes: int) -> Tensor:
    """J(x) v of the first step's directions, (B, C, S), from the dense Jacobian."""
    params = {k: p.detach() for k, p in model.named_parameters()}
    draws = [draw_probe(params, kind="rademacher", seed=seed, step=0, index=s) for s in range(num_probes)]
    return dense_jacobian(model, x) @ torch.stack([torch.cat([v.flatten() for v in d.values()]) for d in draws], -1)


# ---------------------------------------------------------------- the loss


@pytest.mark.parametrize(("bias", "groups"), [(False, (0, 0, 0)), (True, (0, 1, 2))])
@pytest.mark.parametrize("num_probes", [1, 3])
def test_the_first_steps_loss_is_the_pairwise_definition(bias: bool, groups: tuple[int, ...], num_probes: int) -> None:
    """Of the training data and two contexts of other sizes, in the scale that the fit itself chose."""
    model = network()
    x = normal(NUM, 2, dtype=torch.float64)
    contexts = [normal(4, 2, seed=8, dtype=torch.float64) + 2, normal(7, 2, seed=9, dtype=torch.float64) - 3]
    la = ScaLLA(model, num_features=6, seed=3)
    la.fit(data(), [DataLoader(c, batch_size=len(c)) for c in contexts], bias,
           num_steps=1, num_probes=num_probes)  # fmt: skip
    start = FeatureMap(model, {}, num_outputs=3, num_features=6)
    start.build("mirror", x, {}, seed=3)
    assert la.feature_map is not None
    scale = la.feature_map.scale
    features = [start.raw(block).detach() for block in (x, *contexts)]
    targets = [probed(model, block, seed=3, num_probes=num_probes) / scale for block in (x, *contexts)]
    wanted = pairwise_matching_loss(features, targets, groups)
    assert [entry.loss for entry in la.history] == [pytest.approx(float(wanted), rel=1e-9)]


def test_the_first_step_is_adams_along_the_gradient_of_that_loss() -> None:
    model, x = network(), normal(NUM, 2, dtype=torch.float64)
    la = ScaLLA(model, num_features=6).fit(data(), num_steps=1, lr=1e-3, schedule="constant")
    start = FeatureMap(model, {}, num_outputs=3, num_features=6)
    start.build("mirror", x, {}, seed=0)
    assert la.feature_map is not None
    assert la.surrogate is not None
    targets = probed(model, x, seed=0, num_probes=1) / la.feature_map.scale
    loss = pairwise_matching_loss([start.raw(x)], [targets], [0])
    weights = start.trainable()
    gradients = torch.autograd.grad(loss, weights)
    for before, gradient, after in zip(weights, gradients, la.surrogate.parameters(), strict=True):
        step = 1e-3 * gradient / (gradient.abs() + 1e-8)  # Adam's first: the sign of the gradient, but for ε
        torch.testing.assert_close(after, before - step, rtol=1e-9, atol=1e-12)


def test_the_scale_is_the_root_of_the_kernels_mean_diagonal() -> None:
    model, x = network(), normal(200, 2, dtype=torch.float64)
    plain = FrozenNetwork(model)
    params = select_parameters(plain, "all", x)
    found = estimate_target_scale([x], JacobianProduct(plain, params, x), TrainingSettings())
    jacobian = dense_jacobian(model, x)
    assert found == pytest.approx(float(jacobian.square().sum(-1).mean().sqrt()), rel=0.3)
    draws = [draw_probe(params, kind="rademacher", seed=mix_seed(0, 17), step=s) for s in range(8)]
    flat = torch.stack([torch.cat([v.flatten() for v in d.values()]) for d in draws], -1)
    assert found == pytest.approx(float((jacobian @ flat).square().mean().sqrt()), rel=1e-9)


def test_features_are_in_the_scale_of_the_kernel_whatever_that_is() -> None:
    """The head a hundred times larger: a kernel (of the weights before it) ten thousand times larger."""
    errors = []
    for factor in (1.0, 100.0):
        model = network()
        with torch.no_grad():
            model[2].weight.mul_(factor)
        la = ScaLLA(model, num_features=12, parameters=["0.*"]).fit(data(64), num_steps=200, num_probes=8, lr=2e-2)
        errors.append(la.kernel_error(normal(20, 2, seed=3, dtype=torch.float64)).error)
    assert errors[1] == pytest.approx(errors[0], rel=1e-3)
    assert errors[0] < 0.5


# ---------------------------------------------------------------- what a fit reaches


def test_the_loss_and_the_held_out_error_fall() -> None:
    x = normal(20, 2, seed=3, dtype=torch.float64)
    probes = fitted(train_loader=data(64), num_steps=150, num_probes=8)
    assert probes.kernel_error(x).error < 0.6 * fitted(train_loader=data(64), num_steps=1).kernel_error(x).error
    # The loss against random directions has a floor; that against directed ones falls to the rank's alone.
    directed = fitted(train_loader=data(64), num_steps=150, targets="directed")
    losses = [entry.loss for entry in directed.history]
    assert losses[-1] < 0.1 * losses[0]
    assert directed.kernel_error(x).error < probes.kernel_error(x).error


@pytest.mark.parametrize(
    ("surrogate", "options"),
    [
        ("mirror", {"num_steps": 500, "num_probes": 64, "lr": 2e-2}),
        ("mirror", {"num_steps": 1000, "targets": "directed", "lr": 1e-2}),
        ("trunk", {"num_steps": 1000, "targets": "directed", "lr": 1e-2}),
    ],
    ids=["mirror, probes", "mirror, directed", "trunk, directed"],
)
def test_a_kernel_of_rank_m_or_less_is_fitted_to_a_few_per_cent(surrogate: str, options: dict[str, Any]) -> None:
    """A network of 21 weights, whose kernel has rank 21, with m = 24: there is no floor under the error."""
    model = network(1)
    assert sum(p.numel() for p in model.parameters()) == 21
    x, y = normal(256, 2, seed=3, dtype=torch.float64), normal(256, 1, seed=6, dtype=torch.float64)
    la = ScaLLA(model, "regression", num_features=24, surrogate=surrogate)
    la.fit(loader(x, y, 32, shuffle=True), **options)
    found = la.kernel_error(normal(60, 2, seed=4, dtype=torch.float64))
    assert found.floor < 1e-12
    assert found.error < 0.05


# ---------------------------------------------------------------- schedule


def test_the_rate_rises_then_follows_a_cosine_to_a_hundredth() -> None:
    settings = TrainingSettings(num_steps=1000, lr=0.5)
    assert learning_rate(0, settings) == pytest.approx(0.5 / 50)
    assert learning_rate(24, settings) == pytest.approx(0.25)
    assert learning_rate(50, settings) == pytest.approx(0.5)
    assert learning_rate(525, settings) == pytest.approx(0.5 * (0.01 + 0.99 * 0.5))
    assert learning_rate(1000, settings) == pytest.approx(0.5 * 0.01)
    rates = [learning_rate(step, settings) for step in range(50, 1000)]
    assert rates == sorted(rates, reverse=True)
    constant = TrainingSettings(num_steps=1000, lr=0.5, schedule="constant")
    assert {learning_rate(step, constant) for step in range(50, 1000)} == {0.5}
    assert learning_rate(24, constant) == pytest.approx(0.25)
    assert learning_rate(0, TrainingSettings(num_steps=1, lr=0.5)) == pytest.approx(0.5)
    assert learning_rate(10_000, TrainingSettings(num_steps=100_000, lr=0.5)) < 0.5
    assert learning_rate(50, TrainingSettings(num_steps=100_000, lr=0.5)) == pytest.approx(0.5 * 51 / 100)


# ---------------------------------------------------------------- record, callback, progress


def test_the_history_has_step_mean_loss_rate_and_seconds() -> None:
    la = fitted(num_steps=90, schedule="constant")
    assert [entry.step for entry in la.history] == list(range(2, 91, 2))
    assert all(isinstance(entry, HistoryEntry) and math.isfinite(entry.loss) for entry in la.history)
    assert {entry.lr for entry in la.history[5:]} == {1e-2}
    seconds = [entry.seconds for entry in la.history]
    assert seconds == sorted(seconds)
    assert all(entry.kernel_score is None for entry in la.history)
    every_step = fitted(num_steps=30, schedule="constant").history
    assert [entry.step for entry in every_step] == list(range(1, 31))


def test_entries_average_the_steps_since_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[float] = []

    def recorded(sums: GramSums) -> Tensor:
        loss = matching_loss(sums)
        losses.append(float(loss.detach()))
        return loss

    monkeypatch.setattr("scalla.training.matching_loss", recorded)
    history = fitted(num_steps=125).history
    assert [entry.step for entry in history] == [*range(3, 125, 3), 125]
    for before, entry in zip([0, *(e.step for e in history)], history, strict=False):
        assert entry.loss == pytest.approx(sum(losses[before : entry.step]) / (entry.step - before), rel=1e-12)


def test_the_callback_sees_every_entry_and_may_stop() -> None:
    seen: list[HistoryEntry] = []

    def callback(entry: HistoryEntry) -> bool:
        seen.append(entry)
        return entry.step == 12

    la = fitted(callback=callback)
    assert seen == la.history
    assert [entry.step for entry in seen] == list(range(1, 13))
    assert la.n_data == NUM  # the precision is summed all the same
    assert fitted(callback=lambda entry: None).history[-1].step == 40


def test_an_error_in_the_callback_leaves_the_earlier_fit() -> None:
    la = fitted()
    x = normal(5, 2, dtype=torch.float64)
    before = la.predict(x)

    def callback(entry: HistoryEntry) -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        la.fit(data(seed=9), num_steps=10, callback=callback)
    after = la.predict(x)
    assert torch.equal(after.probs, before.probs)
    assert torch.equal(after.var, before.var)
    assert la.history[-1].step == 40


def test_progress_is_shown_when_asked_for_alone() -> None:
    quiet, loud = io.StringIO(), io.StringIO()
    with redirect_stderr(quiet):
        fitted()
    with redirect_stderr(loud):
        fitted(progress_bar=True)
    assert quiet.getvalue() == ""
    shown = loud.getvalue()
    assert "kernel: 100%" in shown
    assert "40/40" in shown
    assert "loss " in shown
    assert "rate " in shown
    assert "precision: 100%" in shown


# ---------------------------------------------------------------- held-out score and early stop


def test_the_held_out_score_estimates_the_kernel_error() -> None:
    held = data(60, seed=4)
    la = fitted(train_loader=data(64), num_steps=100, num_probes=4, val_loader=held, score_every=25)
    scores = {entry.step: entry.kernel_score for entry in la.history if entry.kernel_score is not None}
    assert list(scores) == [26, 50, 76, 100]
    exact = la.kernel_error(held.dataset.tensors[0]).error  # type: ignore[attr-defined]
    assert scores[100] == pytest.approx(exact, rel=0.25)
    assert scores[100] < scores[26]


def test_scoring_changes_nothing_of_the_fit() -> None:
    without = fitted()
    scored = fitted(val_loader=data(30, seed=4), score_every=5)
    assert [e.loss for e in scored.history] == [e.loss for e in without.history]
    assert torch.equal(scored.posterior_precision, without.posterior_precision)


def test_the_score_follows_the_bias() -> None:
    """With contexts the held-out inputs of each are a group; the biased target is another one."""
    context = normal(16, 2, seed=8, dtype=torch.float64) + 1
    scores = [
        fitted(context=context, bias=bias, val_loader=data(30, seed=4), callback=lambda entry: True, score_every=1)
        .history[0]
        .kernel_score
        for bias in (False, True)
    ]
    assert None not in scores
    assert scores[0] != scores[1]


def test_it_stops_when_the_score_no_longer_improves() -> None:
    held = data(30, seed=4)
    la = fitted(num_steps=400, lr=1.0, schedule="constant", val_loader=held, score_every=10, patience=3)
    scores = [entry.kernel_score for entry in la.history if entry.kernel_score is not None]
    assert la.history[-1].step < 400
    assert len(scores) >= 4
    assert min(scores[:-3]) <= min(scores[-3:])
    assert la.n_data == NUM
    patient = fitted(num_steps=40, val_loader=held, score_every=10, patience=40)
    assert patient.history[-1].step == 40


def test_early_stop_wants_held_out_inputs() -> None:
    with pytest.raises(InputError, match="patience without val_loader; early stopping needs held-out inputs"):
        fitted(patience=2)


# ---------------------------------------------------------------- settings and state


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": -1}, "num_steps=-1; wanted a whole number of at least 0"),
        ({"num_steps": 1.5}, "num_steps=1.5; wanted a whole number"),
        ({"num_probes": 0}, "num_probes=0; wanted a whole number of at least 1"),
        ({"score_every": 0}, "score_every=0; wanted a whole number of at least 1"),
        ({"patience": 0}, "patience=0; wanted a whole number of at least 1"),
        ({"lr": 0.0}, "lr=0.0; wanted a positive learning rate"),
        ({"lr": -1e-3}, "lr=-0.001; wanted a positive learning rate"),
        ({"lr": math.nan}, "lr=nan; wanted a positive learning rate"),
        ({"lr": math.inf}, "lr=inf; wanted a positive learning rate"),
        ({"lr": "fast"}, "lr='fast'; wanted a positive learning rate"),
        ({"schedule": "linear"}, "schedule='linear'; choose 'cosine' or 'constant'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fitted(**options)


def test_the_state_survives_json() -> None:
    entries = [HistoryEntry(3, 0.1, 1e-3, 0.5, 0.9), HistoryEntry(4, 0.2, 1e-3, 0.6)]
    state = TrainingState(4, [(0, 2), (1, 3)], entries, 1.5, 0.25, 2, 0.9, 1, True)
    assert TrainingState.from_json(state.to_json()) == state


def test_a_loss_that_is_not_finite_stops_the_fit() -> None:
    """Data that do not lie in memory are seen as they come: a NaN in a later batch."""
    x = normal(NUM, 2, dtype=torch.float64)
    y = torch.arange(NUM) % 3
    bad = x.clone()
    bad[3, 1] = math.nan
    with pytest.raises(
        InputError, match=r"the matching loss became nan by step 2.*Check the data for NaN, or lower lr"
    ):
        fitted(train_loader=[(x, y), (bad, y)])


def test_features_that_do_not_depend_on_the_weights_are_refused() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 18, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).detach().view(-1, 3, 6)

    la = ScaLLA(network(), num_features=6, surrogate=Detached())
    with pytest.raises(InputError, match=r"do not depend on its weights .*num_steps=0 to use it as it is"):
        la.fit(data(), num_steps=3)
    assert la.fit(data(), num_steps=0).n_data == NUM
