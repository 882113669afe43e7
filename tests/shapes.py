"""Runtime checks of tensor shapes: every `Float[Tensor, "B C"]` of a signature, and no other annotation.

What a user may get wrong (a word, a number, a type) is the library's own to refuse, in words that tests match.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beartype import beartype

_SHAPES = ("Float[", "Num[", "Int[", "Bool[", "Shaped[")


def checker(function: Callable[..., Any]) -> Callable[..., Any]:
    """What jaxtyping's import hook decorates a function with."""
    function.__annotations__ = {
        name: annotation for name, annotation in function.__annotations__.items() if _speaks_of_shape(annotation)
    }
    return beartype(function)


def _speaks_of_shape(annotation: object) -> bool:
    return isinstance(annotation, str) and any(word in annotation for word in _SHAPES)
