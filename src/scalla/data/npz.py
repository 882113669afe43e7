"""Read .npz files, and believe nothing that they say: no pickle, no memory before the header has been checked.

A .npz is a zip of .npy files. Of each the header is read first: only an array of plain numbers, within the bound and
possible for a member of this size, is given memory; a stream that unpacks to anything else is an error.
"""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import IO

import numpy as np

from scalla.data.idx import MAX_DEFLATE_RATIO, read_values
from scalla.types import FileFormatError

MAX_BYTES = 1 << 32  # 4 GiB in all arrays together
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_npz(
    path: str | Path, *, names: Collection[str] | None = None, max_bytes: int = MAX_BYTES
) -> dict[str, np.ndarray]:
    """The arrays in a .npz file by name, those of `names` if given; numbers and booleans only."""
    path = Path(path)
    arrays: dict[str, np.ndarray] = {}
    others: list[str] = []
    left = max_bytes
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                if name == member.filename or name in arrays:
                    raise FileFormatError(
                        f"{path}: got a member {member.filename!r}; wanted .npy files of different names, as "
                        "numpy.savez writes them"
                    )
                if names is not None and name not in names:
                    others.append(name)
                    continue
                with archive.open(member) as stream:
                    arrays[name] = _read(stream, path, member, left)
                left -= arrays[name].nbytes
    except FileFormatError:
        raise
    except FileNotFoundError as error:
        raise FileFormatError(f"found no file at {path}; wanted a .npz that numpy.savez wrote") from error
    except (
        zipfile.BadZipFile,
        zlib.error,
        tokenize.TokenError,
        EOFError,
        OSError,
        ValueError,
        TypeError,
        SyntaxError,
        RuntimeError,
    ) as error:
        raise FileFormatError(
            f"{path} is damaged, cut short or not a .npz file ({error}); wanted one that numpy.savez wrote"
        ) from error
    if not arrays:
        wanted = "an array" if names is None else f"one of {', '.join(names)}"
        raise FileFormatError(f"{path} holds {', '.join(others) or 'nothing'}; wanted at least {wanted}")
    return arrays


def _read(stream: IO[bytes], path: Path, member: zipfile.ZipInfo, max_bytes: int) -> np.ndarray:
    version = np.lib.format.read_magic(stream)
    if version not in HEADERS:
        raise FileFormatError(f"{path}: got {member.filename} of .npy version {version}; wanted 1.0 or 2.0")
    shape, fortran_order, dtype = HEADERS[version](stream)
    if dtype.kind not in "biuf":
        raise FileFormatError(
            f"{path}: got {member.filename} of type {dtype}; wanted plain numbers (objects would be pickles, which are "
            "not read)"
        )
    num_bytes = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or num_bytes > max_bytes:
        raise FileFormatError(
            f"{path}: got a header of {shape} values in {member.filename}, {num_bytes:,} bytes; wanted at most "
            f"{max_bytes:,} in all (max_bytes)"
        )
    possible = min(member.file_size, member.compress_size * MAX_DEFLATE_RATIO)
    if num_bytes > possible:
        raise FileFormatError(
            f"{path}: got a header of {shape} values in {member.filename}, {num_bytes:,} bytes, but the file holds at "
            f"most {possible:,}: it is damaged"
        )
    values = read_values(stream, num_bytes, path, str(shape)).view(dtype)
    return values.astype(dtype.newbyteorder("="), copy=False).reshape(shape, order="F" if fortran_order else "C")
