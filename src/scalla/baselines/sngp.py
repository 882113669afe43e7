"""SNGP: a network trained anew, with bounded layers and a random-feature GP in the place of its head."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm.auto import tqdm

from scalla.baselines.minibatch import check_settings, count_inputs, one_pass, pointwise_nll
from scalla.baselines.protocol import function_noise
from scalla.functional import FrozenNetwork, call, find_head, logits_of, make_twin
from scalla.predictive import Prediction, psd_cholesky
from scalla.probes import mix_seed
from scalla.types import (
    Inputs,
    Likelihood,
    Link,
    Loader,
    NotFittedError,
    UnsupportedModuleError,
)


@final
class SNGP:
    """A spectral-normalised network with a GP head (Liu et al. 2020, 2023), trained from scratch.

    **Not post hoc**: `model` gives the architecture, none of its weights is used. Its layers are initialised
    anew by their `reset_parameters`, or `build` makes the new network. So SNGP is a row of its own in a
    comparison, with an accuracy of its own.

    *Trunk.* After every step each linear and convolutional layer but the head is projected onto
    ‖W‖₂ ≤ `norm_bound`: W ← W · min(1, bound/‖W‖₂), a change only where the norm is too large. For a
    convolution ‖W‖₂ is the norm of the convolution *as an operator* on its feature maps, stride and padding
    included, not that of the reshaped kernel. One warm-started power iteration a step, and power iteration to
    convergence (an SVD for linear layers) after the last one.

    *Head.* The last linear layer becomes logits = φ(h) β with fixed orthogonal random features of a kernel,
    φ(h) = √(2/D) cos(W h/ℓ + b), E φ(h)·φ(h') = exp(−‖h − h'‖²/2ℓ²), and no bias. β has the prior
    N(0, ridge⁻¹ I), so training adds ridge/(2N) ‖β‖² to the mean cross-entropy.

    *Covariance.* The Laplace approximation of each class's own weights, in one pass after training,

        P_c = ridge · I + Σ_n p_nc (1 − p_nc) φ_n φ_nᵀ,    Var f_c(x) = φᵀ P_c⁻¹ φ:

    the exact diagonal blocks of the softmax Hessian, as in the paper. (One matrix for all classes, weights of
    one, as often run, takes every input for at least four times as informative as it can be, p(1 − p) ≤ ¼.
    The full matrix over C·D weights has 10⁸ entries at C = 10; the blocks have C·D².) Regression:
    P = ridge · I + Σ φφᵀ/σ² for all outputs.

    No statistic of any kind is updated in prediction: the network is in evaluation mode. `link="mc"` samples
    the logits, `link="probit"` is the mean-field adjustment softmax(f/√(1 + π/8 Var f)).
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood = "classification",
        *,
        seed: int = 0,
        build: Callable[[], nn.Module] | None = None,
        norm_bound: float = 6.0,
        num_features: int = 1024,
        length_scale: float = 2.0,
        ridge: float = 1.0,
        num_epochs: int = 20,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        sigma_noise: float = 1.0,
        link: Link = "mc",
    ) -> None:
        check_settings(
            likelihood, norm_bound=norm_bound, length_scale=length_scale, ridge=ridge, sigma_noise=sigma_noise
        )
        self.model = model
        self.likelihood = likelihood
        self.seed = seed
        self.build = build
        self.norm_bound = norm_bound
        self.num_features = num_features
        self.length_scale = length_scale
        self.ridge = ridge
        self.num_epochs = num_epochs
        self.lr = lr
        self.weight_decay = weight_decay
        self.sigma_noise = sigma_noise
        self.link = link
        #: the network without its last layer: x → h
        self.trunk: nn.Module | None = None
        self.head: RandomFeatureHead | None = None
        #: the bounded layers of the trunk
        self.bounds: list[SpectralBound] = []
        #: P_c of each class (one for all outputs in regression), and the inverses of their Cholesky factors
        self.precision: Float[Tensor, "C D D"] | None = None
        self._whitening: Float[Tensor, "C D D"] | None = None
        #: the trunk in evaluation mode, sharing its tensors
        self._frozen: FrozenNetwork | None = None
        #: mean training loss of every epoch
        self.history: list[float] = []

    def fit(self, train_loader: Loader, *, context: Loader | None = None, progress_bar: bool = False) -> SNGP:
        """Train a new network, then accumulate its head's precision; `context` is not for this method."""
        num_inputs = count_inputs(train_loader)
        x, _ = next(one_pass(train_loader))
        device = FrozenNetwork(self.model).device
        # Initialisation and dropout draw from the global generator: seed it, and give it back as it was.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            fresh = reinitialise(self.model) if self.build is None else self.build().to(device)
            self.trunk, last = split_head(fresh.requires_grad_(True), x)
            self._frozen = FrozenNetwork(self.trunk)
            self.head = RandomFeatureHead(last, self.num_features, self.length_scale)
            self.bounds = spectral_bounds(self.trunk, x, self.norm_bound)
            self.history = []
            self._train(train_loader, num_inputs, progress_bar)
        for bound in self.bounds:
            bound.project_exactly()
        self.trunk.eval().requires_grad_(False)
        self.head.requires_grad_(False)
        self.precision = self._accumulate_precision(train_loader)
        root = psd_cholesky(self.precision)
        eye = torch.eye(self.num_features, dtype=root.dtype, device=root.device).expand_as(root)
        whitening = torch.linalg.solve_triangular(root, eye, upper=False)
        self._whitening = whitening.to(self.head.weight.dtype)
        return self

    def _train(self, train_loader: Loader, num_inputs: int, progress_bar: bool) -> None:
        assert self.trunk is not None
        assert self.head is not None
        self.trunk.train()
        groups: list[dict[str, Any]] = [
            {"params": [*self.trunk.parameters()], "weight_decay": self.weight_decay},
            {"params": [self.head.weight]},
        ]
        optimizer = torch.optim.Adam(groups, lr=self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(self.num_epochs, 1))
        for epoch in tqdm(range(self.num_epochs), desc="SNGP", disable=not progress_bar):
            total = 0.0
            for x, y in one_pass(train_loader, seed=mix_seed(self.seed, epoch)):
                outputs = self.head(self._hidden(x))
                nll = pointwise_nll(outputs, y, self.likelihood, self.sigma_noise**2)
                loss = nll.mean() + 0.5 * self.ridge / num_inputs * self.head.weight.square().sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                for bound in self.bounds:
                    bound.project()
                total += loss.item() * len(outputs)
            schedule.step()
            self.history.append(total / num_inputs)

    @torch.no_grad()
    def _accumulate_precision(self, train_loader: Loader) -> Float[Tensor, "C D D"]:
        """ridge · I + Σ_n λ_nc φ_n φ_nᵀ in float64, λ = p(1 − p) or 1/σ²."""
        assert self.head is not None
        assert self._frozen is not None
        blocks: Tensor | None = None
        for x, _ in one_pass(train_loader):
            phi = self.head.features(self._frozen(x))
            weights = self._curvature(phi @ self.head.weight.mT).double()
            phi = phi.double()
            if blocks is None:
                eye = torch.eye(self.num_features, dtype=phi.dtype, device=phi.device)
                blocks = (self.ridge * eye).repeat(weights.shape[1], 1, 1)
            for block, weight in zip(blocks, weights.unbind(1), strict=True):
                block.addmm_((phi * weight[:, None]).mT, phi)
        assert blocks is not None
        return blocks

    def _curvature(self, outputs: Float[Tensor, "B C"]) -> Float[Tensor, "B K"]:
        if self.likelihood == "regression":
            return torch.full_like(outputs[:, :1], self.sigma_noise**-2)
        if outputs.shape[-1] == 1:
            return torch.sigmoid(outputs) * torch.sigmoid(-outputs)
        probs = outputs.softmax(-1)
        return probs * (1 - probs)

    def _hidden(self, x: Inputs) -> Float[Tensor, "B d"]:
        assert self.trunk is not None
        assert self._frozen is not None
        return logits_of(call(self.trunk, self._frozen.prepare(x)))

    @torch.no_grad()
    def predict(self, x: Inputs, *, n_samples: int = 100, generator: torch.Generator | None = None) -> Prediction:
        """Logits φ(x) β, independent between classes with variances φᵀ P_c⁻¹ φ."""
        if self.head is None or self._frozen is None or self._whitening is None:
            raise NotFittedError("SNGP has no network yet: call fit(train_loader) first")
        phi = self.head.features(self._frozen(x))
        mean = phi @ self.head.weight.mT
        var = torch.stack([(phi @ root.mT).square().sum(-1) for root in self._whitening], -1)
        factor = torch.diag_embed(var.expand_as(mean).sqrt())
        noise = function_noise(mean.shape[-1], n_samples, seed=self.seed, generator=generator, like=mean)
        return Prediction(
            mean,
            factor,
            self.likelihood,
            self.link,
            noise=noise if n_samples else None,
            noise_var=mean.new_tensor([self.sigma_noise**2]) if self.likelihood == "regression" else None,
        )


