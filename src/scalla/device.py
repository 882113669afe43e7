"""What the steps of a fit ask of their device: passes in lower precision, and copies that nobody waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from scalla.types import InputError

T = TypeVar("T")


def check_autocast(dtype: Any, network_dtype: torch.dtype = torch.float32) -> None:
    """bfloat16 or nothing, of a network in float32."""
    if dtype is None:
        return
    if dtype is torch.float16:
        raise InputError(
            "got autocast=torch.float16, whose gradients underflow unless they are scaled; choose torch.bfloat16, "
            "which has the range of float32"
        )
    if dtype is not torch.bfloat16:
        raise InputError(f"got autocast={dtype!r}; wanted torch.bfloat16, or None for the network's own precision")
    if network_dtype != torch.float32:
        raise InputError(
            f"got autocast={dtype} for a network in {network_dtype}; wanted one in torch.float32, the only one that "
            "autocast lowers. Give autocast=None, or model.float()"
        )


def in_autocast(
    function: Callable[[T], Tensor], dtype: torch.dtype | None, device: torch.device
) -> Callable[[T], Tensor]:
    """`function` under torch.autocast, its result in float32 again; `function` itself where dtype is None."""
    if dtype is None:
        return function

    def lowered(x: T) -> Tensor:
        # No cache: a weight that was cast under no_grad would be used again without its gradient.
        with torch.autocast(device.type, dtype=dtype, cache_enabled=False):
            result = function(x)
        return result.float() if result.dtype == dtype else result

    return lowered


def sent(t: Tensor, device: torch.device) -> Tensor:
    """`t` on `device`. From the CPU to CUDA by page-locked memory: the host goes on before the copy is done."""
    if t.device.type == "cpu" and device.type == "cuda":
        return t.pin_memory().to(device, non_blocking=True)
    return t.to(device)
