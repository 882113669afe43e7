import gzip
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from scalla.data import read_idx
from scalla.types import FileFormatError

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx_bytes(array: np.ndarray, dims: tuple[int, ...] | None = None) -> bytes:
    """The file of an array, with `dims` in place of its own where the header shall lie."""
    dims = array.shape if dims is None else dims
    code = CODES[array.dtype.str[1:]]
    return (
        struct.pack(f">HBB{len(dims)}I", 0, code, len(dims), *dims)
        + array.astype(array.dtype.newbyteorder(">")).tobytes()
    )


IMAGES = np.random.default_rng(0).integers(0, 256, (5, 4, 3), dtype=np.uint8)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    array=st.sampled_from(list(CODES)).flatmap(
        lambda code: hnp.arrays(np.dtype(code), hnp.array_shapes(max_dims=4, max_side=5))
    ),
    packed=st.booleans(),
)
def test_round_trip(tmp_path: Path, array: np.ndarray, packed: bool) -> None:
    path = tmp_path / "file"  # told apart by content: the name says nothing
    path.write_bytes(gzip.compress(idx_bytes(array)) if packed else idx_bytes(array))
    values = read_idx(path, shape=array.shape)
    assert values.dtype == array.dtype
    assert values.dtype.isnative
    np.testing.assert_array_equal(values, array)


def test_values_are_writable_and_found_without_a_shape(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(idx_bytes(IMAGES))
    values = read_idx(str(tmp_path / "a"))
    values[0] = 0
    np.testing.assert_array_equal(values[1:], IMAGES[1:])
    assert read_idx(tmp_path / "a", shape=(None, 4, 3)).shape == (5, 4, 3)


WHOLE = gzip.compress(idx_bytes(IMAGES), mtime=0)
DAMAGED = [
    (b"", "got a file of 0 bytes, wanted an IDX header"),
    (b"\x00\x00\x08", "got a file of 3 bytes"),
    (b"<html><body>404", "got the first bytes 3c 68 74 6d.*web page"),
    (b"\x00\x00\x07\x01" + bytes(8), "got the first bytes 00 00 07 01"),
    (b"\x00\x00\x08\x00", "got the first bytes 00 00 08 00"),
    (idx_bytes(IMAGES)[:10], "got 6 bytes of dimensions, wanted 12"),
    (idx_bytes(IMAGES)[:-1], "60 bytes, but the file holds 59"),
    (idx_bytes(IMAGES) + b"\x00", "60 bytes, but the file holds 61"),
    (idx_bytes(IMAGES, (6, 4, 3)), "72 bytes, but the file holds 60"),
    (WHOLE[: len(WHOLE) // 2], "gzip stream that is truncated or damaged.*fetch it again"),
    (WHOLE[:-3], "truncated or damaged"),  # the checksum is missing, the values are not
    (WHOLE[:-8] + bytes([WHOLE[-8] ^ 1]) + WHOLE[-7:], "truncated or damaged"),  # another checksum
    (WHOLE[:30] + bytes([WHOLE[30] ^ 255]) + WHOLE[31:], "truncated or damaged|got more than|ends too early"),
    (WHOLE + b"more", "truncated or damaged"),
    (gzip.compress(idx_bytes(IMAGES) + b"\x00"), "got more than the 60 bytes of values"),
    (gzip.compress(idx_bytes(IMAGES, (6, 4, 3))), "got 60 bytes of values, wanted 72 .* ends too early"),
    (gzip.compress(idx_bytes(IMAGES, (60_000, 4, 3))), "but the file holds at most"),
    (gzip.compress(b""), "got a file of 0 bytes"),
]


@pytest.mark.parametrize(("content", "message"), DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=message) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("dims", [(5, 3, 4), (5, 12), (60,), (4, 4, 3)])
def test_other_dimensions_than_expected(tmp_path: Path, dims: tuple[int, ...]) -> None:
    (tmp_path / "a").write_bytes(idx_bytes(IMAGES.reshape(-1)[: int(np.prod(dims))].reshape(dims)))
    with pytest.raises(FileFormatError, match=r"got dimensions .*, wanted 5 x 4 x 3"):
        read_idx(tmp_path / "a", shape=(5, 4, 3))


def test_a_header_beyond_the_bound_takes_no_memory(tmp_path: Path) -> None:
    lying = idx_bytes(IMAGES, (2**32 - 1,) * 3)
    for content in (lying, gzip.compress(lying)):
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(FileFormatError, match=r"wanted at most 268,435,456 \(max_bytes\)"):
            read_idx(tmp_path / "a")
    (tmp_path / "a").write_bytes(idx_bytes(IMAGES))
    with pytest.raises(FileFormatError, match="60 bytes; wanted at most 59"):
        read_idx(tmp_path / "a", max_bytes=59)


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    # An honest small header, and 200 MB of zeros behind its values.
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    packed = packer.compress(idx_bytes(IMAGES))
    for _ in range(200):
        packed += packer.compress(bytes(1_000_000))
    (tmp_path / "bomb.gz").write_bytes(packed + packer.flush())
    tracemalloc.start()
    with pytest.raises(FileFormatError, match="got more than the 60 bytes"):
        read_idx(tmp_path / "bomb.gz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=60),
    prefix=st.sampled_from([b"", b"\x1f\x8b", b"\x00\x00\x08\x01", WHOLE[:20]]),
)
def test_anything_is_either_read_or_refused(tmp_path: Path, content: bytes, prefix: bytes) -> None:
    (tmp_path / "a").write_bytes(prefix + content)
    try:
        num_read = read_idx(tmp_path / "a", max_bytes=10_000).nbytes
    except FileFormatError:
        num_read = 0  # refused, with our own error and no other
    assert num_read <= len(content)