class RandomFeatureHead(nn.Module):
    """h → √(2/D) cos(W h/ℓ + b) β: W and b fixed, β trained from zero.

    W is made of blocks d×d of random rotations whose rows are given the lengths of Gaussian vectors (Yu et
    al. 2016): each row is N(0, I), and rows of a block are orthogonal, so φ(h)·φ(h') varies less.
    """

    def __init__(self, last: nn.Linear, num_features: int, length_scale: float) -> None:
        super().__init__()
        width, like = last.in_features, last.weight
        blocks = []
        for _ in range(math.ceil(num_features / width)):
            rotation, upper = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64))
            rotation = rotation * upper.diagonal().sign()  # uniform over rotations and reflections
            lengths = torch.randn(width, width, dtype=torch.float64).norm(dim=1)
            blocks.append(lengths[:, None] * rotation)
        phases = 2 * math.pi * torch.rand(num_features, dtype=torch.float64)
        self.frequencies: Tensor
        self.phases: Tensor
        self.register_buffer("frequencies", (torch.cat(blocks)[:num_features] / length_scale).to(like))
        self.register_buffer("phases", phases.to(like))
        self.weight = nn.Parameter(like.new_zeros(last.out_features, num_features))

    def features(self, hidden: Float[Tensor, "B d"]) -> Float[Tensor, "B D"]:
        return math.sqrt(2 / len(self.phases)) * torch.cos(hidden.to(self.phases) @ self.frequencies.mT + self.phases)

    def forward(self, hidden: Float[Tensor, "B d"]) -> Float[Tensor, "B C"]:
        return self.features(hidden) @ self.weight.mT


