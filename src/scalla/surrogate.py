"""The surrogate network g(x) ∈ R^{C×m} whose inner products are to match the NTK.

`mirror`  the network's own architecture, its last linear layer widened to C·m (the published choice)
`trunk`   a small head on the network's own frozen penultimate features: one pass for f and g together
a module  of the user's: x → (B, C, m), used as it is

With many classes the C·m outputs of the first two are a product of two smaller things; see `factored_head`.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scalla.factored_head import ClassFactor, class_rank_of
from scalla.functional import (
    FrozenNetwork,
    Head,
    call,
    input_features,
    logits_of,
    make_twin,
    map_tensors,
    replace_module,
)
from scalla.probes import mix_seed, seeded_globally
from scalla.types import InputError, Inputs

Start: TypeAlias = Literal["trained", "random"]

#: beyond this many weights in the widened layer, say so rather than run out of memory
MAX_HEAD_WEIGHTS = 500_000_000
_AFTER_THE_HEAD = (
    "surrogate='trunk' reads the input of the network's last linear layer, but something runs after that layer and "
    "changes its output; use surrogate='mirror' or a module of your own, x -> (B, C, m)"
)


class Mirror(nn.Module):
    """The network's architecture with its last linear layer widened from C to C·m outputs.

    It stays in evaluation mode: dropout is off and normalisation uses the network's running statistics, so
    features depend on their own input alone.
    """

    def __init__(
        self,
        network: FrozenNetwork,
        head: str,
        num_outputs: int,
        num_features: int,
        *,
        start: Start = "trained",
        class_rank: int | None = None,
    ) -> None:
        super().__init__()
        if start not in ("trained", "random"):
            raise InputError(f"got start={start!r} for the mirror surrogate; choose 'trained' or 'random'")
        self.num_outputs, self.num_features, self.start = num_outputs, num_features, start
        body = make_twin(network.model, share=False)
        if network.dtype.itemsize < 4:
            body.float()
        body.requires_grad_(True)
        self.head_name = head
        last = body.get_submodule(head)
        rank = class_rank_of(class_rank, num_outputs)
        #: the outputs of the widened layer are rows of m numbers: C of them, or r where classes are factored
        self.num_rows = rank or num_outputs
        self.body = replace_module(body, head, _widened(last, self.num_rows * num_features))
        self.classes = None if rank is None else ClassFactor(num_outputs, rank).to(self.head.weight)
        self.train()

    @property
    def head(self) -> Head:
        return self.body.get_submodule(self.head_name)  # type: ignore[return-value]

    def forward(self, x: Inputs) -> Float[Tensor, "B C m"]:
        flat = logits_of(call(self.body, map_tensors(x, self._cast)))
        return flat.unflatten(-1, (self.num_outputs, self.num_features)) if self.classes is None else self.classes(flat)

    def train(self, mode: bool = True) -> Mirror:
        super().train(mode)
        self.body.eval()
        return self

    def initialise(self, network: FrozenNetwork, x: Inputs, seed: int) -> None:
        """A random head of the size that makes g(x) g(x)ᵀ one on average, as the normalised target is."""
        if self.start == "random":
            _reset(self.body, mix_seed(seed, 1))
        generator = torch.Generator().manual_seed(mix_seed(seed, 2))
        with torch.no_grad():
            self.head.weight.copy_(_normal(self.head.weight.shape, generator))
            if self.head.bias is not None:
                self.head.bias.zero_()
            if self.classes is not None:
                self.classes.initialise(_last_weight(network, self.head_name), generator)
            flat = self._widened_outputs(map_tensors(network.prepare(x), self._cast))
            features = flat if self.classes is None else self.classes(flat)
            size = features.square().mean().sqrt() * math.sqrt(self.num_features)
            self.head.weight.div_(size.clamp_min(1e-12))

    def _widened_outputs(self, x: Inputs) -> Tensor:
        """What the body returns for x, of the head's width: the rest of the network may not take another one."""
        width = self.num_rows * self.num_features
        cause: RuntimeError | None = None
        try:
            flat = logits_of(call(self.body, x))
            if flat.ndim == 2 and flat.shape[-1] == width:
                return flat
            found = f"changed the network's output to {tuple(flat.shape)}"
        except RuntimeError as error:
            found, cause = f"made the network fail ({error})", error
        raise InputError(
            f"widening the last linear layer to {width} outputs {found}: something after that layer depends on its "
            "width. Use a surrogate of your own, a module x -> (B, C, m)"
        ) from cause

    def _cast(self, t: Tensor) -> Tensor:
        return t.to(self.head.weight.dtype) if t.is_floating_point() else t


