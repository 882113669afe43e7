"""What chosen layers of the network are given on the way to its output: one vector for each input, no second pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scalla.functional import FrozenNetwork, Tap, batch_size, layers_that_run
from scalla.types import InputError, Inputs

#: where the layers of this thread put what they are given, while somebody asks for it
_found: ContextVar[dict[str, Tensor] | None] = ContextVar("hidden", default=None)

_CHANNELS_FIRST = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.AdaptiveAvgPool2d,
)  # fmt: skip
#: linear layers whose inputs are looked at by default, besides that of the last convolution
NUM_LINEAR = 3


@contextlib.contextmanager
def recorded() -> Iterator[dict[str, Float[Tensor, "B D"]]]:
    """What the marked layers are given inside, by name: the last time, where a layer runs several times."""
    found: dict[str, Tensor] = {}
    token = _found.set(found)
    try:
        yield found
    finally:
        _found.reset(token)


@dataclass(frozen=True)
class _Mark:
    """A hook of a layer, which says what the layer is given."""

    name: str

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        found = _found.get()
        if found is not None and args and isinstance(args[0], Tensor):
            found[self.name] = vectors(args[0], layer)


def mark(network: FrozenNetwork, layers: Sequence[str]) -> None:
    """Let these layers of the network's twin, which nobody else sees, say what they are given, and no others."""
    for module in network.twin.modules():
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, _Mark)]:
            del hooks[key]
    for name in layers:
        layer = network.twin.get_submodule(name)
        layer = layer.head if isinstance(layer, Tap) else layer
        layer.register_forward_pre_hook(_Mark(name))


def vectors(h: Float[Tensor, "B ..."], layer: nn.Module) -> Float[Tensor, "B D"]:
    """h itself where it is one vector for each input; else mean, largest and spread of each channel over positions."""
    if h.ndim <= 2:
        return h
    h = h.flatten(2) if isinstance(layer, _CHANNELS_FIRST) else h.flatten(1, -2).mT
    return torch.cat([h.mean(-1), h.amax(-1), h.std(-1, correction=0)], -1)


def usual_layers(network: FrozenNetwork, x: Inputs) -> list[str]:
    """The last convolution, and the last linear layers that are given one vector for each input, as they run."""
    given = {name: (layer, args[0].ndim) for name, layer, args in layers_that_run(network, x)[1] if args}
    convolutions = [name for name, (layer, _) in given.items() if not isinstance(layer, nn.Linear)]
    linear = [name for name, (layer, ndim) in given.items() if isinstance(layer, nn.Linear) and ndim == 2]
    if not linear and not convolutions:
        raise InputError(
            f"found no convolution in {type(network.model).__name__}, and no linear layer that is given one vector for "
            "each input; name the layers whose inputs tell what is familiar: layers=['encoder.norm']"
        )
    return [*convolutions[-1:], *linear[-NUM_LINEAR:]]


def check_layers(network: FrozenNetwork, layers: Sequence[str]) -> list[str]:
    """Names of the user's as a list, each one a layer of the network."""
    known = [name for name, _ in network.model.named_modules() if name]
    names = [layers] if isinstance(layers, str) else list(layers)
    if not names or not set(names) <= set(known):
        raise InputError(
            f"got layers={names!r}; wanted names of layers of the network, such as {', '.join(known[-6:])}"
        )
    return names


def hidden_of(network: FrozenNetwork, layers: Sequence[str], x: Inputs) -> dict[str, Float[Tensor, "B D"]]:
    """What each of the layers is given at x, each checked to be one vector for each input."""
    with recorded() as found:
        network(x)
    for name in layers:
        if name not in found:
            raise InputError(f"the layer {name!r} does not run on these inputs, or is given no tensor; choose another")
        if found[name].ndim != 2 or len(found[name]) != batch_size(x):
            raise InputError(
                f"the layer {name!r} is given {tuple(found[name].shape)} for {batch_size(x)} inputs; wanted a row for "
                "each input"
            )
    return found
