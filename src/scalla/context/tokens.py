"""Token ids: the same words in another order, and other words."""

from __future__ import annotations

import abc
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from scalla.context.base import Context, uniform
from scalla.types import InputError, Inputs


@dataclass(frozen=True, eq=False)
class TokenContext(Context):
    """Token ids; the attention mask and all else that a mapping holds stay those of the training input.

    `keep`: ids that stay where they are: [CLS] and [SEP], and the padding of inputs without an attention mask. What
    `attention_mask` masks stays in any case.
    """

    kinds = ("tokens",)
    keep: Collection[int] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not bool(self._movable(self.source.values, self._mask).any()):
            raise InputError(f"every token is masked or in keep={sorted(self.keep)}; wanted some that can be changed")

    @final
    def _draw(self, num: int, rng: torch.Generator) -> Inputs:
        source = self.source
        rows = torch.randint(len(source), (num,), generator=rng)
        tokens = source.values[rows]
        mask = self._mask
        made = self._changed(tokens, self._movable(tokens, None if mask is None else mask[rows]), rng)
        if source.columns is None:
            return made
        return {k: v[rows] for k, v in source.columns.items()} | {source.key: made}

    @abc.abstractmethod
    def _changed(
        self, tokens: Int[Tensor, "num length"], movable: Bool[Tensor, "num length"], rng: torch.Generator
    ) -> Int[Tensor, "num length"]:
        """Other tokens in the places that may change."""

    @property
    def _mask(self) -> Tensor | None:
        mask = None if self.source.columns is None else self.source.columns.get("attention_mask")
        # A mask of pairs of tokens (N, length, length) says nothing about single ones.
        return mask if mask is not None and mask.shape == self.source.values.shape else None

    def _movable(self, tokens: Tensor, mask: Tensor | None) -> Bool[Tensor, "num length"]:
        movable = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask != 0
        return movable & ~torch.isin(tokens, torch.tensor(sorted(self.keep), dtype=tokens.dtype))


@final
@dataclass(frozen=True, eq=False)
class TokenShuffle(TokenContext):
    """The tokens of a training input in a random order: a bag of the same words."""

    def _changed(self, tokens: Tensor, movable: Tensor, rng: torch.Generator) -> Tensor:
        # Two stable sorts put the movable places first, once in their own order and once in a random one; the others
        # follow in the same order in both.
        places = torch.sort((~movable).int(), dim=1, stable=True).indices
        keys = torch.where(movable, torch.rand(tokens.shape, generator=rng), torch.tensor(2.0))
        drawn = torch.sort(keys, dim=1, stable=True).indices
        return tokens.scatter(1, places, tokens.gather(1, drawn))


@final
@dataclass(frozen=True, eq=False)
class TokenReplace(TokenContext):
    """Training inputs with a share U(*shares) of their tokens drawn anew, uniformly from the ids in use."""

    shares: tuple[float, float] = field(default=(0.5, 1.0), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.shares[0] <= self.shares[1] <= 1:
            raise InputError(f"got shares={self.shares}; wanted (least, most) with 0 < least ≤ most ≤ 1")

    def _changed(self, tokens: Tensor, movable: Tensor, rng: torch.Generator) -> Tensor:
        vocabulary = self._vocabulary
        new = vocabulary[torch.randint(len(vocabulary), tokens.shape, generator=rng)]
        share = uniform((len(tokens), 1), *self.shares, rng)
        return torch.where(movable & (torch.rand(tokens.shape, generator=rng) < share), new, tokens)

    @cached_property
    def _vocabulary(self) -> Int[Tensor, " V"]:
        tokens = self.source.values
        return tokens[self._movable(tokens, self._mask)].unique()