class Trunk(nn.Module):
    """A head φ → (C, m) on the network's penultimate features: linear, plus a hidden layer's correction."""

    def __init__(
        self,
        network: FrozenNetwork,
        head: str,
        num_outputs: int,
        num_features: int,
        *,
        hidden: int = 256,
        class_rank: int | None = None,
    ) -> None:
        super().__init__()
        self.head_name = head
        self.num_outputs, self.num_features = num_outputs, num_features
        layer = network.twin.get_submodule(head)
        assert isinstance(layer, Head)
        width = input_features(layer)
        self.register_buffer("shift", torch.zeros(width))
        self.register_buffer("spread", torch.ones(()))
        rank = class_rank_of(class_rank, num_outputs)
        flat = (rank or num_outputs) * num_features
        _check_weights(flat, max(width, hidden))
        self.linear = nn.utils.skip_init(nn.Linear, width, flat)
        self.expand = nn.utils.skip_init(nn.Linear, width, hidden) if hidden else None
        self.correct = nn.utils.skip_init(nn.Linear, hidden, flat) if hidden else None
        self.classes = None if rank is None else ClassFactor(num_outputs, rank)
        self.to(device=network.device, dtype=network.dtype if network.dtype.itemsize >= 4 else torch.float32)

    def initialise(self, network: FrozenNetwork, x: Inputs, seed: int) -> None:
        """Standardise the penultimate features by those of x; random heads of the normalised target's size."""
        outputs = network(x)
        tapped = FrozenNetwork(network.model, dict_key_y=network.dict_key_y, tap=self.head_name)
        try:
            both = tapped(x)
        except RuntimeError as error:
            raise InputError(_AFTER_THE_HEAD) from error
        if both.ndim != 2 or not torch.allclose(both[:, : self.num_outputs], outputs, rtol=1e-2, atol=1e-3):
            raise InputError(_AFTER_THE_HEAD)
        phi = both[:, self.num_outputs :].to(self.shift)
        self.shift.copy_(phi.mean(0))
        self.spread.copy_(phi.std(0, correction=0).mean().clamp_min(1e-6))
        generator = torch.Generator().manual_seed(mix_seed(seed, 2))
        _start(self.linear, 1 / math.sqrt(self.num_features), generator)
        if self.classes is not None:
            self.classes.initialise(_last_weight(network, self.head_name), generator)
        if self.expand is not None and self.correct is not None:
            _start(self.expand, math.sqrt(2), generator)
            _start(self.correct, 0.1 / math.sqrt(self.num_features), generator)

    shift: Tensor
    spread: Tensor

    def forward(self, phi: Float[Tensor, "B h"]) -> Float[Tensor, "B C m"]:
        h = (phi.to(self.shift.dtype) - self.shift) / self.spread
        flat = self.linear(h)
        if self.expand is not None and self.correct is not None:
            flat = flat + self.correct(torch.relu(self.expand(h)))
        return flat.unflatten(-1, (self.num_outputs, self.num_features)) if self.classes is None else self.classes(flat)


def build_surrogate(
    kind: str, network: FrozenNetwork, head: str, num_outputs: int, num_features: int, options: dict[str, Any]
) -> Mirror | Trunk:
    """`mirror` or `trunk`, of the right size for this network; weights are set by `initialise` or a file."""
    if kind not in ("mirror", "trunk"):
        raise InputError(f"got surrogate={kind!r}; choose 'mirror', 'trunk' or give a module x -> (B, C, m)")
    builder = Mirror if kind == "mirror" else Trunk
    allowed = {"mirror": {"start", "class_rank"}, "trunk": {"hidden", "class_rank"}}[kind]
    if set(options) - allowed:
        raise InputError(f"got surrogate_options {sorted(options)} for {kind!r}; it takes {sorted(allowed)}")
    return builder(network, head, num_outputs, num_features, **options)


def _normal(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """The same numbers whatever the user's default dtype and device."""
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _start(layer: nn.Linear, gain: float, generator: torch.Generator) -> None:
    with torch.no_grad():
        layer.weight.copy_(_normal(layer.weight.shape, generator) * (gain / math.sqrt(layer.in_features)))
        layer.bias.zero_()


def _last_weight(network: FrozenNetwork, head: str) -> Tensor:
    layer = network.twin.get_submodule(head)
    assert isinstance(layer, Head)
    return layer.weight


def _check_weights(outputs: int, inputs: int) -> None:
    if outputs * inputs > MAX_HEAD_WEIGHTS:
        raise InputError(
            f"{outputs} outputs (C·m, or class_rank·m) on a layer of {inputs} inputs make {outputs * inputs:.1e} "
            "weights, too many for a widened layer; use a smaller class_rank (surrogate_options), fewer num_features "
            "or a surrogate of your own"
        )


def _widened(head: nn.Module, width: int) -> Head:
    assert isinstance(head, Head)
    _check_weights(width, head.weight[0].numel())
    kind = {"device": head.weight.device, "dtype": head.weight.dtype}
    if isinstance(head, nn.Linear):
        return nn.utils.skip_init(nn.Linear, head.in_features, width, **kind)
    if head.groups != 1:
        raise InputError(f"the network's last layer has groups={head.groups}; only groups=1 can be widened")
    geometry = {k: getattr(head, k) for k in ("kernel_size", "stride", "padding", "dilation", "padding_mode")}
    # The plain layer of as many dimensions, also for one that is parametrised or of a class of the user's.
    plain: type[Head] = next(c for c in (nn.Conv1d, nn.Conv2d, nn.Conv3d) if isinstance(head, c))
    return nn.utils.skip_init(plain, head.in_channels, width, **geometry, **kind)


def _reset(module: nn.Module, seed: int) -> None:
    """Fresh weights by each layer's own rule, with the global random state left alone."""
    with seeded_globally(seed, (p.device for p in module.parameters())):
        for part in module.modules():
            if callable(getattr(part, "reset_parameters", None)):
                part.reset_parameters()  # type: ignore[operator]
