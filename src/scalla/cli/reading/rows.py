"""A CSV: a line of column names, then a line of numbers for each input."""

from __future__ import annotations

import csv
from pathlib import Path

import torch
from torch import Tensor

from scalla.cli.reading.data import Data, InputOptions, as_labels, in_memory
from scalla.types import FileFormatError, InputError

#: columns that are labels where none is named
USUAL_TARGETS = ("label", "labels", "target", "y", "class")


def read_csv(path: Path, options: InputOptions, likelihood: str) -> Data:
    """Columns of inputs and, where they are in the file, of targets."""
    heads, lines = _lines(path)
    targets = options.targets or tuple(name for name in heads if name.lower() in USUAL_TARGETS)[:1]
    labelled = bool(targets) and set(targets) <= set(heads)
    if not labelled and set(targets) & set(heads):
        raise InputError(f"{path} lacks the columns {sorted(set(targets) - set(heads))} of the targets")
    columns = options.columns or tuple(name for name in heads if name not in targets)
    missing = [name for name in columns if name not in heads]
    if missing or not columns:
        raise InputError(f"{path} has the columns {', '.join(heads)}; wanted {', '.join(missing) or 'inputs, too'}")
    if not options.columns and options.targets and not labelled:
        raise InputError(f"{path} has the columns {', '.join(heads)}; wanted the targets {', '.join(targets)}")
    x = _numbers(path, heads, lines, columns)
    y = as_labels(_numbers(path, heads, lines, targets).squeeze(1), likelihood, path) if labelled else None
    return in_memory(x.float(), y, options, source=path, columns=columns)


def _lines(path: Path) -> tuple[list[str], list[list[str]]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [line for line in csv.reader(file) if line]
    except (UnicodeDecodeError, csv.Error) as error:
        raise FileFormatError(f"{path} cannot be read as CSV in UTF-8: {error}") from error
    if len(lines) < 2:
        raise InputError(f"{path} holds {len(lines)} lines; wanted one of column names and one for each input")
    heads = [name.strip() for name in lines[0]]
    if len(set(heads)) < len(heads):
        raise InputError(f"{path} has two columns of the same name; wanted different ones")
    for number, line in enumerate(lines[1:], 2):
        if len(line) != len(heads):
            raise FileFormatError(f"{path}, line {number}: got {len(line)} values, wanted {len(heads)}")
    return heads, lines[1:]


def _numbers(path: Path, heads: list[str], lines: list[list[str]], columns: tuple[str, ...]) -> Tensor:
    at = [heads.index(name) for name in columns]
    rows = []
    for number, line in enumerate(lines, 2):
        try:
            rows.append([float(line[i]) for i in at])
        except ValueError as error:
            raise InputError(f"{path}, line {number}: {error}; wanted numbers in {', '.join(columns)}") from error
    return torch.tensor(rows, dtype=torch.float64)
