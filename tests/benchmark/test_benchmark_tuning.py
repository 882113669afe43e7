"""The `tuned` protocol: which trial wins, how often is fitted, and that nothing is chosen on test data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from made_methods import BrightnessDetector, GaussianMethod
from tiny_images import tiny_images
from torch import Tensor, nn

from scalla.baselines.map import MAP
from scalla.benchmark.images import Images
from scalla.benchmark.measure import outputs_of, scores_of
from scalla.benchmark.methods import ROWS
from scalla.benchmark.methods.row import Problem, Row, seeded_fit
from scalla.benchmark.tuning import choose_score, fit_row, tune_row
from scalla.metrics import auroc, nll
from scalla.types import InputError

BEST = 0.6
SETTINGS = {"width": 1.0, "num_steps": 10, "num_samples": 8}


class Counting:
    """A method whose held-out NLL is least at width BEST; it keeps what it was fitted with and asked of."""

    fits: list[Mapping[str, Any]]

    def __init__(self) -> None:
        self.fits, self.asked = [], list[Tensor]()

    def fit(self, problem: Problem, settings: Mapping[str, Any]) -> GaussianMethod:
        self.fits.append(dict(settings))
        method = GaussianMethod()
        right = method.weight

        def predict(x: Tensor, *, n_samples: int = 1, generator: Any = None, inner: Any = method.predict) -> Any:
            self.asked.append(x)
            method.weight = right * (1 + abs(method.width - BEST))  # type: ignore[attr-defined]
            return inner(x, n_samples=n_samples)

        method.width = settings["width"]  # type: ignore[attr-defined]
        method.predict = predict  # type: ignore[method-assign, assignment]
        return method


def row_of(counting: Counting, **options: Any) -> Row:
    trials = tuple({"width": w} for w in (0.1, BEST, 5.0))
    return Row("made", "Made", counting.fit, settings=SETTINGS, trials=trials, **options)


def set_width(method: Any, settings: Mapping[str, Any]) -> None:
    method.width = settings["width"]


@pytest.fixture
def images() -> Images:
    return tiny_images()


def problem_of(images: Images) -> Problem:
    return Problem(nn.Identity(), images.train, images.context, seed=1)


def labels_of_the_method(images: Images) -> Images:
    """Labels that the method's own mean gives: every logit times more makes the NLL smaller or larger, not random."""
    assert images.validation is not None
    x, _ = images.validation
    return replace(images, validation=(x, (x.double().flatten(1) @ GaussianMethod().weight).argmin(-1)))


def test_the_least_nll_on_the_validation_images_wins_and_is_fitted_in_full(images: Images) -> None:
    images, counting = labels_of_the_method(images), Counting()
    found = tune_row(row_of(counting, trial={"num_steps": 3}), problem_of(images), images, SETTINGS)
    assert found.settings == {**SETTINGS, "width": BEST}
    assert [(f["width"], f["num_steps"]) for f in counting.fits] == [(0.1, 3), (BEST, 3), (5.0, 3), (BEST, 10)]
    assert images.validation is not None
    x, y = images.validation
    for trial in found.trials:
        tried = Counting().fit(problem_of(images), {"width": trial["width"]})
        assert trial["value"] == pytest.approx(nll(outputs_of(tried, x, num_samples=8).probs, y))
    assert min(found.trials, key=lambda t: t["value"])["width"] == BEST
    assert found.fit_time.wall > 0
    assert found.tuning_time.wall > 0


def test_settings_after_the_fit_cost_no_further_fit(images: Images) -> None:
    images, counting = labels_of_the_method(images), Counting()
    row = row_of(counting, after_fit=frozenset({"width"}), reconfigure=set_width)
    found = tune_row(row, problem_of(images), images, SETTINGS)
    assert len(counting.fits) == 1
    assert (found.method.width, found.settings["width"]) == (BEST, BEST)


def test_a_trial_is_never_longer_than_the_run_itself(images: Images) -> None:
    counting = Counting()
    tune_row(row_of(counting, trial={"num_steps": 99}), problem_of(images), images, SETTINGS)
    assert {f["num_steps"] for f in counting.fits} == {10}


def test_nothing_is_chosen_on_test_images(images: Images) -> None:
    counting = Counting()
    tuned = tune_row(row_of(counting), problem_of(images), images, SETTINGS)
    choose_score(tuned.method, images, SETTINGS)
    assert images.validation is not None
    assert images.context_held_out is not None
    allowed = {image.numpy().tobytes() for image in torch.cat([images.validation[0], images.context_held_out])}
    seen = {image.numpy().tobytes() for x in counting.asked for image in x}
    assert seen <= allowed
    assert len(seen) == len(allowed)


