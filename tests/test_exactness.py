"""With the exact Jacobians as features ScaLLA is the linearized Laplace approximation, to rounding.

Two references in float64: `oracles.DenseLLA`, which forms and inverts every matrix, and laplace-torch's FullLaplace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import loader, mlp, normal
from laplace_reference import fit_quietly, full_laplace
from oracles import DenseLLA, JacobianFeatures, dense_ggn, dense_jacobian, probit_probs
from scalla import InputError, ScaLLA

NUM_DATA = 24
TIGHT = {"rtol": 1e-6, "atol": 1e-10}


@dataclass(frozen=True)
class Problem:
    likelihood: str
    num_outputs: int
    delta: float = 1.0
    temperature: float = 1.0
    sigma: float | tuple[float, ...] = 1.0

    @property
    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return mlp(self.num_outputs).double()

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        x = normal(NUM_DATA, 2, dtype=torch.float64)
        if self.likelihood == "regression":
            return x, normal(NUM_DATA, self.num_outputs, seed=7, dtype=torch.float64)
        return x, torch.randint(max(self.num_outputs, 2), (NUM_DATA,), generator=torch.Generator().manual_seed(7))

    @property
    def noise(self) -> Tensor:
        return torch.tensor(self.sigma, dtype=torch.float64)

    def unfitted(self, model: nn.Module, **options: Any) -> ScaLLA:
        settings = {
            "num_features": sum(p.numel() for p in model.parameters()),
            "surrogate": JacobianFeatures(model),
            "prior_precision": self.delta,
            "temperature": self.temperature,
            "sigma_noise": self.noise,
        }
        return ScaLLA(model, self.likelihood, **{**settings, **options})  # type: ignore[arg-type]

    def fitted(self, **options: Any) -> ScaLLA:
        return self.unfitted(self.model, **options).fit(loader(*self.data, 10), num_steps=0)

    def dense(self) -> DenseLLA:
        x, y = self.data
        model = self.model
        return DenseLLA(
            dense_jacobian(model, x),
            model(x).detach(),
            y,
            self.likelihood,
            delta=self.delta,
            sigma=self.noise,
            temperature=self.temperature,
            weights_sq_norm=sum(float(p.detach().square().sum()) for p in model.parameters()),
        )

    def laplace(self) -> Any:
        options = {"sigma_noise": self.sigma} if self.likelihood == "regression" else {}
        la = full_laplace(
            self.model, self.likelihood, prior_precision=self.delta, temperature=self.temperature, **options
        )
        return fit_quietly(la, loader(*self.data, 10))


PROBLEMS = {
    "classification": Problem("classification", 3),
    "classification, tempered": Problem("classification", 3, delta=0.03, temperature=2.5),
    "two classes": Problem("classification", 2, delta=3.0),
    "one logit": Problem("classification", 1),
    "one logit, tempered": Problem("classification", 1, delta=0.2, temperature=0.3),
    "regression, one output": Problem("regression", 1, delta=0.5, sigma=0.3),
    "regression, three outputs": Problem("regression", 3, delta=0.1, sigma=2.0),
    "regression, tempered": Problem("regression", 3, temperature=0.4, sigma=0.7),
    "regression, noise per output": Problem("regression", 3, delta=0.5, sigma=(0.2, 1.0, 3.0)),
    "regression, noise per output, tempered": Problem("regression", 3, temperature=3.0, sigma=(0.2, 1.0, 3.0)),
}
WITH_LAPLACE_TORCH = [
    name
    for name, p in PROBLEMS.items()
    if isinstance(p.sigma, float) and (p.num_outputs > 1 or p.likelihood != "classification")
]
problems = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)


def held_out_points() -> Tensor:
    return normal(6, 2, seed=11, dtype=torch.float64) * 2


@problems
def test_equals_the_dense_reference(problem: Problem) -> None:
    x, la, dense = held_out_points(), problem.fitted(), problem.dense()
    jacobians, mean = dense_jacobian(problem.model, x), problem.model(x).detach()
    torch.testing.assert_close(la.features(x), jacobians, rtol=1e-12, atol=0)
    torch.testing.assert_close(la.posterior_precision, dense.precision, **TIGHT)
    torch.testing.assert_close(la.posterior_covariance, dense.covariance, **TIGHT)
    torch.testing.assert_close(la.functional_variance(x), dense.variance(jacobians), **TIGHT)
    torch.testing.assert_close(la.functional_covariance(x), dense.joint(jacobians), **TIGHT)
    torch.testing.assert_close(la.log_marginal_likelihood(), dense.evidence(), **TIGHT)
    torch.testing.assert_close(la.log_likelihood, dense.log_likelihood(), **TIGHT)
    prediction = la.predict(x)
    torch.testing.assert_close(prediction.mean, mean, **TIGHT)
    torch.testing.assert_close(prediction.var, dense.variance(jacobians).diagonal(dim1=-2, dim2=-1), **TIGHT)
    if problem.likelihood == "regression":
        noise = problem.noise.square().expand(problem.num_outputs)
        torch.testing.assert_close(prediction.var_with_noise, prediction.var + noise, **TIGHT)
        for found, wanted in zip(la(x), (mean, dense.variance(jacobians)), strict=True):
            torch.testing.assert_close(found, wanted, **TIGHT)
        joint_mean, joint = la(x, joint=True)
        torch.testing.assert_close(joint_mean, mean.flatten(), **TIGHT)
        torch.testing.assert_close(joint, dense.joint(jacobians), **TIGHT)
    elif problem.num_outputs > 1:
        torch.testing.assert_close(la(x), probit_probs(mean, dense.variance(jacobians)), **TIGHT)
    else:
        # The sigmoid of the scaled logit, which is the softmax of it and of a logit that is always zero.
        zero = torch.zeros_like(mean)
        both = probit_probs(torch.cat([zero, mean], -1), dense.variance(jacobians).expand(-1, 2, 2))
        torch.testing.assert_close(la(x), both[:, 1:], **TIGHT)


@pytest.mark.parametrize("name", WITH_LAPLACE_TORCH)
def test_equals_laplace_torch(name: str) -> None:
    problem = PROBLEMS[name]
    x, la, theirs = held_out_points(), problem.fitted(), problem.laplace()
    with torch.no_grad():
        _, variance = theirs._glm_predictive_distribution(x)
        _, joint = theirs._glm_predictive_distribution(x, joint=True)
    torch.testing.assert_close(la.functional_variance(x), variance, **TIGHT)
    torch.testing.assert_close(la.functional_covariance(x), joint, **TIGHT)
    torch.testing.assert_close(la.posterior_precision, theirs.posterior_precision, **TIGHT)
    torch.testing.assert_close(la.log_marginal_likelihood(), theirs.log_marginal_likelihood().squeeze(), **TIGHT)
    if problem.likelihood == "classification":
        torch.testing.assert_close(la(x), theirs(x), **TIGHT)
    for delta in (0.01, 30.0):
        la.prior_precision, theirs.prior_precision = delta, delta
        with torch.no_grad():
            _, variance = theirs._glm_predictive_distribution(x)
        torch.testing.assert_close(la.functional_variance(x), variance, **TIGHT)
        torch.testing.assert_close(la.log_marginal_likelihood(), theirs.log_marginal_likelihood().squeeze(), **TIGHT)


@problems
def test_settings_may_be_changed_after_the_fit(problem: Problem) -> None:
    """As if they had been what they are from the start."""
    la = problem.unfitted(problem.model, prior_precision=7.0, temperature=1.7)
    if problem.likelihood == "regression":
        la.sigma_noise = 0.9
    la.fit(loader(*problem.data, 10), num_steps=0)
    la.prior_precision, la.temperature = problem.delta, problem.temperature
    if problem.likelihood == "regression":
        la.sigma_noise = problem.noise
    x, wanted = held_out_points(), problem.fitted()
    torch.testing.assert_close(la.functional_variance(x), wanted.functional_variance(x), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(la.log_marginal_likelihood(), wanted.log_marginal_likelihood(), rtol=1e-12, atol=0)


@problems
def test_update_in_pieces_equals_one_fit(problem: Problem) -> None:
    x, y = problem.data
    whole = problem.fitted()
    la = problem.unfitted(problem.model).fit(loader(x[:7], y[:7], 3), num_steps=0)
    la.update(loader(x[7:8], y[7:8]))
    la.fit(loader(x[8:], y[8:], 5), override=False)
    assert la.n_data == whole.n_data == NUM_DATA
    torch.testing.assert_close(la.posterior_precision, whole.posterior_precision, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(la.log_marginal_likelihood(), whole.log_marginal_likelihood(), rtol=1e-12, atol=0)
    points = held_out_points()
    torch.testing.assert_close(
        la.functional_variance(points), whole.functional_variance(points), rtol=1e-10, atol=1e-12
    )


@problems
def test_forget_undoes_update(problem: Problem) -> None:
    x, y = problem.data
    la = problem.unfitted(problem.model).fit(loader(x[:15], y[:15]), num_steps=0)
    points = held_out_points()
    before, evidence = la.functional_variance(points), la.log_marginal_likelihood()
    la.update(loader(x[15:], y[15:]))
    assert not torch.allclose(la.functional_variance(points), before, rtol=1e-3)
    la.forget(loader(x[15:], y[15:], 2))
    assert la.n_data == 15
    torch.testing.assert_close(la.functional_variance(points), before, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(la.log_marginal_likelihood(), evidence, rtol=1e-10, atol=0)


@problems
def test_with_everything_forgotten_the_prior_is_left(problem: Problem) -> None:
    la, points = problem.fitted(), held_out_points()
    la.forget(loader(*problem.data, 5))
    assert la.n_data == 0
    jacobians = dense_jacobian(problem.model, points)
    prior = torch.stack([j @ j.T for j in jacobians]) / problem.delta
    torch.testing.assert_close(la.functional_variance(points), prior, rtol=1e-10, atol=0)


def test_what_was_never_given_cannot_be_forgotten() -> None:
    problem = PROBLEMS["classification"]
    la = problem.fitted()
    before = la.posterior_precision
    far = torch.full((3, 2), 10.0, dtype=torch.float64), torch.zeros(3, dtype=torch.long)
    with pytest.raises(InputError, match="does not hold them"):
        la.forget(loader(*far))
    with pytest.raises(InputError, match=r"forget 48 inputs, but the posterior of 24"):
        la.forget([problem.data, problem.data])
    assert la.n_data == NUM_DATA
    assert torch.equal(la.posterior_precision, before)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", ["classification, tempered", "one logit", "regression, noise per output"])
def test_samples_have_the_functional_covariance(name: str) -> None:
    """L Lᵀ, not LᵀL: the factor of the covariance has the right side out. 20,000 samples, 5 % in Frobenius norm."""
    problem = PROBLEMS[name]
    la, x = problem.fitted(), held_out_points()
    samples = la.functional_samples(x, 20_000, torch.Generator().manual_seed(5))
    mean = problem.model(x).detach()
    error = (samples.mean(0) - mean).abs() / (la.predict(x).var / 20_000).sqrt()
    assert float(error.max()) < 5
    for i, wanted in enumerate(la.functional_variance(x)):
        assert relative_error(torch.cov(samples[:, i].T).reshape(wanted.shape), wanted) < 0.05
    assert relative_error(torch.cov(samples.flatten(1).T), la.functional_covariance(x)) < 0.05


def test_the_weights_of_the_samples_have_the_posterior_covariance() -> None:
    la = PROBLEMS["classification, tempered"].fitted()
    weights = la.sample(20_000, torch.Generator().manual_seed(5))
    assert weights.shape == (20_000, la.num_features)
    assert relative_error(torch.cov(weights.T), la.posterior_covariance) < 0.05


@pytest.mark.parametrize("name", ["classification", "one logit", "regression, three outputs"])
def test_samples_are_coherent_across_batches(name: str) -> None:
    """One draw is one function: evaluated in pieces, in another order, by another call, it is the same one."""
    la, x = PROBLEMS[name].fitted(), held_out_points()
    whole = la.functional_samples(x, 50)
    pieces = torch.cat([la.functional_samples(part, 50) for part in x.split([1, 3, 2])], 1)
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-14)
    functions = la.function_sampler(50, torch.Generator().manual_seed(3))
    torch.testing.assert_close(functions(x.flip(0)).flip(1), functions(x), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(
        functions(x), la.functional_samples(x, 50, torch.Generator().manual_seed(3)), rtol=1e-12, atol=1e-14
    )
    torch.testing.assert_close(la.functional_samples(x, 20), whole[:20], rtol=1e-12, atol=1e-14)


def test_cross_covariance_is_a_block_of_the_joint_one() -> None:
    la, x = PROBLEMS["classification"].fitted(), held_out_points()
    joint = la.functional_covariance(x)
    torch.testing.assert_close(la.functional_covariance(x[:2], x[2:]), joint[:6, 6:], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(la.functional_covariance(x[2:], x[:2]), joint[6:, :6], rtol=1e-12, atol=1e-14)


@problems
def test_weight_space_equals_function_space(problem: Problem) -> None:
    """The Gaussian process view: Σ(x, x') = K_xx' − K_xX (K_XX + Λ⁻¹)⁻¹ K_Xx', with K = J Jᵀ / δ and Λ the data's.

    Λ = diag(p) − ppᵀ has no inverse: by Woodbury, K − K L (I + Lᵀ K L)⁻¹ Lᵀ K with Λ/T = L Lᵀ.
    """
    x, _ = problem.data
    points, model = held_out_points(), problem.model
    train, test = (dense_jacobian(model, t).flatten(0, 1) for t in (x, points))
    outputs = model(x).detach()
    identity = torch.eye(problem.num_outputs, dtype=torch.float64).expand(NUM_DATA, -1, -1)
    blocks = [
        dense_ggn(eye[None], f[None], problem.likelihood, problem.noise)
        for eye, f in zip(identity, outputs, strict=True)
    ]
    values, vectors = torch.linalg.eigh(torch.block_diag(*blocks) / problem.temperature)
    root = vectors * values.clamp_min(0).sqrt()
    k_tt, k_tx, k_xx = (a @ b.T / problem.delta for a, b in ((test, test), (test, train), (train, train)))
    inner = torch.eye(len(root), dtype=torch.float64) + root.T @ k_xx @ root
    wanted = k_tt - k_tx @ root @ torch.linalg.solve(inner, root.T @ k_tx.T)
    torch.testing.assert_close(problem.fitted().functional_covariance(points), wanted, rtol=1e-6, atol=1e-9)


def test_linear_regression_has_its_closed_form() -> None:
    """A network that is linear in its weights: features (x, 1), Σ = (XᵀX/σ² + δI)⁻¹, evidence of the Gaussian y."""
    model = nn.Linear(3, 1).double()
    x = normal(30, 3, dtype=torch.float64)
    y = (
        x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
        + 0.3
        + 0.1 * normal(30, 1, seed=8, dtype=torch.float64)
    )
    delta, sigma = 0.7, 0.4
    design = torch.cat([x, torch.ones(30, 1, dtype=torch.float64)], -1)
    precision = design.T @ design / sigma**2 + delta * torch.eye(4, dtype=torch.float64)
    best = torch.linalg.solve(precision, design.T @ y / sigma**2)
    with torch.no_grad():  # the network is at the maximum a posteriori, where Laplace is exact
        model.weight.copy_(best[:3].T)
        model.bias.copy_(best[3])
    la = ScaLLA(
        model, "regression", surrogate=JacobianFeatures(model), num_features=4, prior_precision=delta, sigma_noise=sigma
    ).fit(loader(x, y), num_steps=0)
    torch.testing.assert_close(la.posterior_precision, precision, rtol=1e-10, atol=1e-12)
    points = normal(5, 3, seed=12, dtype=torch.float64)
    rows = torch.cat([points, torch.ones(5, 1, dtype=torch.float64)], -1)
    mean, variance = la(points)
    torch.testing.assert_close(mean, rows @ best, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        variance[:, 0, 0], (rows @ torch.linalg.inv(precision) * rows).sum(-1), rtol=1e-10, atol=0
    )
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(30, dtype=torch.float64), design @ design.T / delta + sigma**2 * torch.eye(30, dtype=torch.float64)
    )
    torch.testing.assert_close(la.log_marginal_likelihood(), marginal.log_prob(y[:, 0]), rtol=1e-10, atol=0)


def test_a_subset_of_the_weights_is_laplace_over_that_subset() -> None:
    problem = PROBLEMS["classification"]
    model, (x, y) = problem.model, problem.data
    names = ["2.weight", "2.bias"]
    la = ScaLLA(
        model, surrogate=JacobianFeatures(model, names), num_features=18, parameters="last_layer", prior_mean=0.1
    )
    la.fit(loader(x, y), num_steps=0)
    assert la.n_params == 18
    last = [p for n, p in model.named_parameters() if n in names]
    dense = DenseLLA(
        dense_jacobian(model, x, names), model(x).detach(), y, "classification",
        weights_sq_norm=sum(float((p.detach() - 0.1).square().sum()) for p in last),
    )  # fmt: skip
    points = held_out_points()
    torch.testing.assert_close(
        la.functional_variance(points), dense.variance(dense_jacobian(model, points, names)), **TIGHT
    )
    torch.testing.assert_close(la.log_marginal_likelihood(), dense.evidence(), **TIGHT)
