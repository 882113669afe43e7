"""A small network for a table, and its training: the negative log posterior, by Adam."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn
from torch.nn import functional as F

from scalla.types import Likelihood

#: σ in units of the targets' standard deviation: a network that meets every target stops here
LEAST_NOISE = 0.01


def build_mlp(num_inputs: int, num_outputs: int, *, hidden: Sequence[int], seed: int) -> nn.Sequential:
    """Layers with tanh between them, in float64."""
    widths = [num_inputs, *hidden, num_outputs]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after, dtype=torch.float64), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def train_network(
    network: nn.Module,
    x: Float[Tensor, "N ..."],
    y: Num[Tensor, "N ..."],
    *,
    likelihood: Likelihood,
    num_epochs: int,
    batch_size: int,
    lr: float,
    prior_precision: float,
    seed: int,
) -> Float[Tensor, " R"]:
    """Minimise mean −log p(y | f, σ) + δ/(2N) ‖θ‖², the rate on a cosine to zero; returns σ.

    The noise of a regression, one σ for each output, is learned beside the weights; a classification has none, and
    its σ is 1.
    """
    log_sigma = torch.zeros(y.shape[1] if likelihood == "regression" else 1, dtype=x.dtype, requires_grad=True)
    num_batches = math.ceil(len(x) / batch_size)
    weights = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam([*weights, log_sigma], lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, num_epochs * num_batches))
    network.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(num_epochs):
            # Parts of nearly one size: batch normalisation wants more than one input in each.
            for rows in torch.randperm(len(x)).tensor_split(num_batches):
                outputs = network(x[rows])
                if likelihood == "regression":
                    sigma = log_sigma.clamp_min(math.log(LEAST_NOISE)).exp()
                    loss = (0.5 * ((y[rows] - outputs) / sigma).square() + sigma.log()).sum(-1).mean()
                else:
                    loss = F.cross_entropy(outputs, y[rows])
                sq_norm = torch.stack([p.square().sum() for p in weights]).sum()
                optimizer.zero_grad()
                (loss + 0.5 * prior_precision / len(x) * sq_norm).backward()
                optimizer.step()
                schedule.step()
    network.eval().zero_grad()
    return log_sigma.detach().clamp_min(math.log(LEAST_NOISE)).exp()
