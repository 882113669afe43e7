"""The trained network as a function f(params, x) → (B, C) that leaves the network alone.

Everything runs on a *twin*: a copy of the module tree that shares every tensor with the user's network but
has modes, hooks and attributes of its own. So no mode is switched on the user's module, no attribute is
set on it, and any number of threads may predict at once.
"""

from __future__ import annotations

import copy
import fnmatch
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from scalla.device import sent
from scalla.types import InputError, Inputs

Params: TypeAlias = dict[str, Tensor]
#: layers that can be a network's last one
Head: TypeAlias = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
#: which weights the kernel sees: a word, name patterns, or a function (name, parameter) -> bool
ParameterFilter: TypeAlias = str | Sequence[str] | Callable[[str, nn.Parameter], bool]


class FrozenNetwork:
    """A trained network in evaluation mode, and the weights its kernel is taken over."""

    def __init__(self, model: nn.Module, *, dict_key_y: str = "labels", tap: str | None = None) -> None:
        """With `tap`, the name of the head, the network's output is (f(x), what the head was given)."""
        self.model = model
        self.dict_key_y = dict_key_y
        self.twin = make_twin(model)
        self._accepted = _accepted_keywords(self.twin)
        self._pairs = list(zip(self.twin.modules(), model.modules(), strict=True))
        if tap is not None:
            self.twin = replace_module(self.twin, tap, Tap(self.twin.get_submodule(tap)))

    def sync(self) -> None:
        """Follow tensors that were replaced on the user's network (`.to()` replaces buffers)."""
        for ours, theirs in self._pairs:
            ours._parameters.update(theirs._parameters)
            ours._buffers.update(theirs._buffers)
            if hasattr(ours, "_flat_weights_names"):  # recurrent layers keep a second list of their weights
                ours._flat_weights = [getattr(ours, name, None) for name in ours._flat_weights_names]  # type: ignore[assignment, union-attr]

    @property
    def device(self) -> torch.device:
        return next((t.device for t in _tensors(self.twin)), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        return next((t.dtype for t in _tensors(self.twin) if t.is_floating_point()), torch.get_default_dtype())

    def prepare(self, x: Inputs, *, pin: bool = False) -> Inputs:
        """Inputs on the network's device, floating-point ones in its dtype, labels taken out of mappings.

        With `pin` they go to CUDA by page-locked memory, for which the host does not wait: batches of a fit.
        """
        if isinstance(x, Mapping):
            x = {k: v for k, v in x.items() if k != self.dict_key_y}
            # Where forward knows none of the names, the whole mapping is its argument.
            if self._accepted is not None and not self._accepted.isdisjoint(x):
                x = {k: v for k, v in x.items() if k in self._accepted}
        elif not isinstance(x, Tensor | tuple | list):
            raise InputError(
                f"got inputs of type {type(x).__name__}; wanted a tensor (torch.as_tensor(x), say), a mapping of "
                "tensors for keyword arguments or a tuple of tensors for positional ones"
            )
        return map_tensors(x, lambda t: self._move(sent(t, self.device) if pin else t))

    def _move(self, t: Tensor) -> Tensor:
        dtype = self.dtype if t.is_floating_point() else t.dtype
        return t.to(device=self.device, dtype=dtype, non_blocking=True)

    def __call__(self, x: Inputs) -> Float[Tensor, "B C"]:
        """f(x), without gradients; with a tap [f(x), h(x)]."""
        with torch.no_grad():
            return self.raw(self.prepare(x))

    def raw(self, x: Inputs) -> Float[Tensor, "B C"]:
        """f(x) of inputs that are prepared, with gradients where they are on."""
        return logits_of(call(self.twin, x))

    def at(self, x: Inputs) -> Callable[[Params], Float[Tensor, "B C"]]:
        """params → f(params, x); weights that are not in `params` keep their value."""
        x = self.prepare(x)
        args, kwargs = call_arguments(self.twin, x)
        return lambda params: logits_of(functional_call(self.twin, params, args, kwargs))


def make_twin(model: nn.Module, *, share: bool = True) -> nn.Module:
    """A copy of the module tree in evaluation mode that shares all tensors with `model`, or owns copies of them."""
    kept: dict[int, Any] = {}
    for module in model.modules():
        values = [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]
        for value in values:
            if isinstance(value, Tensor) and share:
                kept[id(value)] = value
            elif isinstance(value, Tensor) and value.grad_fn is not None:  # what `weight_norm` computed last
                kept[id(value)] = value.detach().clone()
    try:
        return copy.deepcopy(model, kept).eval()
    except Exception as error:
        raise InputError(
            f"the network ({type(model).__name__}) cannot be copied by copy.deepcopy ({error}); the copy "
            "shares all weights and keeps your network untouched. Give a network that can be copied, for "
            "example the plain module inside a distributed or compiled wrapper"
        ) from error


class Tap(nn.Module):
    """A head that passes on what it was given beside its outputs: [head(h), h]."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, h: Tensor) -> Tensor:
        return torch.cat([self.head(h), h], -1 if isinstance(self.head, nn.Linear) else 1)


def replace_module(root: nn.Module, name: str, new: nn.Module) -> nn.Module:
    """`root` with its submodule `name` replaced, under all its names; `new` itself where it is the root."""
    if not name:
        return new
    old = root.get_submodule(name)
    for parent in list(root.modules()):
        for leaf, child in list(parent._modules.items()):  # `named_children` leaves second names out
            if child is old:
                setattr(parent, leaf, new)
    return root


def call(module: nn.Module, x: Inputs) -> Any:
    args, kwargs = call_arguments(module, x)
    return module(*args, **kwargs)


def call_arguments(module: nn.Module, x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How `module` wants x: a mapping as keywords, unless its forward takes one positional dict."""
    if isinstance(x, Mapping):
        if _takes_one_mapping(module, x):
            return (x,), {}
        return (), dict(x)
    if isinstance(x, tuple | list):
        return tuple(x), {}
    return (x,), {}


def logits_of(output: Any) -> Tensor:
    """The (B, C) tensor in what a network returns: itself, `.logits`, `["logits"]`, or a tuple's first."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    if hasattr(output, "logits"):
        return output.logits
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    raise InputError(
        f"the network returned {type(output).__name__}, in which there are no logits; wanted a (B, C) tensor, "
        "something with `.logits` or ['logits'], or a tuple whose first entry is the tensor. Wrap the network"
    )


def check_outputs(outputs: Tensor, num_inputs: int) -> None:
    if outputs.ndim != 2 or len(outputs) != num_inputs:
        raise InputError(
            f"the network's output has shape {tuple(outputs.shape)} for {num_inputs} inputs; wanted (B, C), one "
            "row of C outputs for each input. Wrap the network so that it flattens or unsqueezes its output"
        )


def batch_size(x: Inputs) -> int:
    """B, from the first tensor in x."""
    for t in tensors_of(x):
        if t.ndim:
            return len(t)
    raise InputError(f"got inputs of type {type(x).__name__} without any tensor in them; wanted at least one")


def first_rows(x: Inputs, count: int) -> Inputs:
    size = batch_size(x)
    return map_tensors(x, lambda t: t[:count] if t.ndim and len(t) == size else t)


def concatenate(blocks: Sequence[Inputs]) -> Inputs | None:
    """One batch of several, where they are tensors of one shape; None where they are not."""
    if len(blocks) == 1:
        return blocks[0]
    if all(isinstance(b, Tensor) for b in blocks) and len({b.shape[1:] for b in blocks}) == 1:  # type: ignore[union-attr]
        return torch.cat(list(blocks))  # type: ignore[arg-type]
    return None


def tensors_of(x: Inputs) -> list[Tensor]:
    parts = [x] if isinstance(x, Tensor) else x.values() if isinstance(x, Mapping) else x
    return [part for part in parts if isinstance(part, Tensor)]


def map_tensors(x: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, Mapping):
        return {k: function(v) if isinstance(v, Tensor) else v for k, v in x.items()}
    return tuple(function(v) if isinstance(v, Tensor) else v for v in x)


def select_parameters(network: FrozenNetwork, parameters: ParameterFilter, x: Inputs) -> Params:
    """The weights that the kernel is taken over, by name.

    "trainable": those with `requires_grad` (all of them, if none has); "all"; "last_layer": the last linear
    layer that runs on x; a list of name patterns such as ["*.lora_*", "head.*"]; or a function.
    """
    named = {k: p for k, p in network.twin.named_parameters() if p.is_floating_point()}
    if parameters == "all":
        chosen = named
    elif parameters == "trainable":
        chosen = {k: p for k, p in named.items() if p.requires_grad} or named
    elif parameters == "last_layer":
        # by identity: the weights of a parametrised layer lie deeper, those of a tied one elsewhere
        of_head = {id(p) for p in network.twin.get_submodule(find_head(network, x)).parameters()}
        chosen = {k: p for k, p in named.items() if id(p) in of_head}
    elif callable(parameters):
        chosen = {k: p for k, p in named.items() if parameters(k, p)}
    else:
        patterns = [parameters] if isinstance(parameters, str) else list(parameters)
        chosen = {k: p for k, p in named.items() if any(fnmatch.fnmatch(k, pattern) for pattern in patterns)}
    if not chosen:
        names = ", ".join(list(named)[:8]) + (", …" if len(named) > 8 else "")
        raise InputError(
            f"parameters={parameters!r} selects none of the network's {len(named)} weights ({names}); "
            "give 'trainable', 'all', 'last_layer', name patterns or a function (name, parameter) -> bool"
        )
    return {k: p.detach() for k, p in chosen.items()}


def layers_that_run(network: FrozenNetwork, x: Inputs) -> tuple[Tensor, list[tuple[str, Head, tuple[Tensor, ...]]]]:
    """The outputs at the first inputs of x; name, layer and what it is given of all that can be a head, as they run."""
    ran: list[tuple[str, Head, tuple[Tensor, ...]]] = []
    probe = make_twin(network.model)
    for name, module in probe.named_modules():
        if isinstance(module, Head):
            module.register_forward_hook(lambda mod, args, out, name=name: ran.append((name, mod, args)))
    with torch.no_grad():
        return logits_of(call(probe, network.prepare(first_rows(x, 2)))), ran


def find_head(network: FrozenNetwork, x: Inputs) -> str:
    """The name of the last linear (or convolutional) layer with C outputs that runs on x."""
    outputs, ran = layers_that_run(network, x)
    heads = [name for name, module, _ in ran if output_features(module) == outputs.shape[-1]]
    if not heads:
        raise InputError(
            f"found no linear or convolutional layer with C = {outputs.shape[-1]} outputs in "
            f"{type(network.model).__name__}; give a surrogate of your own, surrogate=module: x -> (B, C, m)"
        )
    return heads[-1]


def output_features(module: Head) -> int:
    return module.out_features if isinstance(module, nn.Linear) else module.out_channels


def input_features(module: Head) -> int:
    return module.in_features if isinstance(module, nn.Linear) else module.in_channels


def _tensors(module: nn.Module) -> Any:
    yield from module.parameters()
    yield from module.buffers()


def _signature(module: nn.Module) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return []


def _takes_one_mapping(module: nn.Module, x: Mapping[str, Any]) -> bool:
    """forward(batch): a single required argument that is none of the mapping's keys."""
    parameters = _signature(module)
    if any(p.name in x or p.kind is p.VAR_KEYWORD for p in parameters):
        return False
    required = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    return len(required) == 1


def _accepted_keywords(module: nn.Module) -> set[str] | None:
    """Names that forward takes, or None where any name may be right."""
    parameters = _signature(module)
    if not parameters or any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
        return None
    return {p.name for p in parameters}
