"""Options that several commands share, and their values read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from scalla.types import InputError

NETWORK_HELP = "The network: module:factory or file.py:factory, a function or class without arguments, or a network."
DATA_HELP = (
    "A folder of images with a folder for each class, an .npz with x and y, a .csv, an IDX file of images, or "
    "MNIST:train, FashionMNIST:test, …"
)

Network = Annotated[str, typer.Option("--network", "-n", help=NETWORK_HELP)]
NetworkAgain = Annotated[str | None, typer.Option("--network", "-n", help=f"{NETWORK_HELP} The one of the fit.")]
NetworkOptions = Annotated[
    str | None, typer.Option("--network-options", help="Keyword arguments of the factory, as JSON.")
]
Folder = Annotated[Path, typer.Argument(help="Folder that `scalla fit` wrote.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


def numbers(text: str | None, name: str, kind: type[float] = float) -> tuple[float, ...]:
    """0.5 or 0.48,0.45,0.41"""
    try:
        return tuple(kind(part) for part in words(text))
    except ValueError as error:
        raise InputError(f"got {name} {text}; wanted numbers with commas between them") from error


def words(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def image_size(text: str | None) -> tuple[int, int] | None:
    """28 or 28,32"""
    found = [int(n) for n in numbers(text, "--size", int)]
    if len(found) > 2:
        raise InputError(f"got --size {text}; wanted HEIGHT,WIDTH")
    return (found[0], found[-1]) if found else None


def device_named(name: str) -> str:
    """The device, if it works here; under torchrun "cuda" is this process's own."""
    import torch

    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        torch.empty(0, device=name)
        if name.startswith("cuda:"):
            torch.cuda.set_device(name)
    except (RuntimeError, AssertionError) as error:
        first = str(error).strip().split("\n")[0]
        raise InputError(f"got --device {name}, which does not work here: {first}") from error
    return name
