"""Which reader a source wants."""

from __future__ import annotations

from pathlib import Path

from scalla.cli.reading.arrays import read_arrays, read_idx_files
from scalla.cli.reading.data import Data, InputOptions, as_labels, in_memory
from scalla.cli.reading.folder import read_folder
from scalla.cli.reading.rows import read_csv
from scalla.data.download import SOURCES
from scalla.data.images import load
from scalla.types import InputError

WANTED = "wanted a folder of images, an .npz, a .csv, an IDX file, or NAME:SPLIT of " + ", ".join(SOURCES)


def read_data(
    source: str, options: InputOptions, *, likelihood: str = "classification", labels: Path | None = None
) -> Data:
    """Inputs and, where there are any, labels. `labels` is the second file of a pair of IDX files."""
    name, _, split = source.partition(":")
    if name in SOURCES:
        images = load(name, split or "train")
        return in_memory(images.images, images.labels, options, source=source)
    path = Path(source)
    if labels is not None and (path.is_dir() or path.suffix in (".npz", ".csv")):
        raise InputError(f"got a file of labels for {source}, which has its own; wanted one for IDX files only")
    if path.is_dir():
        return read_folder(path, options, likelihood)
    if not path.is_file():
        raise InputError(f"found nothing at {source}; {WANTED}")
    if path.suffix == ".csv":
        return read_csv(path, options, likelihood)
    if path.suffix == ".npz":
        x, y = read_arrays(path)
    elif "idx" in path.name or path.suffix in (".gz", ""):
        x, y = read_idx_files(path, labels)
    else:
        raise InputError(f"got {source}; {WANTED}")
    return in_memory(x, None if y is None else as_labels(y, likelihood, source), options, source=source)
