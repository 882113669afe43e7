"""All that a method could change of a network, taken down before and compared after, to the bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def state_of(model: nn.Module) -> dict[str, Any]:
    return {
        "tensors": {k: v.clone() for k, v in model.state_dict().items()},
        "identity": [id(t) for t in (*model.parameters(), *model.buffers())],
        "modes": [m.training for m in model.modules()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "attributes": {k: sorted(vars(m)) for k, m in model.named_modules()},
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()],
    }


def assert_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    after = state_of(model)
    for what in ("identity", "modes", "requires_grad", "attributes", "hooks"):
        assert after[what] == before[what], what
    assert after["tensors"].keys() == before["tensors"].keys()
    assert all(same_bits(after["tensors"][k], v) for k, v in before["tensors"].items())
    for found, wanted in zip(after["grads"], before["grads"], strict=True):
        assert (found is None) == (wanted is None)
        assert found is None or same_bits(found, wanted)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal to the bit: zeros of another sign differ, NaN equals itself."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().flatten().view(torch.uint8), right.contiguous().flatten().view(torch.uint8))
