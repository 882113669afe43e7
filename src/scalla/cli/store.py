"""A folder that `scalla fit` wrote: what `save_pretrained` writes, and how the command line read its inputs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from scalla.checkpoint import replacing
from scalla.cli.network import read_network
from scalla.cli.reading import InputOptions
from scalla.method import ScaLLA
from scalla.types import FileFormatError, InputError

NAME, SCHEMA = "command.json", 1


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """What a later command needs to know of the fit."""

    network: str
    options: str | None
    inputs: InputOptions
    input_shape: tuple[int, ...]
    input_dtype: str
    classes: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        content = {"schema": SCHEMA, **asdict(self)}
        with replacing(folder / NAME) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> Fitted:
        path = folder / NAME
        if not path.is_file():
            raise InputError(f"{folder} holds no {NAME}; wanted a folder that `scalla fit` wrote")
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored.pop("schema") != SCHEMA:
                raise ValueError("it is of another version of scalla")
            inputs = InputOptions.from_json(stored.pop("inputs"))
            values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}
            return Fitted(inputs=inputs, **values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FileFormatError(f"{path} cannot be read: {error}") from error

    def example(self) -> torch.Tensor:
        """Two inputs of the right shape: zeros."""
        return torch.zeros((2, *self.input_shape), dtype=getattr(torch, self.input_dtype))


def load_fitted(folder: Path, network: str | None, options: str | None, device: str) -> tuple[ScaLLA, Fitted]:
    """The ScaLLA and what is known of its fit. Only code that the user names is run."""
    fitted = Fitted.read(folder)
    if network is None:
        raise InputError(
            f"{folder} holds the network's weights but not its code; it was fitted to {fitted.network}: give that "
            f"again, --network {fitted.network}"
        )
    model = read_network(network, options=options if options is not None else fitted.options)
    return ScaLLA.from_pretrained(folder, model).to(device), fitted
