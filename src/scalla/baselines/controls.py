"""Controls, so that nobody fools themselves: what a score must beat before it says anything."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scalla.baselines.jacobians import factored_jacobians
from scalla.baselines.layer_factors import kernel_within
from scalla.batches import context_loaders, inputs_of
from scalla.functional import FrozenNetwork
from scalla.predictive import psd_logdet
from scalla.types import InputError, Inputs, Loader, NotFittedError


@final
class ContextClassifier:
    """log p(context | x) / p(train | x) of a small classifier of context against training inputs.

    It sees what the biased posterior sees (inputs of both kinds) and nothing of the network. A CNN for inputs
    (B, channels, height, width), an MLP for others; trained on as many of either kind a batch, with Adam,
    until the loss on a held-out tenth has not improved for `patience` epochs; the best epoch is kept.
    """

    def __init__(
        self,
        *,
        num_epochs: int = 20,
        patience: int = 3,
        batch_size: int = 128,
        lr: float = 1e-3,
        max_steps_an_epoch: int = 500,
        seed: int = 0,
    ) -> None:
        self.num_epochs = num_epochs
        self.patience = patience
        self.batch_size = batch_size
        self.lr = lr
        self.max_steps_an_epoch = max_steps_an_epoch
        self.seed = seed
        self.held_out_losses: list[float] = []
        self._classifier: nn.Module | None = None

    def fit(self, train_loader: Loader, *, context: Any = None, progress_bar: bool = False) -> ContextClassifier:
        """Train on the inputs of both; labels play no part. Both are held in memory."""
        if context is None:
            raise InputError("ContextClassifier tells context from training inputs; give context=...")
        generator = torch.Generator().manual_seed(self.seed)
        sources = context_loaders(context, context_batch_size=self.batch_size)
        with torch.random.fork_rng(devices=[]):
            # Loaders that shuffle draw from the global state: the split must be a function of the seed.
            torch.manual_seed(self.seed)
            kinds = [_all_inputs(train_loader, "train_loader")]
            kinds += [torch.cat([_all_inputs(source, "context").to(kinds[0]) for source in sources])]
        if min(len(x) for x in kinds) < 2 or kinds[0].shape[1:] != kinds[1].shape[1:]:
            raise InputError(
                f"got training inputs {tuple(kinds[0].shape)} and context inputs {tuple(kinds[1].shape)}; "
                "wanted at least two of each, of one shape"
            )
        held, kept = [], []
        for x in kinds:
            order = torch.randperm(len(x), generator=generator).to(x.device)
            num_held = max(1, len(x) // 10)
            held.append(x[order[:num_held]])
            kept.append(x[order[num_held:]])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            classifier = small_classifier(kinds[0]).to(kinds[0])
        self._scale = (kept[0].mean(), kept[0].std().clamp_min(1e-12))
        self._train(classifier, kept, held, generator)
        return self

    def _train(self, classifier: nn.Module, kept: list[Tensor], held: list[Tensor], generator: torch.Generator) -> None:
        optimizer = torch.optim.Adam(classifier.parameters(), lr=self.lr)
        half = max(1, self.batch_size // 2)
        steps = min(max(1, min(len(x) for x in kept) // half), self.max_steps_an_epoch)
        best, best_loss, waited = copy.deepcopy(classifier), float("inf"), 0
        self.held_out_losses = []
        for _ in range(self.num_epochs):
            for _ in range(steps):
                rows = [torch.randint(len(x), (half,), generator=generator).to(x.device) for x in kept]
                loss = self._loss(classifier, [x[r] for x, r in zip(kept, rows, strict=True)])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                held_loss = float(self._loss(classifier, held))
            self.held_out_losses.append(held_loss)
            waited += 1
            if held_loss < best_loss:
                best, best_loss, waited = copy.deepcopy(classifier), held_loss, 0
            if waited >= self.patience:
                break
        self._classifier = best.requires_grad_(False)

    def score(self, x: Inputs) -> Float[Tensor, " B"]:
        """The logit of being context."""
        if self._classifier is None:
            raise NotFittedError("ContextClassifier is not trained yet; call fit(train_loader, context=...) first")
        return self._logits(self._classifier, _tensor(x)).double()

    def _loss(self, classifier: nn.Module, kinds: Iterable[Tensor]) -> Float[Tensor, ""]:
        """Cross-entropy, averaged within each kind first, so that neither outweighs the other."""
        logits = [self._logits(classifier, x) for x in kinds]
        return torch.stack([nn.functional.softplus(s * f).mean() for s, f in zip((1, -1), logits, strict=True)]).mean()

    def _logits(self, classifier: nn.Module, x: Tensor) -> Float[Tensor, " B"]:
        mean, spread = self._scale
        return torch.cat([classifier((part.to(mean) - mean) / spread)[:, 0] for part in x.split(1024)])


@final
class PriorScore:
    """log det K(x, x) or tr K(x, x) of the exact NTK block K(x, x) = J(x) J(x)ᵀ ∈ R^{C×C}: no data at all.

    The Gaussian score of the posterior at an input far from all data is this, up to a constant.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        statistic: Literal["logdet", "trace"] = "logdet",
        max_jacobian_elements: int = 2**26,
    ) -> None:
        if statistic not in ("logdet", "trace"):
            raise InputError(f"got statistic={statistic!r}; choose 'logdet' or 'trace'")
        self._network = FrozenNetwork(model)
        self.statistic = statistic
        self.max_jacobian_elements = max_jacobian_elements

    def fit(self, train_loader: Loader, *, context: Loader | None = None, progress_bar: bool = False) -> PriorScore:
        """Nothing to fit."""
        return self

    def score(self, x: Inputs) -> Float[Tensor, " B"]:
        """Exact Jacobians over all weights, a few inputs at a time; sums and determinants in float64."""
        inputs = self._network.prepare(_tensor(x))
        assert isinstance(inputs, Tensor)
        params = {k: p.detach() for k, p in self._network.twin.named_parameters() if p.is_floating_point()}
        per_input = self._network(inputs[:1]).shape[-1] * sum(p.numel() for p in params.values())
        scores = []
        for part in inputs.split(max(1, self.max_jacobian_elements // per_input)):
            kernel = kernel_within([f.double() for f in factored_jacobians(self._network, params, part)])
            trace = kernel.diagonal(dim1=-2, dim2=-1).sum(-1)
            scores.append(trace if self.statistic == "trace" else psd_logdet(kernel))
        return torch.cat(scores)


@final
class Brightness:
    """The mean of x over all its entries."""

    def fit(self, train_loader: Loader, *, context: Loader | None = None, progress_bar: bool = False) -> Brightness:
        """Nothing to fit."""
        return self

    def score(self, x: Inputs) -> Float[Tensor, " B"]:
        return _tensor(x).double().flatten(1).mean(-1)


def small_classifier(x: Float[Tensor, "N ..."]) -> nn.Module:
    """One logit: two convolutions and a hidden layer for images, two hidden layers for anything else."""
    if x.ndim == 4:
        return nn.Sequential(
            nn.Conv2d(x.shape[1], 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(512, 64),
            nn.ReLU(),
            nn.Linear(64, 1),
        )
    width = x[0].numel()
    return nn.Sequential(
        nn.Flatten(), nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
    )


def _all_inputs(loader: Loader, name: str) -> Float[Tensor, "N ..."]:
    parts = [_tensor(inputs_of(batch)) for batch in loader]
    if not parts:
        raise InputError(f"{name} is empty; wanted at least one batch")
    return torch.cat(parts)


def _tensor(x: Inputs) -> Tensor:
    if not isinstance(x, Tensor):
        raise InputError(f"got inputs of type {type(x).__name__}; the controls take tensors only")
    return x
