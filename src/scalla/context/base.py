"""What every context has in common: made of the training inputs, a function of the seed, a Dataset, composed by `+`."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import Dataset

from scalla.context.inputs import Kind, TrainingInputs, read_inputs
from scalla.probes import mix_seed
from scalla.types import InputError, Inputs

#: as a Dataset, a context has as many inputs as the training data, but no more than this many, or this many values
MAX_SIZE, MAX_VALUES = 10_000, 2**28
#: values that are worked on at a time
CHUNK_VALUES = 2**18

WANTED = {
    "images": "images (N, channels, height, width)",
    "tokens": "token ids (N, length)",
    "rows": "rows (N, columns)",
}


@dataclass(frozen=True, eq=False)
class Context(Dataset[Any], abc.ABC):
    """Inputs unlike the training data, made of nothing but them.

    `generate(num, seed)` makes any number of them. As a Dataset (`context=` of `fit`) it has `size` of them, made
    when the first is asked for. `a + b` is a mixture in equal shares; a list `[a, b]` makes a group of each.

    Args:
        inputs: training inputs: a tensor, a mapping, a dataset or a loader; labels play no part.
        seed: decides everything random.
        size: how many there are as a Dataset; by default as many as training inputs, but at most 10,000.
    """

    kind: ClassVar[Kind]

    inputs: Any = field(repr=False)
    seed: int = field(default=0, kw_only=True)
    size: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        name = type(self).__name__
        object.__setattr__(self, "inputs", read_inputs(self.inputs))
        if self.source.kind != self.kind:
            raise InputError(
                f"{name} makes {self.kind} and got {WANTED[self.source.kind]}; wanted {WANTED[self.kind]}: "
                f"scalla.context.default(inputs) takes what suits them"
            )
        if self.size is not None and self.size < 1:
            raise InputError(f"got size={self.size}; wanted at least 1 input")

    @property
    def source(self) -> TrainingInputs:
        assert isinstance(self.inputs, TrainingInputs)
        return self.inputs

    @final
    def generate(self, num: int, seed: int | None = None) -> Any:
        """`num` inputs: a tensor, or a mapping if the training inputs are mappings."""
        if num < 1:
            raise InputError(f"got num={num}; wanted at least 1 input")
        return self._made(num, self.seed if seed is None else seed)

    def _made(self, num: int, seed: int) -> Inputs:
        at_a_time = max(1, min(1024, CHUNK_VALUES // max(1, self.source.values[0].numel())))
        parts = []
        for chunk, start in enumerate(range(0, num, at_a_time)):
            rng = torch.Generator().manual_seed(mix_seed(seed, chunk))
            parts.append(self._draw(min(at_a_time, num - start), rng))
        return concatenate(parts)

    @abc.abstractmethod
    def _draw(self, num: int, rng: torch.Generator) -> Inputs:
        """`num` inputs that depend on `rng` alone."""

    def __add__(self, other: Any) -> Mixture:  # type: ignore[override]
        if not isinstance(other, Context):
            raise InputError(
                f"got a context + {type(other).__name__}; only contexts can be added: for a group of its own, "
                "give fit a list, context=[a, b]"
            )
        parts = [p for c in (self, other) for p in (c.parts if isinstance(c, Mixture) else (c,))]
        return Mixture(tuple(parts), seed=self.seed)

    # -- as a Dataset --

    def __len__(self) -> int:
        if self.size is not None:
            return self.size
        return max(1, min(len(self.source), MAX_SIZE, MAX_VALUES // max(1, self.source.values[0].numel())))

    @cached_property
    def _all(self) -> Any:
        return self.generate(len(self))

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"got index {index} of a context of {len(self)} inputs")
        return {k: v[index] for k, v in self._all.items()} if isinstance(self._all, dict) else self._all[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        if isinstance(self._all, dict):
            return [self[i] for i in indices]
        return list(self._all[torch.as_tensor(indices)])


@final
@dataclass(frozen=True, eq=False)
class Mixture(Context):
    """Several contexts in equal shares, in random order: `Mixture((a, b))`, or `a + b`."""

    @property
    def parts(self) -> tuple[Context, ...]:
        return self.inputs

    @property
    def source(self) -> TrainingInputs:
        return self.parts[0].source

    def __post_init__(self) -> None:
        if not isinstance(self.inputs, tuple | list) or not self.inputs:
            raise InputError("got no contexts; wanted at least one: Mixture((a, b)), or a + b")
        object.__setattr__(self, "inputs", tuple(self.inputs))
        shapes = {tuple(p.source.values.shape[1:]) for p in self.parts}
        kinds = {p.source.kind for p in self.parts}
        forms = {p.source.columns is None for p in self.parts}
        if max(len(kinds), len(forms), len(shapes)) > 1:
            given = ", ".join(f"{type(p).__name__} {tuple(p.source.values.shape[1:])}" for p in self.parts)
            raise InputError(f"got a mixture of {given}; wanted contexts of inputs of one shape")
        if self.size is not None and self.size < 1:
            raise InputError(f"got size={self.size}; wanted at least 1 input")

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.parts))

    def _made(self, num: int, seed: int) -> Inputs:
        shares = [num // len(self.parts) + (i < num % len(self.parts)) for i in range(len(self.parts))]
        pairs = zip(self.parts, shares, strict=True)
        # Each part has a seed of its own: the same would have them start from the same training inputs.
        made = concatenate([p._made(n, mix_seed(seed, p.seed, i)) for i, (p, n) in enumerate(pairs) if n])
        order = torch.randperm(num, generator=torch.Generator().manual_seed(mix_seed(seed, len(self.parts))))
        return {k: v[order] for k, v in made.items()} if isinstance(made, dict) else made[order]  # type: ignore[index]

    def _draw(self, num: int, rng: torch.Generator) -> Inputs:
        raise AssertionError("a mixture draws nothing itself")


class ImageContext(Context):
    """Images in the range, the dtype and the shape of the training images."""

    kind = "images"

    @final
    def _draw(self, num: int, rng: torch.Generator) -> Tensor:
        images = self._draw_images(num, rng)
        assert images.shape == (num, *self.source.values.shape[1:]), (type(self).__name__, images.shape)
        low, high = self._range
        return images.clamp(low, high).to(self.source.values.dtype)

    @abc.abstractmethod
    def _draw_images(self, num: int, rng: torch.Generator) -> Float[Tensor, "num channels height width"]:
        """Images; what is out of range is clamped afterwards."""

    def _some(self, num: int, rng: torch.Generator) -> Float[Tensor, "num channels height width"]:
        """Training images drawn at random, in float32 (or float64 if they are)."""
        rows = torch.randint(len(self.source), (num,), generator=rng)
        images = self.source.values[rows]
        return images if images.dtype == torch.float64 else images.float()

    @cached_property
    def _range(self) -> tuple[Tensor, Tensor]:
        """Least and greatest value of each channel, (channels, 1, 1)."""
        wide = torch.float64 if self.source.values.dtype == torch.float64 else torch.float32
        return self.source.low.to(wide), self.source.high.to(wide)

    def _luminance(self, images: Tensor) -> Float[Tensor, "num height width"]:
        """The mean of the channels, each on the scale of its range."""
        low, high = self._range
        return ((images - low) / (high - low).clamp_min(1e-12)).mean(1)


def concatenate(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], dict):
        return {k: torch.cat([p[k] for p in parts]) for k in parts[0]}
    return torch.cat(list(parts))
