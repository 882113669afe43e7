"""What the detectors read: penultimate features, logits and the last linear layer of the trained network."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from scalla.baselines.minibatch import one_pass
from scalla.functional import FrozenNetwork, batch_size, call, first_rows, logits_of, make_twin
from scalla.types import InputError, Inputs, Loader


@dataclass(frozen=True)
class Head:
    """The last linear layer, f = W φ + b, in float64."""

    weight: Float[Tensor, "C D"]
    bias: Float[Tensor, " C"]


@final
class Penultimate:
    """x → (φ(x), f(x)) in float64, φ the input of the last nn.Linear that runs, caught on a copy."""

    def __init__(self, model: nn.Module) -> None:
        # FrozenNetwork knows how this network wants its inputs; the copy is where the hooks live.
        self._frozen = FrozenNetwork(model)
        self._network = copy.deepcopy(make_twin(model))
        self._last: nn.Linear | None = None

    @torch.no_grad()
    def __call__(self, x: Inputs) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B C"]]:
        last = self._last or self._find_last(x)
        caught: list[Tensor] = []
        handle = last.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
        try:
            logits = logits_of(call(self._network, self._frozen.prepare(x)))
        finally:
            handle.remove()
        features = caught[-1]
        if features.ndim != 2:
            raise InputError(
                f"the last linear layer was given {tuple(features.shape)}; these detectors want one row of "
                "features for each input, (B, D)"
            )
        return features.double(), logits.double()

    def head(self, x: Inputs) -> Head:
        """W and b, for detectors that compute logits of features; checked to be the network's own on x."""
        features, logits = self(x)
        assert self._last is not None
        weight = self._last.weight.detach().double()
        bias = weight.new_zeros(len(weight)) if self._last.bias is None else self._last.bias.detach().double()
        ours = features @ weight.mT + bias
        if ours.shape != logits.shape or not torch.allclose(ours, logits, rtol=1e-3, atol=1e-3):
            raise InputError(
                "this detector needs f = W φ + b, but something runs after the network's last linear layer "
                "and changes its output; use 'msp', 'energy', 'knn' or 'mahalanobis'"
            )
        return Head(weight, bias)

    def labelled(self, loader: Loader) -> Iterator[tuple[Tensor, Tensor, Int[Tensor, " B"]]]:
        """(φ, f, y) batch by batch."""
        for x, y in one_pass(loader):
            features, logits = self(x)
            yield features, logits, y.reshape(-1).long().to(features.device)

    def collect(self, loader: Loader) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N C"], Int[Tensor, " N"]]:
        """φ, f and y of all the training data, in memory."""
        features, logits, labels = (torch.cat(parts) for parts in zip(*self.labelled(loader), strict=True))
        return features, logits, labels

    def _find_last(self, x: Inputs) -> nn.Linear:
        ran: list[nn.Linear] = []
        linear = [m for m in self._network.modules() if isinstance(m, nn.Linear)]
        handles = [m.register_forward_pre_hook(lambda m, _: ran.append(m)) for m in linear]
        try:
            call(self._network, self._frozen.prepare(first_rows(x, 1)))
        finally:
            for handle in handles:
                handle.remove()
        if not ran:
            raise InputError(
                f"no nn.Linear ran in {type(self._network).__name__}; this detector reads what the last "
                "linear layer is given. Use 'msp' or 'energy'"
            )
        self._last = ran[-1]
        return self._last


def first_inputs(loader: Loader, count: int = 16) -> Any:
    """The first few inputs of a loader."""
    x, _ = next(one_pass(loader))
    return first_rows(x, min(count, batch_size(x)))


@dataclass(frozen=True)
class ClassMoments:
    """Number, mean and scatter Σ (φ − μ_c)(φ − μ_c)ᵀ of the features of each class."""

    counts: Float[Tensor, " C"]
    means: Float[Tensor, "C D"]
    scatters: Float[Tensor, "C D D"]

    @property
    def mean(self) -> Float[Tensor, " D"]:
        return torch.einsum("c,cd->d", self.counts, self.means) / self.counts.sum()

    @property
    def within_cov(self) -> Float[Tensor, "D D"]:
        """Covariance about the class means, shared by all classes."""
        return self.scatters.sum(0) / self.counts.sum()

    @property
    def total_cov(self) -> Float[Tensor, "D D"]:
        """Covariance about the mean of all classes."""
        centred = self.means - self.mean
        between = torch.einsum("c,cd,ce->de", self.counts, centred, centred)
        return self.within_cov + between / self.counts.sum()


def class_moments(penultimate: Penultimate, loader: Loader) -> ClassMoments:
    """Two passes (means, then scatters), so that nothing cancels; the classes are those that occur."""
    sums: dict[int, Tensor] = {}
    counts: dict[int, int] = {}
    for features, _, labels in penultimate.labelled(loader):
        for label in labels.unique().tolist():
            rows = features[labels == label]
            sums[label] = sums.get(label, 0) + rows.sum(0)
            counts[label] = counts.get(label, 0) + len(rows)
    means = {label: total / counts[label] for label, total in sums.items()}
    scatters = {label: torch.zeros(len(m), len(m), dtype=m.dtype, device=m.device) for label, m in means.items()}
    for features, _, labels in penultimate.labelled(loader):
        for label in labels.unique().tolist():
            rows = features[labels == label] - means[label]
            scatters[label] += rows.mT @ rows
    order = sorted(means)
    return ClassMoments(
        torch.tensor([counts[c] for c in order], dtype=torch.float64, device=means[order[0]].device),
        torch.stack([means[c] for c in order]),
        torch.stack([scatters[c] for c in order]),
    )


def whitening(cov: Float[Tensor, "D D"], *, rtol: float = 1e-12) -> Float[Tensor, "D R"]:
    """W with W Wᵀ = cov⁺: directions that the training features do not span are left out."""
    values, vectors = torch.linalg.eigh(cov)
    kept = values > rtol * values[-1].clamp_min(torch.finfo(values.dtype).tiny)
    return vectors[:, kept] / values[kept].sqrt()