def reinitialise(model: nn.Module) -> nn.Module:
    """A copy whose every weight is drawn anew by the layer that owns it."""
    fresh = copy.deepcopy(model)
    for name, module in fresh.named_modules():
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()
        elif any(p is not None for p in module._parameters.values()):
            raise UnsupportedModuleError(
                f"SNGP trains a new network, but {name or 'the network'} ({type(module).__name__}) has "
                "weights and no reset_parameters() to draw them anew; give SNGP(model, build=...), "
                "a function that returns a new network"
            )
    return fresh


def split_head(network: nn.Module, x: Inputs) -> tuple[nn.Module, nn.Linear]:
    """The network with an identity for its last linear layer, and that layer."""
    frozen = FrozenNetwork(network)
    name = find_head(frozen, x)
    last = network.get_submodule(name)
    if not isinstance(last, nn.Linear):
        raise UnsupportedModuleError(
            f"SNGP replaces the last linear layer, but {name} is a {type(last).__name__}; "
            "give a network that ends in nn.Linear"
        )
    seen: list[Tensor] = []
    probe = make_twin(network)
    probe.get_submodule(name).register_forward_hook(lambda mod, args, out: seen.append(out))
    with torch.no_grad():
        outputs = logits_of(call(probe, frozen.prepare(x)))
    if outputs.shape != seen[-1].shape or not torch.equal(outputs, seen[-1]):
        raise UnsupportedModuleError(
            f"SNGP replaces the last linear layer ({name}), but the network changes its output afterwards; "
            "give a network whose output is that of its last nn.Linear (leave log_softmax to the loss)"
        )
    if name == "":
        return nn.Identity(), last
    parent, _, child = name.rpartition(".")
    setattr(network.get_submodule(parent), child, nn.Identity())
    return network, last


