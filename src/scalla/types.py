"""The words that every file shares: dimension letters, inputs, errors.

Dimension letters, used in every signature:

    N  training inputs       B  inputs in a batch       C  network outputs (classes)
    P  network parameters    m  features                S  probes or samples
    R  columns of a covariance factor (m for ScaLLA)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

from torch import Tensor

Likelihood: TypeAlias = Literal["classification", "regression"]
Link: TypeAlias = Literal["probit", "mc", "bridge", "bridge_norm"]

# What one batch of inputs may be: a tensor, keyword arguments (Hugging Face), or positional arguments.
Inputs: TypeAlias = Tensor | Mapping[str, Any] | tuple[Any, ...] | list[Any]

# Anything that yields batches each time it is iterated over: a DataLoader, a list of batches.
Loader: TypeAlias = Iterable[Any]


class ScallaError(Exception):
    """The parent of every error that this package raises on purpose."""


class InputError(ScallaError, ValueError):
    """What came in is not what is wanted; the message says what to do."""


class NotFittedError(ScallaError, RuntimeError):
    """A posterior was asked for before `fit`."""


class UnsupportedModuleError(ScallaError, RuntimeError):
    """The network holds a module that cannot be differentiated as the method needs."""


class ProcessError(ScallaError, RuntimeError):
    """Another process of a distributed fit failed, is gone, or never began."""


class FileFormatError(ScallaError, ValueError):
    """A file is not one of ours, is damaged, or belongs to another network."""


class NumericalWarning(UserWarning):
    """A computation needed help (jitter, say); the message gives the size of it."""
