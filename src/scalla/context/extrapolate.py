"""Extrapolation: past the training data, among the inputs or among the network's features."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scalla.context.base import ValueContext, uniform
from scalla.functional import FrozenNetwork, batch_size, find_head, first_rows
from scalla.types import InputError, Inputs


@final
@dataclass(frozen=True, eq=False)
class Extrapolation(ValueContext):
    """a + s (b − a) of two unlike training inputs, beyond the segment: s or 1 − s ~ U(*reach).

    Of images what leaves their range is clamped; rows may go anywhere.
    """

    reach: tuple[float, float] = field(default=(1.5, 3.0), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 < self.reach[0] <= self.reach[1]:
            raise InputError(f"got reach={self.reach}; wanted (least, most) with 1 < least ≤ most")

    def _draw_values(self, num: int, rng: torch.Generator) -> Float[Tensor, "num ..."]:
        a = self._some(num, rng)
        b = self._others(a, rng)
        s = uniform((num, *[1] * (a.ndim - 1)), *self.reach, rng, dtype=a.dtype)
        return a + s * (b - a)


@final
@dataclass(frozen=True, eq=False)
class FeatureExtrapolation(ValueContext):
    """Training inputs moved until the network's penultimate features φ have left those of the training data.

    x ← x − ε r ∇/rms(∇) of ½‖φ(x) − t‖², `num_steps` times from x = a, with the goal t = φ(a) + s (φ(a) − φ(b)) past
    a, s ~ U(0.5, 2), or between a and b, s ~ U(−0.7, −0.3); b is an unlike training input, r the range of the data.

    Args:
        network: the trained network; it is never changed.
        num_steps: steps of the descent.
        step: ε, the root mean square of what a step changes, as a share of the range.
    """

    network: nn.Module = field(repr=False)
    num_steps: int = field(default=5, kw_only=True)
    step: float = field(default=0.05, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.network, nn.Module):
            raise InputError(f"got a network of type {type(self.network).__name__}; wanted a torch.nn.Module")
        if self.num_steps < 1 or not self.step > 0:
            raise InputError(f"got num_steps={self.num_steps} and step={self.step}; wanted both to be positive")

    def _draw_values(self, num: int, rng: torch.Generator) -> Float[Tensor, "num ..."]:
        a = self._some(num, rng)
        others = self._others(a, rng)
        past = uniform((num, 1), 0.5, 2.0, rng)
        between = uniform((num, 1), -0.7, -0.3, rng)
        s = torch.where(torch.rand(num, 1, generator=rng) < 0.5, past, between)
        with torch.no_grad():
            from_b, from_a = self._features(others), self._features(a)
            goal = from_a + s.to(from_a) * (from_a - from_b)
        low, high = self._bounds
        x = a
        for _ in range(self.num_steps):
            x = x.requires_grad_()
            with torch.enable_grad():
                distance = 0.5 * (self._features(x) - goal).square().sum()
                (gradient,) = torch.autograd.grad(distance, x)
            size = gradient.flatten(1).square().mean(1).sqrt().clamp_min(torch.finfo(x.dtype).tiny)
            x = x.detach() - self.step * (high - low) * gradient / size.view(-1, *[1] * (x.ndim - 1))
            if self.source.kind == "images":
                x = x.clamp(low, high)
        return x

    def _features(self, values: Tensor) -> Float[Tensor, "num D"]:
        """φ, with gradients where they are on."""
        network, num_outputs = self._tapped
        x: Inputs = values
        if self.source.columns is not None:
            others = {k: v for k, v in self.source.columns.items() if k != self.source.key}
            if others:
                raise InputError(
                    f"got a mapping with {', '.join(sorted(others))} beside {self.source.key!r}; the network can be "
                    "followed for inputs of one tensor only: take another context"
                )
            x = {self.source.key: values}
        return network.raw(network.prepare(x))[:, num_outputs:].flatten(1)

    @cached_property
    def _tapped(self) -> tuple[FrozenNetwork, int]:
        """The network with φ beside its C outputs, and C."""
        source = self.source
        x: Inputs = source.values if source.columns is None else {source.key: source.values}
        x = first_rows(x, 2)
        plain = FrozenNetwork(self.network)
        outputs = plain(x)
        if outputs.ndim != 2 or len(outputs) != batch_size(x):
            raise InputError(f"got outputs of shape {tuple(outputs.shape)}; wanted a network x -> (B, C)")
        return FrozenNetwork(self.network, tap=find_head(plain, x)), outputs.shape[1]

    @cached_property
    def _bounds(self) -> tuple[Tensor, Tensor]:
        """Least and greatest training value of each channel (images) or column (rows)."""
        if self.source.kind == "images":
            return self._range
        values = self.source.values.to(self._wide)
        return values.amin(0), values.amax(0)
