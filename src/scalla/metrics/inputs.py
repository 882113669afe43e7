"""What the metrics accept: checked once, then float64 on the CPU, where a long sum keeps its digits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from scalla.types import InputError

# Shapes are checked below, by hand: a wrong one comes from the user and deserves a message.
Array: TypeAlias = Tensor | np.ndarray | Sequence[Any]


def as_float64(name: str, values: Array) -> Tensor:
    """`values` as a float64 tensor on the CPU; NaN is refused, for no metric of a NaN means anything."""
    if isinstance(values, Tensor):
        if values.is_complex():
            raise InputError(f"got {name} of dtype {values.dtype}; wanted real numbers")
        tensor = values.detach().cpu().double()
    else:
        if isinstance(values, Sequence) and any(isinstance(v, Tensor) for v in values):
            raise InputError(f"got {name} as a list of tensors; wanted one tensor: use torch.cat or torch.stack")
        try:
            array = np.asarray(values)
        except ValueError as error:
            raise InputError(f"got {name} as a nested list that is not rectangular; wanted one array") from error
        if array.dtype.kind not in "fiub":
            raise InputError(f"got {name} of dtype {array.dtype}; wanted real numbers")
        tensor = torch.from_numpy(np.array(array, dtype=np.float64, order="C"))
    if tensor.numel() == 0:
        raise InputError(f"got {name} of shape {tuple(tensor.shape)}, which is empty; wanted at least one input")
    num_nan = int(tensor.isnan().sum())
    if num_nan:
        raise InputError(
            f"got {num_nan} NaN among the {tensor.numel()} values of {name}; wanted numbers: "
            "find the inputs that gave NaN, a metric cannot stand for them"
        )
    return tensor


def as_finite(name: str, values: Array) -> Tensor:
    """`as_float64` that refuses infinity too."""
    tensor = as_float64(name, values)
    num_inf = int(tensor.isinf().sum())
    if num_inf:
        raise InputError(f"got {num_inf} infinite among the {tensor.numel()} values of {name}; wanted finite numbers")
    return tensor


def precision(values: Array) -> torch.dtype:
    """The floating-point type that `values` were computed in (lists and integers count as float64)."""
    if isinstance(values, Tensor):
        return values.dtype if values.dtype.is_floating_point else torch.float64
    dtype = getattr(values, "dtype", None)
    return {"float32": torch.float32, "float16": torch.float16}.get(str(dtype), torch.float64)


def probs_and_labels(probs: Array, labels: Array) -> tuple[Tensor, Int64[Tensor, " B"]]:
    """Checked probabilities and labels; (B, 1) holds the probability of class 1 and becomes (B, 2)."""
    checked = as_finite("probs", probs)
    if checked.ndim != 2:
        raise InputError(
            f"got probs of shape {tuple(checked.shape)}; wanted (B, C), "
            "or (B, 1) with the probability of class 1: probs[:, None]"
        )
    # Half precision rounds each of C probabilities to three digits.
    tolerance = 2e-2 if precision(probs) in (torch.float16, torch.bfloat16) else 1e-3
    low, high = float(checked.min()), float(checked.max())
    if low < -tolerance or high > 1 + tolerance:
        raise InputError(
            f"got probs between {low:.4g} and {high:.4g}; wanted probabilities in [0, 1]: "
            "if these are logits, pass logits.softmax(-1)"
        )
    checked = checked.clamp(0, 1)
    if checked.shape[1] == 1:
        checked = torch.cat([1 - checked, checked], 1)
    else:
        sums = checked.sum(1)
        worst = int((sums - 1).abs().argmax())
        if abs(float(sums[worst]) - 1) > tolerance:
            raise InputError(
                f"got probs whose row {worst} sums to {float(sums[worst]):.4g}; wanted rows that sum to 1: "
                "if these are logits, pass logits.softmax(-1)"
            )
    return checked, class_labels(labels, *checked.shape)


def class_labels(labels: Array, num_inputs: int, num_classes: int) -> Int64[Tensor, " B"]:
    """Labels as int64 (B,), each in 0 … C−1."""
    values = as_finite("labels", labels)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.shape != (num_inputs,):
        hint = "; if they are one-hot, pass labels.argmax(-1)" if values.ndim == 2 else ""
        raise InputError(
            f"got labels of shape {tuple(values.shape)} for probs of {num_inputs} inputs; "
            f"wanted ({num_inputs},): one class index for each row of probs{hint}"
        )
    wrong = (values < 0) | (values >= num_classes) | (values != values.floor())
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        raise InputError(
            f"got label {float(values[first]):g} at index {first} ({int(wrong.sum())} such labels) for "
            f"{num_classes} classes; wanted whole numbers from 0 to {num_classes - 1}: "
            "drop ignored labels, and start counting classes at 0"
        )
    return values.long()


def same_shape(**arrays: Tensor) -> None:
    """Refuse to broadcast: (B,) against (B, 1) would silently compare every pair of inputs."""
    if len({a.shape for a in arrays.values()}) > 1:
        got = ", ".join(f"{name} {tuple(a.shape)}" for name, a in arrays.items())
        raise InputError(f"got shapes {got}; wanted the same shape for all: reshape y to the shape of mean")