class SpectralBound:
    """‖W‖₂ ≤ bound for one layer, W taken as the linear map from its inputs to its outputs."""

    def __init__(self, name: str, layer: nn.Module, input_shape: torch.Size, bound: float) -> None:
        self.name = name
        self.layer = layer
        self.bound = bound
        self.vector = torch.randn(1, *input_shape).to(self.weight)

    @property
    def weight(self) -> Tensor:
        return self.layer.weight  # type: ignore[return-value]

    def operator(self, u: Tensor) -> Tensor:
        """u → W u, without the bias."""
        weight = self.weight.detach().to(u)
        if isinstance(self.layer, nn.Linear):
            return F.linear(u, weight)
        return self.layer._conv_forward(u, weight, None)  # type: ignore[operator]

    def power_iteration(self) -> float:
        """One step u ← WᵀW u/‖·‖; returns ‖W u‖ for the unit vector it started from, at most ‖W‖₂."""
        with torch.enable_grad():
            u = (self.vector / self.vector.norm().clamp_min(1e-30)).requires_grad_()
            image = self.operator(u)
            (self.vector,) = torch.autograd.grad(image, u, image.detach())
        if not bool(self.vector.any()):  # a layer of zeros: keep a direction to come back with
            self.vector = u.detach()
        return float(image.detach().norm())

    def norm(self, *, tolerance: float = 1e-10, max_iterations: int = 20_000) -> float:
        """‖W‖₂: by SVD for a linear layer, by power iteration until it stops growing for a convolution.

        With a relative gap g between the two largest σ², the error e falls by 2ge a step and is at most
        g/2 once the others have died out, so that it is below √tolerance/2 where the growth is below tolerance:
        5e-6, which takes float64.
        """
        if isinstance(self.layer, nn.Linear):
            return float(torch.linalg.matrix_norm(self.weight.detach().double(), 2))
        self.vector = self.vector.double()
        previous = self.power_iteration()
        for _ in range(max_iterations):
            norm = self.power_iteration()
            if abs(norm - previous) <= tolerance * norm:
                break
            previous = norm
        self.vector = self.vector.to(self.weight)
        return norm

    def project(self) -> None:
        self._shrink(self.power_iteration())

    def project_exactly(self) -> None:
        self._shrink(self.norm())

    @torch.no_grad()
    def _shrink(self, norm: float) -> None:
        if norm > self.bound:
            self.weight.mul_(self.bound / norm)


def spectral_bounds(trunk: nn.Module, x: Inputs, bound: float) -> list[SpectralBound]:
    """One for each linear and convolutional layer that runs on x, with the shape of what goes into it."""
    probe = make_twin(trunk)
    shapes: dict[str, torch.Size] = {}

    def remember(name: str, layer: nn.Module, size: torch.Size) -> None:
        dims = 1 if isinstance(layer, nn.Linear) else layer.weight.ndim - 1  # type: ignore[operator]
        shapes.setdefault(name, size[-dims:])

    for name, layer in probe.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            layer.register_forward_pre_hook(lambda mod, args, name=name: remember(name, mod, args[0].shape))
    with torch.no_grad():
        call(probe, FrozenNetwork(trunk).prepare(x))
    return [SpectralBound(name, trunk.get_submodule(name), shape, bound) for name, shape in shapes.items()]