def test_without_trials_there_is_one_fit(images: Images) -> None:
    counting = Counting()
    row = Row("made", "Made", counting.fit, settings=SETTINGS)
    found = tune_row(row, problem_of(images), images, SETTINGS)
    assert len(counting.fits) == 1
    assert (found.settings, found.trials) == (SETTINGS, [])


def test_marginal_likelihood_comes_after_the_fit(images: Images) -> None:
    row = replace(row_of(Counting()), marglik=lambda method: setattr(method, "width", 7.0))
    assert fit_row(row, problem_of(images), {**SETTINGS, "marglik": True}).method.width == 7.0
    assert fit_row(row, problem_of(images), SETTINGS).method.width == 1.0


def test_detectors_are_chosen_by_the_held_out_context(images: Images) -> None:
    class Signed(BrightnessDetector):
        def __init__(self, sign: float) -> None:
            self.sign = sign

        def score(self, x: Tensor) -> Tensor:
            return self.sign * super().score(x)

    trials = ({"sign": 1.0}, {"sign": -1.0})
    row = Row("made", "Made", lambda _, s: Signed(s["sign"]), "detector", trials=trials)
    found = tune_row(row, problem_of(images), images, {"num_samples": 0})
    assert images.validation is not None
    inside, outside = (x.double().mean((1, 2, 3)) for x in (images.validation[0], images.context_held_out))
    values = {t["sign"]: t["value"] for t in found.trials}
    assert values == {1.0: -auroc(inside, outside), -1.0: -auroc(-inside, -outside)}
    assert found.settings["sign"] == min(values, key=values.__getitem__)


def test_score_that_is_chosen_is_the_best_on_the_held_out_context(images: Images) -> None:
    method = GaussianMethod()
    found = choose_score(method, images, {"num_samples": 16})
    assert images.validation is not None
    assert images.context_held_out is not None
    inside = scores_of(method, images.validation[0], num_samples=16)
    outside = scores_of(method, images.context_held_out, num_samples=16)
    assert found["held_out_auc"] == {name: auroc(inside[name], outside[name]) for name in inside}
    assert found["held_out_auc"][found["score"]] == max(found["held_out_auc"].values())


@pytest.mark.parametrize("choose", [True, False])
def test_the_paper_protocol_has_nothing_to_choose_on(choose: bool) -> None:
    images = tiny_images(tuned=False)
    call: Callable[[], object] = (
        (lambda: choose_score(GaussianMethod(), images, SETTINGS))
        if choose
        else (lambda: tune_row(row_of(Counting()), problem_of(images), images, SETTINGS))
    )
    with pytest.raises(InputError, match="the paper protocol holds nothing out"):
        call()


def test_a_shuffling_loader_is_a_function_of_the_seed(images: Images) -> None:
    def fit(problem: Problem, _: Mapping[str, Any]) -> list[int]:
        return [int(v) for _, y in problem.loader(8, shuffle=True) for v in y]

    row = Row("made", "Made", fit)  # type: ignore[arg-type]
    state = torch.get_rng_state()
    first = seeded_fit(row, problem_of(images), {})
    torch.rand(7)
    assert seeded_fit(row, problem_of(images), {}) == first
    assert seeded_fit(row, replace(problem_of(images), seed=2), {}) != first
    torch.set_rng_state(state)


def test_every_trial_names_settings_that_the_row_has() -> None:
    """A misspelt name would be tried six times without a difference."""
    for row in ROWS.values():
        known = {*row.settings, "num_samples"}
        if row.kind == "method" and row.name != "map_temperature":
            for given in (*row.trials, row.trial, row.quick, *row.variants.values()):
                assert set(given) <= known | {"marglik"}, row.name
            assert row.after_fit <= known, row.name
        assert len({tuple(sorted(t.items())) for t in row.trials}) == len(row.trials), row.name
        assert bool(row.after_fit) == (row.reconfigure is not None), row.name


def test_temperature_divides_the_logits() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    problem = Problem(model, (torch.rand(6, 4), torch.zeros(6).long()), None, seed=1)
    found = ROWS["map_temperature"].fit(problem, {"temperature": 2.0})
    assert isinstance(found, MAP)
    x = torch.rand(5, 4)
    torch.testing.assert_close(found.predict(x, n_samples=1).mean, model(x) / 2)
