"""Read IDX files, the format of MNIST and its relatives, and believe nothing that they say.

    bytes 0-1  zero     byte 2  type of the values     byte 3  number of dimensions
    then one big-endian uint32 for each dimension, then the values in row-major order

The header is read first. Only when its dimensions are those wanted, within a bound, and possible for a file
of this size, is memory taken for exactly that many bytes; what does not fit into them is an error.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from io import BufferedIOBase
from pathlib import Path
from typing import IO

import numpy as np

from scalla.types import FileFormatError

TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
GZIP_MAGIC = b"\x1f\x8b"
#: deflate cannot expand a byte into more than this (a length of 258 from 2 bits)
MAX_DEFLATE_RATIO = 1032
MAX_BYTES = 1 << 28  # 256 MiB: five times the largest file of these data sets
CHUNK = 1 << 20


def read_idx(
    path: str | Path, *, shape: tuple[int | None, ...] | None = None, max_bytes: int = MAX_BYTES
) -> np.ndarray:
    """The array in an IDX file, gzipped or plain (told apart by its first bytes, not by its name).

    `shape` is what is expected, with None for a dimension that may be anything.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            gzipped = file.read(2) == GZIP_MAGIC
            file.seek(0)
            if not gzipped:
                return _read(file, path, shape, max_bytes, max_content=size, exact=True)
            with gzip.GzipFile(fileobj=file) as unpacked:
                content = size * MAX_DEFLATE_RATIO
                return _read(unpacked, path, shape, max_bytes, max_content=content, exact=False)
    except (EOFError, gzip.BadGzipFile, zlib.error, struct.error) as error:
        raise FileFormatError(
            f"{path}: got a gzip stream that is truncated or damaged ({error}); "
            "wanted a complete one: delete the file and fetch it again"
        ) from error


def _read(
    stream: BufferedIOBase,
    path: Path,
    shape: tuple[int | None, ...] | None,
    max_bytes: int,
    *,
    max_content: int,
    exact: bool,
) -> np.ndarray:
    dtype, dims, header_size = _read_header(stream, path)
    if shape is not None and not _fits(dims, shape):
        wanted = " x ".join("any" if n is None else str(n) for n in shape)
        raise FileFormatError(
            f"{path}: got dimensions {_times(dims)}, wanted {wanted}: "
            "this is another file than its name says, or its header is damaged"
        )
    num_bytes = math.prod(dims) * dtype.itemsize
    if num_bytes > max_bytes:
        raise FileFormatError(
            f"{path}: got a header of {_times(dims)} values, {num_bytes:,} bytes; wanted at most "
            f"{max_bytes:,} (max_bytes): its header is damaged, or it is another file than its name says"
        )
    possible = max_content - header_size
    if num_bytes > possible or (exact and num_bytes < possible):
        raise FileFormatError(
            f"{path}: got a header of {_times(dims)} values, {num_bytes:,} bytes, but the file holds "
            f"{'' if exact else 'at most '}{possible:,}: it is damaged, fetch it again"
        )
    values = read_values(stream, num_bytes, path, _times(dims))
    return values.view(dtype).astype(dtype.newbyteorder("="), copy=False).reshape(dims)


def read_values(stream: IO[bytes] | BufferedIOBase, num_bytes: int, path: Path, shape: str) -> np.ndarray:
    """Exactly so many bytes, which must be the last ones; memory is taken for these alone."""
    values = np.empty(num_bytes, dtype=np.uint8)
    filled = 0
    while filled < num_bytes:
        chunk = stream.read(min(CHUNK, num_bytes - filled))
        if not chunk:
            raise FileFormatError(
                f"{path}: got {filled:,} bytes of values, wanted {num_bytes:,} for {shape}: "
                "the file ends too early, fetch it again"
            )
        values[filled : filled + len(chunk)] = np.frombuffer(chunk, dtype=np.uint8)
        filled += len(chunk)
    # One byte more: there must be none; at the end of a compressed stream this also checks its checksum.
    if stream.read(1):
        raise FileFormatError(
            f"{path}: got more than the {num_bytes:,} bytes of values that {shape} stand for; "
            "wanted nothing after them: the file is damaged, fetch it again"
        )
    return values


def _read_header(stream: BufferedIOBase, path: Path) -> tuple[np.dtype, tuple[int, ...], int]:
    magic = stream.read(4)
    if len(magic) < 4:
        raise FileFormatError(
            f"{path}: got a file of {len(magic)} bytes, wanted an IDX header of at least 4: fetch it again"
        )
    zero, code, num_dims = struct.unpack(">HBB", magic)
    if zero != 0 or code not in TYPES or num_dims == 0:
        raise FileFormatError(
            f"{path}: got the first bytes {magic.hex(' ')}, wanted those of an IDX file "
            "(00 00, a type, a number of dimensions; 00 00 08 03 for images): this is another kind of file, "
            "perhaps the web page of an error"
        )
    raw = stream.read(4 * num_dims)
    if len(raw) < 4 * num_dims:
        raise FileFormatError(
            f"{path}: got {len(raw)} bytes of dimensions, wanted {4 * num_dims}: "
            "the file ends within its header, fetch it again"
        )
    return np.dtype(TYPES[code]), struct.unpack(f">{num_dims}I", raw), 4 + len(raw)


def _fits(dims: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    return len(dims) == len(shape) and all(want is None or got == want for got, want in zip(dims, shape, strict=True))


def _times(dims: tuple[int, ...]) -> str:
    return " x ".join(map(str, dims))
