"""The user's network: a factory that makes it, and a file of its weights."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from scalla.types import FileFormatError, InputError

#: under which a training script may keep the state dict among other things
NESTED = ("state_dict", "model_state_dict", "model")


def read_network(spec: str, weights: Path | None = None, options: str | None = None) -> nn.Module:
    """The network that `module:factory` (or `file.py:factory`) makes, with the weights of the file.

    `options` is JSON: keyword arguments of the factory.
    """
    network = _made(_found(spec), spec, _options(options))
    if weights is not None:
        load_weights(network, read_weights(weights), weights)
    return network.eval()


def read_weights(path: Path) -> dict[str, Tensor]:
    """A state dict from safetensors, or from what torch.save wrote; nothing but tensors is unpickled."""
    if not path.is_file():
        raise InputError(f"found no file of weights at {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise FileFormatError(
            f"{path} holds no state dict that can be read safely ({_first_line(error)}); write one with "
            "safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')"
        ) from error
    return _state_dict(content, path)


def load_weights(network: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    if state and all(name.startswith("module.") for name in state):  # saved from a data-parallel wrapper
        state = {name.removeprefix("module."): t for name, t in state.items()}
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise InputError(f"the weights in {path} are not those of this network: {error}") from error


def _state_dict(content: Any, path: Path) -> dict[str, Tensor]:
    for name in NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise FileFormatError(f"{path} holds a {type(content).__name__}; wanted a state dict: names and tensors")
    return dict(content)


def _found(spec: str) -> Any:
    """What `spec` names."""
    place, colon, name = spec.rpartition(":")
    if not (place and colon and name):
        raise InputError(f"got the network {spec!r}; wanted module:factory or file.py:factory, nets.py:make say")
    found: Any = _module(place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise InputError(f"{place} has no {name!r}; wanted a function or class that makes the network")
        found = getattr(found, part)
    return found


def _module(place: str) -> ModuleType:
    try:
        if not place.endswith(".py"):
            if "" not in sys.path and str(Path.cwd()) not in sys.path:
                sys.path.insert(0, str(Path.cwd()))
            return importlib.import_module(place)
        path = Path(place)
        if not path.is_file():
            raise InputError(f"found no file {place}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        spec.loader.exec_module(module)
        return module
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{place} cannot be imported: {type(error).__name__}: {error}") from error


def _made(found: Any, spec: str, options: dict[str, Any]) -> nn.Module:
    if isinstance(found, nn.Module):
        if options:
            raise InputError(f"got options for {spec}, which is a network already rather than a function that makes it")
        return found
    if not callable(found):
        raise InputError(f"{spec} is a {type(found).__name__}; wanted a function or class that makes the network")
    try:
        network = found(**options)
    except TypeError as error:
        raise InputError(f"{spec} cannot be called with {options or 'no arguments'}: {error}") from error
    if not isinstance(network, nn.Module):
        raise InputError(f"{spec} made a {type(network).__name__}; wanted a torch.nn.Module")
    return network


def _options(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"got {text!r}, which is no JSON ({error}); wanted '{{\"width\": 32}}' say") from error
    if not isinstance(options, dict):
        raise InputError(f"got {text!r}; wanted keyword arguments as JSON, '{{\"width\": 32}}' say")
    return options


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]
