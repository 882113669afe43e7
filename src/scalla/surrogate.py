"""The surrogate network g(x) ∈ R^{C×m} whose inner products are to match the NTK.

`mirror`  the network's own architecture, its last linear layer widened to C·m (the published choice)
`trunk`   a small head on the network's own frozen penultimate features: one pass for f and g together
a module  of the user's: x → (B, C, m), used as it is
"""

from __future__ import annotations

import copy
import math
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scalla.functional import (
    FrozenNetwork,
    call,
    find_head,
    first_rows,
    logits_of,
    make_twin,
    map_tensors,
    output_features,
    replace_module,
)
from scalla.probes import mix_seed
from scalla.types import InputError, Inputs

Start: TypeAlias = Literal["trained", "random"]

#: beyond this many weights in the widened layer, say so rather than run out of memory
MAX_HEAD_WEIGHTS = 500_000_000


class Mirror(nn.Module):
    """The network's architecture with its last linear layer widened from C to C·m outputs.

    It stays in evaluation mode: dropout is off and normalisation uses the network's running statistics, so
    features depend on their own input alone.
    """

    def __init__(
        self, network: FrozenNetwork, x: Inputs, num_features: int, *, start: Start = "trained", seed: int = 0
    ) -> None:
        super().__init__()
        if start not in ("trained", "random"):
            raise InputError(f"got start={start!r} for the mirror surrogate; choose 'trained' or 'random'")
        self.num_outputs = network(first_rows(x, 2)).shape[-1]
        self.num_features = num_features
        head = find_head(network, x)
        # make_twin shares tensors; the second copy owns its weights.
        self.body = copy.deepcopy(make_twin(network.model))
        if network.dtype.itemsize < 4:
            self.body.float()
        self.body.requires_grad_(True)
        if start == "random":
            _reset(self.body, mix_seed(seed, 1))
        wide = _widened(self.body.get_submodule(head), self.num_outputs * num_features)
        self.body = replace_module(self.body, head, wide)
        self._start_head(wide, network.prepare(first_rows(x, 64)), mix_seed(seed, 2))
        self.train()

    def forward(self, x: Inputs) -> Float[Tensor, "B C m"]:
        dtype = next(p.dtype for p in self.body.parameters() if p.is_floating_point())
        x = map_tensors(x, lambda t: t.to(dtype) if t.is_floating_point() else t)
        flat = logits_of(call(self.body, x))
        return flat.unflatten(-1, (self.num_outputs, self.num_features))

    def train(self, mode: bool = True) -> Mirror:
        super().train(mode)
        self.body.eval()
        return self

    def _start_head(self, wide: nn.Linear, x: Inputs, seed: int) -> None:
        """Random weights of the size that makes g(x) g(x)ᵀ one on average, as the normalised target is."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            wide.weight.copy_(torch.randn(wide.weight.shape, generator=generator))
            if wide.bias is not None:
                wide.bias.zero_()
            flat = logits_of(call(self.body, map_tensors(x, lambda t: t.to(wide.weight) if t.is_floating_point() else t)))
            if flat.ndim != 2 or flat.shape[-1] != self.num_outputs * self.num_features:
                raise InputError(
                    f"widening the last linear layer to C·m = {self.num_outputs * self.num_features} outputs changed the "
                    f"network's output to {tuple(flat.shape)}: something after that layer depends on its width. Use "
                    "surrogate='trunk' or a module of your own, x -> (B, C, m)"
                )
            size = flat.square().mean().sqrt() * math.sqrt(self.num_features)
            wide.weight.div_(size.clamp_min(1e-12))


class Trunk(nn.Module):
    """A head φ → (C, m) on the network's penultimate features: linear, plus a hidden layer's correction."""

    def __init__(
        self, network: FrozenNetwork, x: Inputs, num_features: int, *, hidden: int = 256, seed: int = 0
    ) -> None:
        super().__init__()
        self.head_name = find_head(network, x)
        outputs = network(first_rows(x, 64))
        tapped = FrozenNetwork(network.model, dict_key_y=network.dict_key_y, tap=self.head_name)
        self.num_outputs, self.num_features = outputs.shape[-1], num_features
        both = tapped(first_rows(x, 64))
        if both.ndim != 2 or not torch.allclose(both[:, : self.num_outputs], outputs, rtol=1e-3, atol=1e-4):
            raise InputError(
                "surrogate='trunk' reads the input of the network's last linear layer, but something runs after that "
                "layer and changes its output; use surrogate='mirror' or a module of your own, x -> (B, C, m)"
            )
        dtype = network.dtype if network.dtype.itemsize >= 4 else torch.float32
        phi = both[:, self.num_outputs :].to(dtype)
        self.register_buffer("shift", phi.mean(0))
        self.register_buffer("spread", phi.std(0, correction=0).mean().clamp_min(1e-6))
        generator = torch.Generator().manual_seed(mix_seed(seed, 2))
        width = self.num_outputs * num_features
        self.linear = _linear(phi.shape[-1], width, 1 / math.sqrt(num_features), generator)
        self.expand = _linear(phi.shape[-1], hidden, math.sqrt(2), generator) if hidden else None
        self.correct = _linear(hidden, width, 0.1 / math.sqrt(num_features), generator) if hidden else None
        self.to(device=phi.device, dtype=dtype)

    shift: Tensor
    spread: Tensor

    def forward(self, phi: Float[Tensor, "B h"]) -> Float[Tensor, "B C m"]:
        h = (phi.to(self.shift.dtype) - self.shift) / self.spread
        flat = self.linear(h)
        if self.expand is not None and self.correct is not None:
            flat = flat + self.correct(torch.relu(self.expand(h)))
        return flat.unflatten(-1, (self.num_outputs, self.num_features))


def build_surrogate(
    kind: str, network: FrozenNetwork, x: Inputs, num_features: int, *, seed: int, options: dict[str, object]
) -> Mirror | Trunk:
    """`mirror` or `trunk`, for this network, of the right size."""
    if kind not in ("mirror", "trunk"):
        raise InputError(f"got surrogate={kind!r}; choose 'mirror', 'trunk' or give a module x -> (B, C, m)")
    builder = Mirror if kind == "mirror" else Trunk
    return builder(network, x, num_features, seed=seed, **options)  # type: ignore[arg-type]


def _linear(num_in: int, num_out: int, gain: float, generator: torch.Generator) -> nn.Linear:
    layer = nn.utils.skip_init(nn.Linear, num_in, num_out)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(num_out, num_in, generator=generator) * (gain / math.sqrt(num_in)))
        layer.bias.zero_()
    return layer


def _widened(head: nn.Module, width: int) -> nn.Linear:
    weights = width * head.weight[0].numel()  # type: ignore[index, operator, union-attr]
    if weights > MAX_HEAD_WEIGHTS:
        raise InputError(
            f"C·m = {width} outputs on a layer of {head.weight[0].numel()} inputs make {weights:.1e} weights, too many "  # type: ignore[index, operator, union-attr]
            "for a widened layer; use fewer num_features or a surrogate of your own"
        )
    kind = {"device": head.weight.device, "dtype": head.weight.dtype}  # type: ignore[union-attr]
    if isinstance(head, nn.Linear):
        return nn.utils.skip_init(nn.Linear, head.in_features, width, **kind)
    assert isinstance(head, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    if head.groups != 1:
        raise InputError(f"the network's last layer has groups={head.groups}; only groups=1 can be widened")
    geometry = {k: getattr(head, k) for k in ("kernel_size", "stride", "padding", "dilation", "padding_mode")}
    wide = nn.utils.skip_init(type(head), head.in_channels, width, **geometry, **kind)
    assert output_features(wide) == width
    return wide  # type: ignore[return-value]


def _reset(module: nn.Module, seed: int) -> None:
    """Fresh weights by each layer's own rule, with the global random state left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for part in module.modules():
            if callable(getattr(part, "reset_parameters", None)):
                part.reset_parameters()  # type: ignore[operator]
