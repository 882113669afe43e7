"""One series or several by name, and which of two arguments belong together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scalla.types import InputError


def named(values: Any, what: str) -> dict[str, Any]:
    """A mapping name → series as it is, anything else as one series without a name."""
    if not isinstance(values, Mapping):
        return {"": values}
    if not values:
        raise InputError(f"got an empty mapping of {what}; wanted at least one: {{'ScaLLA': {what}}}")
    return {str(name): series for name, series in values.items()}


def partner_of(name: str, values: Any, what: str) -> Any:
    """What belongs to the series `name`: from a mapping its own, anything else is shared by all."""
    if not isinstance(values, Mapping):
        return values
    if name not in values:
        have = ", ".join(map(str, values)) or "none"
        raise InputError(
            f"got {what} for {have}, but not for {name or 'a series without a name'}; wanted the same names"
        )
    return values[name]


def described(name: str, number: str) -> str:
    """A legend's entry: "MAP, ECE 0.012", or the number alone."""
    return f"{name}, {number}" if name else number
