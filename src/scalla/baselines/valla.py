"""VaLLA (Ortega et al. 2024): a sparse variational GP with the NTK as its kernel and the network as its mean.

Our own rather than laplace-torch's: there one iteration takes 27 s and 8 GB on the FashionMNIST network (one
core, M = B = 100, BackPACK; its default backend is slower), here 0.7 s; and its k-means is over all classes
and needs N·M·D numbers at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from scalla.baselines.jacobians import factored_jacobians, factored_selection
from scalla.baselines.laplace_torch import MAX_JACOBIAN_ELEMENTS, check_softmax, own_copy, tensor_inputs
from scalla.baselines.layer_factors import LayerFactors, kernel_between, kernel_within
from scalla.baselines.minibatch import check_settings, one_pass
from scalla.baselines.protocol import function_noise
from scalla.functional import FrozenNetwork, Params
from scalla.predictive import Prediction
from scalla.types import InputError, Inputs, Likelihood, Loader, NotFittedError


@dataclass(frozen=True)
class _State:
    """What VaLLA learns: inducing inputs z, one output of each, the factor L, log δ."""

    inputs: Float[Tensor, "M ..."]
    outputs: Int[Tensor, " M"]
    factor: Float[Tensor, "M M"]
    log_prior_precision: Float[Tensor, ""]


@final
class VaLLA:
    """f(x) ~ N(f_θ*(x), K_xx − K_xz A K_zx), K(x, x') = J(x) J(x')ᵀ / δ, with M inducing pairs (z_m, c_m).

    A = L H⁻¹ Lᵀ with H = I + Lᵀ K_z L: any L gives a covariance between 0 and the prior's. Trained are z, L
    (lower triangular, from I) and δ, by the loss

        −(N/B) Σ_b log softmax(f_b / √(1 + π/8 diag Σ_b))_{y_b} + ½ log|H| − ½ tr(K_z A)

    and for regression with the expected Gaussian log-likelihood, −½ [(y − f)² + diag Σ] / σ² − ½ log 2πσ².
    There A = (K_z + σ²I)⁻¹ at the optimum: with all training outputs as inducing pairs, the exact GP.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood = "classification",
        *,
        num_inducing: int = 100,
        num_steps: int = 15_000,
        batch_size: int = 100,
        lr: float = 1e-3,
        prior_precision: float = 1.0,
        sigma_noise: float = 1.0,
        learn_inducing: bool = True,
        learn_prior: bool = True,
        inducing: tuple[Tensor, Tensor] | None = None,
        max_jacobian_elements: int = MAX_JACOBIAN_ELEMENTS,
        seed: int = 0,
    ) -> None:
        """`inducing`: pairs (inputs, output indices) to start from, rather than k-means within each class."""
        check_settings(likelihood, prior_precision=prior_precision, sigma_noise=sigma_noise)
        if num_inducing < 1 or num_steps < 0 or batch_size < 1:
            raise InputError(
                f"got num_inducing={num_inducing}, num_steps={num_steps}, batch_size={batch_size}; "
                "wanted at least 1, 0 and 1"
            )
        self.model = model
        self.likelihood: Likelihood = likelihood
        self.num_inducing = num_inducing
        self.num_steps = num_steps
        self.batch_size = batch_size
        self.lr = lr
        self.prior_precision = prior_precision
        self.sigma_noise = sigma_noise
        self.learn_inducing = learn_inducing
        self.learn_prior = learn_prior
        self.inducing = inducing
        self.max_jacobian_elements = max_jacobian_elements
        self.seed = seed
        self.losses: list[float] = []
        self._state: _State | None = None

    def fit(self, train_loader: Loader, *, context: Loader | None = None, progress_bar: bool = False) -> VaLLA:
        """Train z, L and δ by Adam; the training inputs are held in memory (k-means needs them all)."""
        self._network = FrozenNetwork(own_copy(self.model))
        self._params: Params = {k: p.detach() for k, p in self._network.twin.named_parameters()}
        batches = list(one_pass(train_loader, seed=self.seed))
        x = torch.cat([tensor_inputs(inputs, self._network.twin) for inputs, _ in batches])
        y = torch.cat([targets for _, targets in batches]).to(x.device)
        num_outputs = self._network(x[:1]).shape[-1]
        check_softmax(num_outputs, self.likelihood)
        generator = torch.Generator().manual_seed(self.seed)
        self._state = state = self._start(x, y, generator)

        learned = [state.factor.requires_grad_(True)]
        learned += [state.inputs.requires_grad_(True)] if self.learn_inducing else []
        learned += [state.log_prior_precision.requires_grad_(True)] if self.learn_prior else []
        optimizer = torch.optim.Adam(learned, lr=self.lr)
        self.losses = []
        num_outputs, num_params = (
            self._network(x[:1]).shape[-1],
            sum(p.numel() for p in self._params.values()),
        )
        memory = state.factor.new_empty(min(self.batch_size, len(x)), num_outputs, num_params)
        steps: object = range(self.num_steps)
        if progress_bar:
            from tqdm import tqdm

            steps = tqdm(range(self.num_steps), desc="VaLLA")
        order = torch.randperm(len(x), generator=generator)
        position = 0
        for _ in steps:  # type: ignore[attr-defined]
            if position >= len(x):
                order, position = torch.randperm(len(x), generator=generator), 0
            rows = order[position : position + self.batch_size].to(x.device)
            position += self.batch_size
            optimizer.zero_grad()
            loss = self._loss(state, x[rows], y[rows], num_data=len(x), memory=memory)
            loss.backward()
            optimizer.step()
            self.losses.append(float(loss.detach()))
        for tensor in learned:
            tensor.requires_grad_(False)
        self._prepared: tuple[list[LayerFactors], Tensor] | None = None
        return self

    @property
    def fitted_prior_precision(self) -> float:
        """The prior precision that was learned."""
        return float(self._fitted().log_prior_precision.exp())

    @torch.no_grad()
    def predict(self, x: Inputs, *, n_samples: int = 100, generator: torch.Generator | None = None) -> Prediction:
        """Σ(x) in float64: it is a difference of two kernels that are much larger."""
        state = self._fitted()
        inputs = tensor_inputs(x, self._network.twin)
        scale = torch.exp(-state.log_prior_precision.double())
        if self._prepared is None:
            selected = factored_selection(self._network, self._params, state.inputs, state.outputs)
            rows = [f.double() for f in selected]
            self._prepared = rows, _root(kernel_between(rows, rows)[:, 0, :, 0] * scale, state.factor)
        rows, root = self._prepared
        mean = self._network(inputs)
        num_params = sum(p.numel() for p in self._params.values())
        chunk = max(1, self.max_jacobian_elements // (2 * mean.shape[-1] * num_params))
        covs = []
        for part in inputs.split(chunk):
            factors = [f.double() for f in factored_jacobians(self._network, self._params, part)]
            explained = kernel_between(factors, rows)[..., 0] @ root * scale
            covs.append(kernel_within(factors) * scale - explained @ explained.mT)
        noise = function_noise(mean.shape[-1], n_samples, seed=self.seed, generator=generator, like=mean)
        prediction = Prediction.from_gaussian(mean, torch.cat(covs), noise=noise, likelihood=self.likelihood)
        noise_var = mean.new_tensor([self.sigma_noise**2]) if self.likelihood == "regression" else None
        return replace(prediction, noise_var=noise_var)

    def _start(self, x: Tensor, y: Tensor, generator: torch.Generator) -> _State:
        if self.inducing is not None:
            inputs, outputs = self.inducing
            inputs, outputs = tensor_inputs(inputs, self._network.twin).clone(), outputs.to(x.device).long()
        elif self.likelihood == "classification":
            inputs, outputs = kmeans_within_classes(x, y.long(), self.num_inducing, generator)
        else:
            inputs = kmeans(x, min(self.num_inducing, len(x)), generator)
            num_outputs = self._network(x[:2]).shape[-1]
            outputs = torch.randint(num_outputs, (len(inputs),), generator=generator).to(x.device)
        factor = torch.eye(len(inputs), dtype=inputs.dtype, device=inputs.device)
        log_prior = torch.tensor(math.log(self.prior_precision), dtype=inputs.dtype, device=inputs.device)
        return _State(inputs.detach(), outputs, factor, log_prior)

    def _loss(
        self, state: _State, x: Tensor, y: Tensor, *, num_data: int, memory: Tensor | None = None
    ) -> Float[Tensor, ""]:
        mean = self._network(x).double()
        factors = factored_jacobians(self._network, self._params, x, out=memory)
        # Products over P in the network's own dtype, everything of size M in float64.
        rows = factored_selection(self._network, self._params, state.inputs, state.outputs)
        scale = torch.exp(-state.log_prior_precision.double())
        prior_var = kernel_within(factors).diagonal(dim1=1, dim2=2).double()
        kernel_z = kernel_between(rows, rows)[:, 0, :, 0].double() * scale
        kernel_xz = kernel_between(factors, rows)[..., 0].flatten(0, 1).double() * scale
        chol = _precision_chol(kernel_z, state.factor)
        half = torch.linalg.solve_triangular(chol, state.factor.double().tril().mT @ kernel_xz.mT, upper=False)
        var = prior_var * scale - half.square().sum(0).reshape(prior_var.shape)
        var = var.clamp_min(0)
        if self.likelihood == "classification":
            logits = mean / (1 + math.pi / 8 * var).sqrt()
            energy = nn.functional.cross_entropy(logits, y.long(), reduction="sum")
        else:
            noise_var = self.sigma_noise**2
            squared = (y.reshape(mean.shape).double() - mean).square() + var
            energy = 0.5 * (squared / noise_var + math.log(2 * math.pi * noise_var)).sum()
        return num_data / len(x) * energy + _kl(chol)

    def _fitted(self) -> _State:
        if self._state is None:
            raise NotFittedError("VaLLA has no posterior yet; call fit(train_loader) first")
        return self._state


def _precision_chol(kernel_z: Float[Tensor, "M M"], factor: Float[Tensor, "M M"]) -> Float[Tensor, "M M"]:
    """C with C Cᵀ = H = I + Lᵀ K_z L."""
    lower = factor.double().tril()
    eye = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
    return torch.linalg.cholesky(eye + lower.mT @ kernel_z @ lower)


def _root(kernel_z: Float[Tensor, "M M"], factor: Float[Tensor, "M M"]) -> Float[Tensor, "M M"]:
    """R = L C⁻ᵀ, so that A = R Rᵀ."""
    chol = _precision_chol(kernel_z, factor)
    return torch.linalg.solve_triangular(chol, factor.double().tril().mT, upper=False).mT


def _kl(chol: Float[Tensor, "M M"]) -> Float[Tensor, ""]:
    """½ log|H| − ½ tr(K_z A), where tr(K_z A) = tr((H − I) H⁻¹) = M − tr(H⁻¹)."""
    eye = torch.eye(len(chol), dtype=chol.dtype, device=chol.device)
    inverse = torch.linalg.solve_triangular(chol, eye, upper=False)
    return chol.diagonal().log().sum() - 0.5 * (len(chol) - inverse.square().sum())


def kmeans_within_classes(
    x: Float[Tensor, "N ..."], y: Int[Tensor, " N"], count: int, generator: torch.Generator
) -> tuple[Float[Tensor, "M ..."], Int[Tensor, " M"]]:
    """`count` centres shared out evenly among the classes, each with its class."""
    classes = y.unique().tolist()
    centres, labels = [], []
    for index, label in enumerate(classes):
        share = count // len(classes) + (index < count % len(classes))
        members = x[y == label]
        share = min(share, len(members))
        if share == 0:
            continue
        centres.append(kmeans(members, share, generator))
        labels += [label] * share
    return torch.cat(centres), torch.tensor(labels, device=x.device)


def kmeans(
    x: Float[Tensor, "N ..."], count: int, generator: torch.Generator, *, num_rounds: int = 50
) -> Float[Tensor, "M ..."]:
    """Lloyd's algorithm from `count` of the points; a centre that loses all its points stays."""
    flat = x.flatten(1)
    centres = flat[torch.randperm(len(flat), generator=generator)[:count].to(flat.device)].clone()
    nearest = None
    for _ in range(num_rounds):
        distances = [torch.cdist(part, centres) for part in flat.split(4096)]
        previous, nearest = nearest, torch.cat([d.argmin(-1) for d in distances])
        if previous is not None and torch.equal(previous, nearest):
            break
        sums = torch.zeros_like(centres).index_add_(0, nearest, flat)
        counts = nearest.bincount(minlength=count)[:, None]
        centres = torch.where(counts > 0, sums / counts.clamp_min(1), centres)
    return centres.reshape(count, *x.shape[1:])
