"""The context of `scalla fit`: data, or a generator that makes it from the training data."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from scalla import context
from scalla.cli.reading import Data, InputOptions, read_data
from scalla.types import InputError

#: generators that need nothing but training inputs
GENERATORS = {
    name: made
    for name in context.__all__
    if inspect.isclass(made := getattr(context, name))
    and issubclass(made, context.Context)
    and not inspect.isabstract(made)
    and made not in (context.Mixture, context.FeatureExtrapolation)
}


def read_context(source: str, train: Data, options: InputOptions, *, likelihood: str, seed: int) -> Any:
    """A dataset of inputs: `default`, a generator's name, several with + between them, or a source of data."""
    names = source.split("+")
    if not all(name == "default" or name in GENERATORS for name in names):
        if not Path(source).exists() and ":" not in source:
            raise InputError(
                f"got the context {source!r}, which is neither data nor a generator; wanted a path, default, "
                + ", ".join(GENERATORS)
            )
        return read_data(source, options, likelihood=likelihood).dataset
    made: Any = None
    for name in names:
        part = (context.default if name == "default" else GENERATORS[name])(train.dataset, seed=seed)
        made = part if made is None else made + part
    return made
