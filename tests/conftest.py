"""One thread, shapes checked at run time, and the guards that every test shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from jaxtyping import install_import_hook

torch.set_num_threads(1)
install_import_hook("scalla", "shapes.checker")


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


@pytest.fixture(autouse=True)
def _process_left_as_found() -> Iterator[None]:
    before = process_state()
    yield
    assert process_state() == before


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1234)
