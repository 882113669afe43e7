"""Data files with a fault in them: read right or refused by an error of our own, in little memory and time."""

from __future__ import annotations

import gzip
import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_table import FaultTable
from mutations import mutants, outcomes

from children import Child
from scalla.data import read_idx, read_npz
from scalla.types import FileFormatError

SHAPE = (40, 8, 6)
IMAGES = np.random.default_rng(0).integers(0, 40, SHAPE, dtype=np.uint8)
LABELS = np.arange(SHAPE[0])


def idx_file() -> bytes:
    return bytes([0, 0, 8, 3]) + np.array(SHAPE, dtype=">u4").tobytes() + IMAGES.tobytes()


def npz_file() -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, x=IMAGES, y=LABELS)
    return stream.getvalue()


def read_wanted_idx(path: Path) -> np.ndarray:
    return read_idx(path, shape=(None, *SHAPE[1:]))


def are_images(found: np.ndarray) -> bool:
    """Without a checksum changed pixels are pixels, and fewer images may be a smaller file."""
    return found.dtype.itemsize * found.size <= 2 * IMAGES.nbytes and found.shape[1:] == SHAPE[1:]


def is_the_original(found: np.ndarray) -> bool:
    return np.array_equal(found, IMAGES)


def are_the_arrays(found: dict[str, np.ndarray]) -> bool:
    """Each array has a checksum; its name has none."""
    arrays = list(found.values())
    return all(any(np.array_equal(a, good) for good in (IMAGES, LABELS)) for a in arrays) and 1 <= len(arrays) <= 2


#: content, how it is read, what may come of it
FORMATS: dict[str, tuple[bytes, Any, Any]] = {
    "IDX": (idx_file(), read_wanted_idx, are_images),
    "IDX, gzip": (gzip.compress(idx_file(), mtime=0), read_wanted_idx, is_the_original),
    "npz": (npz_file(), read_npz, are_the_arrays),
}


def read_mutants(name: str, count: int, folder: str) -> Counter[str]:
    content, read, is_right = FORMATS[name]
    return outcomes(
        mutants(content, count, seed=len(content)),
        Path(folder) / "file",
        read,
        own_errors=FileFormatError,
        is_right=is_right,
        memory_mb=64,
    )


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("count", [150, pytest.param(3500, marks=pytest.mark.stress)])
def test_mutated_data_files(tmp_path: Path, table: FaultTable, name: str, count: int) -> None:
    """In a process of its own, whose memory is that of the reading alone."""
    counts = Child(read_mutants, name, count, str(tmp_path)).result()
    assert counts["refused"] > count / 3
    outcome = f"{counts['refused']:,} refused, {counts.get('right', 0):,} right"
    table.add(f"damaged data file ({name})", "read right or our own error, at most 64 MB", count=count, outcome=outcome)
