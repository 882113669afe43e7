"""Features of many classes as a product, g(x) = A M(x), so that nothing has C·m·(hidden width) numbers.

A ∈ R^{C×r} places the classes, M(x) ∈ R^{r×m} comes from a head of r·m outputs. Every weight before the last
layer W ∈ R^{C×h} acts on the outputs through W alone, J(x) = W Ĵ(x), so classes that W takes for alike have
like rows: A starts as W R with a random R ∈ R^{h×r}, for which E[A Aᵀ] ∝ W Wᵀ, and is trained with the rest.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scalla.types import InputError

#: up to so many classes the head is dense, if nothing else is asked for
MAX_DENSE_CLASSES = 64
#: r beyond that
DEFAULT_CLASS_RANK = 32


class ClassFactor(nn.Module):
    """M(x), flat, → A M(x)."""

    def __init__(self, num_outputs: int, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_outputs, rank))

    def initialise(self, last_layer: Float[Tensor, "C ..."], generator: torch.Generator) -> None:
        """A = W R, scaled to rows of mean square length 1."""
        with torch.no_grad():
            w = last_layer.detach().flatten(1).to(self.weight)
            directions = torch.randn(
                w.shape[1], self.weight.shape[1], generator=generator, dtype=torch.float32, device="cpu"
            ).to(w)
            a = w @ directions
            self.weight.copy_(a / a.square().sum(-1).mean().sqrt().clamp_min(1e-12))

    def forward(self, flat: Float[Tensor, "B rm"]) -> Float[Tensor, "B C m"]:
        return torch.matmul(self.weight, flat.unflatten(-1, (self.weight.shape[1], -1)))


def class_rank_of(asked: int | None, num_outputs: int) -> int | None:
    """r, or None for a dense head; `asked` is the user's `class_rank`."""
    if asked is None:
        return DEFAULT_CLASS_RANK if num_outputs > MAX_DENSE_CLASSES else None
    if not isinstance(asked, int) or isinstance(asked, bool) or not 1 <= asked <= num_outputs:
        raise InputError(
            f"got class_rank={asked!r}; wanted a whole number from 1 to C = {num_outputs} ({num_outputs} is a dense "
            f"head), or None: dense up to {MAX_DENSE_CLASSES} classes, {DEFAULT_CLASS_RANK} beyond"
        )
    return asked if asked < num_outputs else None
