"""MFVI: a mean-field Gaussian over all weights, fine-tuned from the trained ones (BayesAdapter)."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm.auto import tqdm

from scalla.baselines.minibatch import check_settings, count_inputs, endless, pointwise_nll
from scalla.functional import FrozenNetwork, Params
from scalla.predictive import Prediction
from scalla.types import InputError, Inputs, Likelihood, Loader, NotFittedError


@final
class MFVI:
    """q(θ) = Π_i N(μ_i, σ_i²) over every weight of the network, started at μ = θ* (Deng & Zhu 2023).

    Minimises, with prior p(θ) = N(0, δ⁻¹ I) and the likelihood averaged over the batch,

        E_q[ mean −log p(y | f_θ(x)) ] + KL(q ‖ p) / N,
        KL = ½ Σ_i [ δ(σ_i² + μ_i²) − 1 − log(δ σ_i²) ].

    The prior is in the KL and nowhere else: there is no weight decay besides. The expectation is estimated by
    θ = μ + σ∘ε with `num_draws` draws of ε a step, each shared by the whole batch: unbiased, and the one
    estimator that works whatever the layers are. Adam on μ (`lr`) and on log σ (`lr_log_std`), both rates on
    a cosine to zero, without which log σ would end as noisy as a rate of 0.1 leaves it. μ must keep up with
    the widening σ: a rate much below 5e-3 ends with a worse value of this objective (see `history`). The
    loader decides the batch size (published: 100).

    Dropout is off and BatchNorm stays on its running statistics, in training as in prediction.
    `predict` averages the softmax over `n_samples` draws of *all* weights, each shared by all inputs, so that
    a prediction does not depend on the batch it is in. (The published evaluation draws weights anew for every
    input; at one input the two have the same distribution.)
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood = "classification",
        *,
        seed: int = 0,
        prior_precision: float = 1.0,
        init_std: float = 1e-3,
        num_steps: int = 8_000,
        lr: float = 5e-3,
        lr_log_std: float = 0.1,
        num_draws: int = 1,
        sigma_noise: float = 1.0,
    ) -> None:
        check_settings(likelihood, prior_precision=prior_precision, init_std=init_std, sigma_noise=sigma_noise)
        self.network = FrozenNetwork(copy.deepcopy(model).requires_grad_(False))
        self.likelihood = likelihood
        self.seed = seed
        self.prior_precision = prior_precision
        self.init_std = init_std
        self.num_steps = num_steps
        self.lr = lr
        self.lr_log_std = lr_log_std
        self.num_draws = num_draws
        self.sigma_noise = sigma_noise
        #: μ and log σ by the name of the weight, from `fit`
        self.mean: Params | None = None
        self.log_std: Params | None = None
        #: the objective at every step, in nats an input
        self.history: list[float] = []

    def fit(self, train_loader: Loader, *, context: Loader | None = None, progress_bar: bool = False) -> MFVI:
        """Fine-tune μ and σ; `context` is no business of this method."""
        generator = torch.Generator().manual_seed(self.seed)
        num_inputs = count_inputs(train_loader)
        named = {k: p for k, p in self.network.twin.named_parameters() if p.is_floating_point()}
        mean = {k: p.detach().clone().requires_grad_() for k, p in named.items()}
        log_std = {k: torch.full_like(p, math.log(self.init_std)).requires_grad_() for k, p in named.items()}
        self.history = []
        optimizer = torch.optim.Adam(
            [
                {"params": [*mean.values()], "lr": self.lr},
                {"params": [*log_std.values()], "lr": self.lr_log_std},
            ]
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(self.num_steps, 1))
        batches = endless(train_loader, seed=self.seed)
        for _ in tqdm(range(self.num_steps), desc="MFVI", disable=not progress_bar):
            x, y = next(batches)
            network_at = self.network.at(x)
            kl = torch.stack([kl_to_prior(mean[k], log_std[k], self.prior_precision) for k in mean]).sum()
            loss = kl / num_inputs
            for _ in range(self.num_draws):
                outputs = network_at(draw_weights(mean, log_std, generator))
                nll = pointwise_nll(outputs, y, self.likelihood, self.sigma_noise**2)
                loss = loss + nll.mean() / self.num_draws
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            self.history.append(loss.item())
        self.mean = {k: p.detach() for k, p in mean.items()}
        self.log_std = {k: p.detach() for k, p in log_std.items()}
        return self

    @torch.no_grad()
    def predict(self, x: Inputs, *, n_samples: int = 20, generator: torch.Generator | None = None) -> Prediction:
        """`n_samples` networks drawn from q, the same ones for every x unless a generator is given.

        Each costs a forward pass: the default is the published 20.
        """
        if self.mean is None or self.log_std is None:
            raise NotFittedError("MFVI has no posterior yet: call fit(train_loader) first")
        if n_samples < 1:
            raise InputError(f"got n_samples={n_samples}; MFVI predicts by samples alone and needs at least one")
        if generator is None:
            generator = torch.Generator().manual_seed(self.seed)
        network_at = self.network.at(x)
        draws = [network_at(draw_weights(self.mean, self.log_std, generator)) for _ in range(n_samples)]
        prediction = Prediction.from_samples(torch.stack(draws), self.likelihood)
        if self.likelihood == "regression":
            return replace(prediction, noise_var=prediction.mean.new_tensor([self.sigma_noise**2]))
        return prediction


def kl_to_prior(mean: Float[Tensor, "*P"], log_std: Float[Tensor, "*P"], prior_precision: float) -> Float[Tensor, ""]:
    """KL( N(μ, diag σ²) ‖ N(0, δ⁻¹ I) ) = ½ Σ [ δ(σ² + μ²) − 1 − log δ − 2 log σ ]."""
    second_moment = (2 * log_std).exp() + mean.square()
    return 0.5 * (prior_precision * second_moment - 1 - math.log(prior_precision) - 2 * log_std).sum()


def draw_weights(mean: Params, log_std: Params, generator: torch.Generator) -> Params:
    """θ = μ + σ∘ε, ε ~ N(0, I) from the generator, weight by weight in the network's order."""
    weights = {}
    for name, mu in mean.items():
        noise = torch.randn(mu.shape, generator=generator, device=generator.device, dtype=mu.dtype)
        weights[name] = mu + log_std[name].exp() * noise.to(mu.device)
    return weights
