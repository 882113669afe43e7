import io
import os
import pickle
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from scalla.data import read_npz
from scalla.types import FileFormatError

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 4, 3), dtype=np.uint8)
LABELS = np.arange(5)


def npy(array: np.ndarray, shape: tuple[int, ...] | None = None) -> bytes:
    """The .npy of an array, with another shape in its header if one is given."""
    stream = io.BytesIO()
    header = np.lib.format.header_data_from_array_1_0(array)
    np.lib.format.write_array_header_1_0(stream, {**header, "shape": array.shape if shape is None else shape})
    return stream.getvalue() + array.tobytes()


def archive(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("dtype", ["?", "u1", "<i8", ">i4", "<f4", "f8"])
def test_round_trip(tmp_path: Path, save: object, dtype: str) -> None:
    arrays = {"x": IMAGES.astype(dtype), "y": np.asfortranarray(IMAGES[0].astype(dtype)), "one": np.array(3, dtype)}
    save(tmp_path / "a.npz", **arrays, empty=np.zeros((0, 2), dtype))  # type: ignore[operator]
    found = read_npz(str(tmp_path / "a.npz"))
    assert list(found) == [*arrays, "empty"]
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype.isnative
    assert found["empty"].shape == (0, 2)


def test_pickled_objects_are_not_read(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    np.savez(tmp_path / "a.npz", x=np.array([Trap()], dtype=object))
    with pytest.raises(FileFormatError, match=r"got x.npy of type object; wanted plain numbers"):
        read_npz(tmp_path / "a.npz")
    archive(tmp_path / "b.npz", {"x.npy": pickle.dumps(Trap())})
    with pytest.raises(FileFormatError, match=r"damaged, cut short or not a .npz file"):
        read_npz(tmp_path / "b.npz")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({}, "holds nothing; wanted at least an array"),
        ({"x": npy(IMAGES)}, "got a member 'x'"),
        ({"x.npy": npy(IMAGES, (5, 4, 4))}, "ends too early|holds at most"),
        ({"x.npy": npy(IMAGES, (5, 4, 2))}, "got more than the 40 bytes"),
        ({"x.npy": npy(IMAGES, (-5, 4, 3))}, "wanted at most"),
        ({"x.npy": npy(IMAGES, (2**40, 4, 3))}, "wanted at most 4,294,967,296 in all"),
        ({"x.npy": npy(np.array(["text"]))}, "of type <U4; wanted plain numbers"),
        ({"x.npy": b"<html>"}, "damaged, cut short or not a .npz file"),
        ({"x.npy": b""}, "damaged, cut short or not a .npz file"),
        ({"x.npy": npy(IMAGES), "y.npy": npy(LABELS, (2**28,))}, "but the file holds at most"),
    ],
)
def test_damaged_members(tmp_path: Path, members: dict[str, bytes], message: str) -> None:
    with pytest.raises(FileFormatError, match=message) as caught:
        read_npz(archive(tmp_path / "a.npz", members))
    assert str(tmp_path / "a.npz") in str(caught.value)


def test_arrays_that_are_not_asked_for_are_not_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=IMAGES, names=np.array(["a", "b"]))
    assert list(read_npz(tmp_path / "a.npz", names=("x", "y"))) == ["x"]
    with pytest.raises(FileFormatError, match=r"holds x, names; wanted at least one of images, labels"):
        read_npz(tmp_path / "a.npz", names=("images", "labels"))


def test_no_zip_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="found no file"):
        read_npz(tmp_path / "none.npz")
    (tmp_path / "a.npz").write_bytes(npy(IMAGES))
    with pytest.raises(FileFormatError, match="File is not a zip file"):
        read_npz(tmp_path / "a.npz")


def test_a_zip_bomb_takes_no_memory(tmp_path: Path) -> None:
    """An honest small header and 50 MB behind it; and a header that speaks of all 50 MB, over the bound."""
    zeros = bytes(50_000_000)
    archive(tmp_path / "small.npz", {"x.npy": npy(IMAGES) + zeros})
    archive(tmp_path / "large.npz", {"x.npy": npy(np.zeros(0, np.uint8), (len(zeros),)) + zeros})
    del zeros
    tracemalloc.start()
    with pytest.raises(FileFormatError, match="got more than the 60 bytes"):
        read_npz(tmp_path / "small.npz")
    with pytest.raises(FileFormatError, match=r"50,000,000 bytes; wanted at most 1,000,000"):
        read_npz(tmp_path / "large.npz", max_bytes=1_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6_000_000


def test_the_bound_is_on_all_arrays_together(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=IMAGES, y=IMAGES)
    assert len(read_npz(tmp_path / "a.npz", max_bytes=120)) == 2
    with pytest.raises(FileFormatError, match="60 bytes; wanted at most 59 in all"):
        read_npz(tmp_path / "a.npz", max_bytes=119)
