"""Random directions v ∈ R^P with zero mean and unit covariance, so that E[J v vᵀ J'ᵀ] = K_NTK.

Rademacher entries (±1) by default: the variance of one probe's estimate of M = JJᵀ is the Gaussian's,
(tr M)² + ‖M‖_F², less 2‖diag(JᵀJ)‖². A probe is a function of (seed, step) alone: nothing has to be stored
to resume a fit, and every process of a distributed fit draws the same one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from scalla.device import sent
from scalla.types import InputError

Probe: TypeAlias = Literal["rademacher", "gaussian"]
PROBES: tuple[Probe, ...] = ("rademacher", "gaussian")


def draw_probe(like: dict[str, Tensor], *, kind: Probe, seed: int, step: int, index: int = 0) -> dict[str, Tensor]:
    """One direction in parameter space, shaped like the parameters."""
    if kind not in PROBES:
        raise InputError(f"got probe={kind!r}; choose one of {', '.join(PROBES)}")
    # Drawn on the CPU and in float32: the same direction whatever the device and the defaults.
    generator = torch.Generator("cpu").manual_seed(mix_seed(seed, step, index))
    draw = _rademacher if kind == "rademacher" else _gaussian
    return {name: sent(draw(p.numel(), generator), p.device).to(p.dtype).view_as(p) for name, p in like.items()}


def mix_seed(*numbers: int) -> int:
    """One 63-bit seed of several integers (splitmix64), so that neighbouring steps share nothing."""
    state = 0
    for number in numbers:
        state = (state ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


@contextlib.contextmanager
def seeded_globally(seed: int, devices: Iterable[torch.device]) -> Iterator[None]:
    """PyTorch's global generators of the CPU and `devices` start from `seed` inside; outside they are as before."""
    cuda = {d.index for d in devices if d.type == "cuda"}
    generators = [torch.default_generator, *(torch.cuda.default_generators[i] for i in sorted(cuda))]
    states = [g.get_state() for g in generators]
    try:
        for g in generators:
            g.manual_seed(seed)
        yield
    finally:
        for g, state in zip(generators, states, strict=True):
            g.set_state(state)


_MASK = (1 << 64) - 1
# Row b holds the eight signs that the bits of byte b stand for: ten times faster than one draw per entry.
_SIGNS = torch.tensor(
    [[1.0 - 2.0 * (byte >> bit & 1) for bit in range(8)] for byte in range(256)], dtype=torch.float32, device="cpu"
)


def _rademacher(count: int, generator: torch.Generator) -> Tensor:
    # random_() fills 63 of 64 bits: the top byte of each word is left out.
    num_words = -(-count // 56)
    words = torch.empty(num_words, dtype=torch.int64, device="cpu").random_(generator=generator)
    octets = words.view(torch.uint8).view(num_words, 8)[:, :7].reshape(-1)
    return torch.nn.functional.embedding(octets.int(), _SIGNS).view(-1)[:count]


def _gaussian(count: int, generator: torch.Generator) -> Tensor:
    return torch.randn(count, generator=generator, dtype=torch.float32, device="cpu")
