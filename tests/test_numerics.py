"""Nothing fails to be positive definite: extremes of scale, rank, number and shape, alone and together."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cases import loader, normal
from oracles import pairwise_matching_loss
from scalla import InputError, Prediction, ScaLLA
from scalla.kernel_loss import gram_sums, matching_loss
from scalla.predictive import LINKS, SCORES, ood_score
from scalla.types import NumericalWarning

F64 = torch.float64
#: short, and the same examples each time
quickly = settings(derandomize=True, max_examples=40, deadline=None, database=None)


class Features(nn.Module):
    """Features of a given size, fixed: x → scale · tanh(W x + b)."""

    def __init__(self, num_outputs: int, num_features: int, *, scale: float = 1.0, equal_rows: bool = False) -> None:
        super().__init__()
        self.shape, self.scale = (num_outputs, num_features), scale
        rows = normal(*self.shape, 3, seed=2, dtype=F64)
        self.register_buffer("weight", rows[:1].expand_as(rows).clone() if equal_rows else rows)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * torch.einsum("cmi,bi->bcm", self.weight.to(x), x).tanh()


def network(num_outputs: int, *, logits: float = 1.0) -> nn.Module:
    """Outputs of about this size."""
    model = nn.Linear(3, num_outputs)
    with torch.no_grad():
        model.weight.copy_(logits * normal(num_outputs, 3, seed=3))
        model.bias.zero_()
    return model


def fitted(
    *,
    likelihood: Any = "classification",
    num_outputs: int = 3,
    num_features: int = 4,
    num_data: int = 12,
    logits: float = 1.0,
    scale: float = 1.0,
    equal_rows: bool = False,
    one_class: bool = False,
    dtype: torch.dtype = F64,
    **options: Any,
) -> ScaLLA:
    x = normal(num_data, 3, dtype=dtype)
    y = normal(num_data, num_outputs, seed=7, dtype=dtype)
    if likelihood == "classification":
        y = torch.zeros(num_data, dtype=torch.long) if one_class else torch.arange(num_data) % max(num_outputs, 2)
    surrogate = Features(num_outputs, num_features, scale=scale, equal_rows=equal_rows)
    model = network(num_outputs, logits=logits).to(dtype)
    la = ScaLLA(model, likelihood, num_features=num_features, surrogate=surrogate, **options)
    return la.fit(loader(x, y, 5), num_steps=0)


def points(dtype: torch.dtype = F64) -> Tensor:
    return normal(6, 3, seed=11, dtype=dtype)


def check_all(la: ScaLLA, x: Tensor) -> None:
    """Everything that can be asked is finite, and what is bounded keeps its bounds."""
    prediction = la.predict(x, n_samples=8)
    precise = torch.finfo(x.dtype).eps * 16
    for name in ("mean", "var", "cov", "gaussian_entropy"):
        assert bool(torch.isfinite(getattr(prediction, name)).all()), name
    assert bool((prediction.var >= 0).all())
    assert bool(torch.isfinite(la.functional_samples(x, 8)).all())
    assert bool(torch.isfinite(la.log_marginal_likelihood()))
    assert bool(torch.isfinite(la.posterior_covariance).all())
    if la.likelihood == "regression":
        assert bool(torch.isfinite(prediction.log_prob(prediction.mean + 1)).all())
        return
    for link in LINKS:
        check_probabilities(la.predict(x, link_approx=link, n_samples=8), precise)
    for score in SCORES:
        if score != "gaussian_entropy_projected" or la.n_outputs > 1:
            assert bool(torch.isfinite(ood_score(prediction, score)).all()), score


def check_probabilities(found: Prediction, precise: float) -> None:
    classes = max(found.mean.shape[-1], 2)
    labels = torch.arange(len(found)) % classes
    assert bool(torch.isfinite(found.probs).all() & (found.probs >= 0).all() & (found.probs <= 1 + precise).all())
    if classes == found.mean.shape[-1]:
        assert float((found.probs.sum(-1) - 1).abs().max()) <= precise
    assert bool(torch.isfinite(found.log_probs).all())
    assert bool(torch.isfinite(found.log_prob(labels)).all() & (found.log_prob(labels) <= precise).all())
    assert bool((found.entropy >= 0).all() & (found.entropy <= math.log(classes) + precise).all())
    assert bool((found.mutual_information >= 0).all() & (found.mutual_information <= math.log(classes) + precise).all())


def jitter_alone(caught: list[warnings.WarningMessage]) -> bool:
    """Whatever was warned of is jitter, with its size."""
    return all(issubclass(w.category, NumericalWarning) and "added jitter of up to" in str(w.message) for w in caught)


@quickly
@given(
    likelihood=st.sampled_from(["classification", "regression"]),
    num_outputs=st.sampled_from([1, 2, 3, 10]),
    num_features=st.sampled_from([1, 4, 16]),
    num_data=st.sampled_from([1, 2, 12]),
    exponent_of_prior=st.integers(-12, 12),
    exponent_of_scale=st.integers(-6, 6),
    logits=st.sampled_from([0.0, 1.0, 1e4]),
    equal_rows=st.booleans(),
    one_class=st.booleans(),
    dtype=st.sampled_from([torch.float32, F64, torch.bfloat16]),
)
def test_every_extreme_with_every_other(exponent_of_prior: int, exponent_of_scale: int, **options: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        la = fitted(prior_precision=10.0**exponent_of_prior, scale=10.0**exponent_of_scale, **options)
        check_all(la, points(options["dtype"]))
    assert jitter_alone(caught), [str(w.message) for w in caught]


@pytest.mark.parametrize("delta", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("num_outputs", [1, 3])
def test_saturated_logits_say_nothing(num_outputs: int, delta: float) -> None:
    """±1e4: p is 0 or 1 but for e^−200 and less, so that Λ = 0, H has rank 0 and the prior is left."""
    la = fitted(num_outputs=num_outputs, logits=1e4, prior_precision=delta)
    assert float(la.posterior.ggn.abs().max()) < 1e-80  # type: ignore[union-attr]
    prior = torch.stack([g @ g.T for g in la.features(points())]) / delta
    torch.testing.assert_close(la.functional_variance(points()), prior, rtol=1e-12, atol=0)
    assert bool(torch.isfinite(la.log_marginal_likelihood()))


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3, 1e6])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_the_scale_of_the_features_is_that_of_the_prior(likelihood: Any, scale: float) -> None:
    """g → s g with δ → s² δ changes nothing: s g (s² H + s² δ)⁻¹ s gᵀ."""
    wanted = fitted(likelihood=likelihood, prior_precision=0.3)
    found = fitted(likelihood=likelihood, prior_precision=0.3 * scale**2, scale=scale)
    torch.testing.assert_close(
        found.functional_variance(points()), wanted.functional_variance(points()), rtol=1e-9, atol=0
    )
    torch.testing.assert_close(found.log_det_ratio, wanted.log_det_ratio, rtol=1e-10, atol=0)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_duplicate_inputs_are_as_many_data(likelihood: Any) -> None:
    """The same input k times: k H, of the same rank."""
    x, y = normal(1, 3, dtype=F64), torch.zeros(1, dtype=torch.long)
    if likelihood == "regression":
        y = normal(1, 3, seed=7, dtype=F64)
    model, surrogate = network(3).double(), Features(3, 16)
    once, often = (
        ScaLLA(model, likelihood, num_features=16, surrogate=surrogate, prior_precision=1e-9).fit(
            [(x.repeat(count, 1), y.repeat(count, *[1] * (y.ndim - 1)))], num_steps=0
        )
        for count in (1, 1000)
    )
    torch.testing.assert_close(often.posterior.ggn, 1000 * once.posterior.ggn)  # type: ignore[union-attr]
    ranks = [int((la.posterior.eigenvalues > 0).sum()) for la in (once, often)]  # type: ignore[union-attr]
    assert ranks == [2, 2] if likelihood == "classification" else [3, 3]
    across = torch.linalg.eigh(often.posterior.ggn.sum(0))[1][:, :13]  # type: ignore[union-attr]
    torch.testing.assert_close(
        across.mT @ often.posterior_covariance @ across, torch.eye(13, dtype=F64) * 1e9, rtol=1e-6, atol=1e3
    )
    check_all(often, points())


def test_duplicate_outputs_are_jittered_with_a_warning() -> None:
    """Two outputs with the same features: a covariance of rank 1 that no Cholesky takes."""
    la = fitted(equal_rows=True, num_features=16)
    with pytest.warns(NumericalWarning, match=r"3 dimensions .* jitter of up to \d\.\de-\d+, 1e-\d+ times .* 6 of 6"):
        entropy = la.predict(points()).gaussian_entropy
    assert bool(torch.isfinite(entropy).all())
    assert bool((entropy < fitted(num_features=16).predict(points()).gaussian_entropy).all())


@pytest.mark.parametrize("delta", [1e-12, 1e-6, 1.0, 1e12])
def test_fewer_data_than_features_leave_the_rest_at_the_prior(delta: float) -> None:
    """One input, C = 1: Σ = (u uᵀ h + δ)⁻¹ has 1/(h + δ) along g and 1/δ across it."""
    la = fitted(likelihood="regression", num_outputs=1, num_data=1, num_features=6, prior_precision=delta)
    g = la.features(normal(1, 3, dtype=F64))[0, 0]
    h, u = float(g @ g), g / g.norm()
    across = torch.linalg.svd(u[None], full_matrices=True)[2][1:]
    covariance = la.posterior_covariance
    assert float(across[0] @ covariance @ across[0]) == pytest.approx(1 / delta, rel=1e-6)
    torch.testing.assert_close(
        across @ covariance @ across.mT, torch.eye(5, dtype=F64) / delta, rtol=1e-6, atol=1e-6 / delta
    )
    # What rounding of the eigenvectors lets in of the other directions is (1e-16)² / δ.
    assert float(la.functional_variance(normal(1, 3, dtype=F64))) == pytest.approx(
        h / (h + delta), rel=1e-8, abs=1e-28 / delta
    )


@quickly
@given(
    num_outputs=st.sampled_from([1, 2, 5]),
    num_features=st.integers(1, 12),
    num_data=st.integers(1, 8),
    exponent=st.integers(-12, 12),
    likelihood=st.sampled_from(["classification", "regression"]),
)
def test_data_never_widen_a_variance(exponent: int, **options: Any) -> None:
    """Σ ≼ prior, in every direction and at every scale."""
    delta = 10.0**exponent
    la = fitted(prior_precision=delta, **options)
    prior = torch.stack([g @ g.T for g in la.features(points())]) / delta
    slack = torch.linalg.eigvalsh(prior - la.functional_variance(points()))[:, 0]
    size = torch.linalg.matrix_norm(prior, 2)
    assert bool((slack >= -1e-12 * size).all())


@quickly
@given(
    sizes=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=3),
    num_outputs=st.sampled_from([1, 3]),
    num_features=st.integers(1, 4),
    num_probes=st.integers(1, 3),
    exponents=st.tuples(st.integers(-6, 6), st.integers(-6, 6)),
    dtype=st.sampled_from([torch.float32, F64]),
)
def test_the_gram_identity_at_every_scale(
    sizes: list[tuple[int, int]],
    num_outputs: int,
    num_features: int,
    num_probes: int,
    exponents: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    """Blocks of any size and group: to rounding of the larger of ‖GGᵀ‖² and ‖ZZᵀ‖²."""
    (of_features, of_targets), groups = exponents, [group for _, group in sizes]
    features, targets = (
        [10.0**e * normal(b, num_outputs, last, seed=seed + i, dtype=F64).to(dtype) for i, (b, _) in enumerate(sizes)]
        for e, last, seed in ((of_features, num_features, 20), (of_targets, num_probes, 70))
    )
    found = matching_loss(gram_sums(list(zip(features, targets, groups, strict=True))))
    wanted = pairwise_matching_loss([g.double() for g in features], [z.double() for z in targets], groups)
    rows = sum(len(g) for g in features) * num_outputs
    size = sum(float(t.double().square().sum()) for t in (*features, *targets)) ** 2 / rows**2
    assert abs(float(found) - float(wanted)) <= 100 * torch.finfo(dtype).eps * size


def test_a_singular_matrix_in_any_shape_is_jittered_and_told() -> None:
    """One input alone, two inputs, C beyond m, and the projected entropy of two equal outputs."""
    for num_outputs, num_inputs in ((2, 1), (2, 4), (5, 1)):
        factor = torch.zeros(num_inputs, num_outputs, num_outputs, dtype=F64)
        factor[..., 0] = 1  # Σ = 11ᵀ, exactly
        found = Prediction(torch.zeros(num_inputs, num_outputs, dtype=F64), factor)
        with pytest.warns(NumericalWarning, match=f"{num_inputs} of {num_inputs} matrices"):
            assert bool(torch.isfinite(found.gaussian_entropy).all())
        with pytest.warns(NumericalWarning, match="added jitter"):
            assert bool(torch.isfinite(found.gaussian_entropy_projected).all())


def test_features_beyond_the_range_of_their_type_are_refused() -> None:
    with pytest.raises(InputError, match=r"features are NaN or infinite.*wider dtype"):
        fitted(scale=1e39, dtype=torch.float32)
