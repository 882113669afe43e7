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
    "rows": "rows of real numbers (N, …)",
}


@dataclass(frozen=True, eq=False)
class Context(Dataset[Any], abc.ABC):
    """Inputs unlike the training data, made of nothing but them.

    `generate(num, seed)` makes any number of them. As a Dataset (`context=` of `fit`) it has `size` of them, made
    when the first is asked for. `a + b` is a mixture in equal shares; a list `[a, b]` makes a group of each.

    Args:
        inputs: training inputs: a tensor, a mapping, a dataset or a loader; labels play no part. For a mapping whose
            inputs have an unusual name, `read_inputs(mapping, dict_key_x=...)`.
        seed: decides everything random.
        size: how many there are as a Dataset; by default as many as training inputs, but at most 10,000.
    """

    #: what it can be made of, and makes
    kinds: ClassVar[tuple[Kind, ...]]

    inputs: Any = field(repr=False)
    seed: int = field(default=0, kw_only=True)
    size: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        name = type(self).__name__
        object.__setattr__(self, "inputs", read_inputs(self.inputs))
        if self.source.kind not in self.kinds:
            raise InputError(
                f"{name} got {WANTED[self.source.kind]}; wanted {' or '.join(WANTED[k] for k in self.kinds)}: "
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
        return {k: v[order] for k, v in made.items()} if isinstance(made, dict) else made[order]

    def _draw(self, num: int, rng: torch.Generator) -> Inputs:
        raise AssertionError("a mixture draws nothing itself")


class ValueContext(Context):
    """Real numbers in the dtype and the shape of the training inputs; images in their range, too."""

    kinds: ClassVar[tuple[Kind, ...]] = ("images", "rows")

    @final
    def _draw(self, num: int, rng: torch.Generator) -> Inputs:
        source = self.source
        values = self._draw_values(num, rng)
        assert values.shape == (num, *source.values.shape[1:]), (type(self).__name__, values.shape)
        if source.kind == "images":
            values = values.clamp(*self._range)
        values = values.to(source.values.dtype)
        if source.columns is None:
            return values
        # What a mapping holds beside its inputs goes with them as some training input has it.
        rows = torch.randint(len(source), (num,), generator=rng)
        return {k: v[rows] for k, v in source.columns.items()} | {source.key: values}

    @abc.abstractmethod
    def _draw_values(self, num: int, rng: torch.Generator) -> Float[Tensor, "num ..."]:
        """Images or rows; images that are out of range are clamped afterwards."""

    @property
    def _wide(self) -> torch.dtype:
        """What it is computed in."""
        return torch.float64 if self.source.values.dtype == torch.float64 else torch.float32

    def _some(self, num: int, rng: torch.Generator) -> Float[Tensor, "num ..."]:
        """Training inputs drawn at random."""
        rows = torch.randint(len(self.source), (num,), generator=rng)
        return self.source.values[rows].to(self._wide)

    def _others(self, inputs: Tensor, rng: torch.Generator, *, candidates: int = 4) -> Float[Tensor, "num ..."]:
        """For each input the most distant of a few training inputs: rarely one of the same class."""
        num = len(inputs)
        drawn = self._some(num * candidates, rng).view(candidates, *inputs.shape)
        distances = (drawn - inputs).flatten(2).square().sum(-1)
        return drawn[distances.argmax(0), torch.arange(num)]

    @cached_property
    def _range(self) -> tuple[Tensor, Tensor]:
        """Least and greatest value of each channel, (channels, 1, 1)."""
        return self.source.low.to(self._wide), self.source.high.to(self._wide)


class ImageContext(ValueContext):
    """Images in the range, the dtype and the shape of the training images."""

    kinds = ("images",)

    @property
    def _side(self) -> tuple[int, int]:
        height, width = self.source.values.shape[2:]
        return height, width

    def _paper(self, num: int, rng: torch.Generator) -> Float[Tensor, "num channels 1 1"]:
        """Backgrounds: what is in a corner of a training image, drawn at random."""
        images = self.source.values
        rows = torch.randint(len(images), (num,), generator=rng)
        down, right = torch.randint(2, (2, num), generator=rng)
        corners = images[rows, :, down * (images.shape[2] - 1), right * (images.shape[3] - 1)]
        return corners.to(self._wide)[..., None, None]

    def _ink(self, paper: Tensor, rng: torch.Generator, *, least: float = 0.5) -> Float[Tensor, "num channels 1 1"]:
        """Colours on the far side of the range: at least `least` of the way there in one channel."""
        low, high = self._range
        far = torch.where(high - paper > paper - low, high, low)
        num, channels = paper.shape[:2]
        hue = torch.rand(num, channels, 1, 1, generator=rng, dtype=self._wide)
        contrast = uniform((num, 1, 1, 1), least, 1, rng, dtype=self._wide)
        return paper + contrast * (hue / hue.amax(1, keepdim=True).clamp_min(1e-6)) * (far - paper)


def uniform(
    shape: tuple[int, ...], low: float, high: float, rng: torch.Generator, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=rng, dtype=dtype)


def concatenate(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], dict):
        return {k: torch.cat([p[k] for p in parts]) for k in parts[0]}
    return torch.cat(list(parts))
