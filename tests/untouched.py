"""All that a method could change of a network or of PyTorch, taken down before and compared after, to the bit."""

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


def process_state() -> dict[str, object]:
    """What of PyTorch is global and must be as it was found."""
    return {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "attention fast path": torch.backends.mha.get_fastpath_enabled(),
        "flash attention": torch.backends.cuda.flash_sdp_enabled(),
        "efficient attention": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "cudnn attention": torch.backends.cuda.cudnn_sdp_enabled(),
        "math attention": torch.backends.cuda.math_sdp_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn deterministic": torch.backends.cudnn.deterministic,
        "cudnn benchmark": torch.backends.cudnn.benchmark,
        "matmul precision": torch.get_float32_matmul_precision(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default device": torch.get_default_device(),
    }
