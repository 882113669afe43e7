import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from scalla.data import images as images_module
from scalla.data import load
from scalla.data.download import SOURCES
from scalla.types import FileFormatError, InputError

#: images in the made files; the loader is told that this is all there is
NUM = {"train": 12, "test": 5}
PREFIX = {"train": "train", "test": "t10k"}


@pytest.fixture(autouse=True)
def empty_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No data anywhere, no network, and data sets of a few images."""
    for name in ("SCALLA_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SCALLA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SCALLA_OFFLINE", "1")
    monkeypatch.setattr(images_module, "NUM_IMAGES", NUM)
    monkeypatch.setattr(images_module, "SYSTEM_FOLDERS", {"FashionMNIST": tmp_path / "system"})


def make(folder: Path, split: str = "train", *, seed: int = 0, packed: bool = True, **change: int) -> np.ndarray:
    """Write the two files of a split; `change`: other numbers of images, labels, classes, another type."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (change.get("images", NUM[split]), 28, 28), dtype=np.uint8)
    labels = np.arange(change.get("labels", NUM[split]), dtype=np.uint8) % change.get("classes", 10)
    code = change.get("code", 8)
    for name, array in (("images-idx3", pixels), ("labels-idx1", labels)):
        content = struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape) + array.tobytes()
        suffix = ".gz" if packed else ""
        path = folder / f"{PREFIX[split]}-{name}-ubyte{suffix}"
        path.write_bytes(gzip.compress(content) if packed else content)
    return pixels


@pytest.mark.parametrize("name", list(SOURCES))
@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("packed", [True, False])
def test_values(tmp_path: Path, name: str, split: str, packed: bool) -> None:
    pixels = make(tmp_path / name / "raw", split, packed=packed)
    data = load(name, split, tmp_path)
    assert (data.name, data.split, len(data)) == (name, split, NUM[split])
    assert data.images.dtype == torch.float32
    assert data.images.shape == (NUM[split], 1, 28, 28)
    torch.testing.assert_close(data.images[:, 0], torch.from_numpy(pixels).float() / 255)
    assert data.labels.dtype == torch.int64
    assert data.labels.tolist() == [i % 10 for i in range(NUM[split])]
    image, label = data.dataset()[3]
    assert torch.equal(image, data.images[3])
    assert int(label) == 3
    raw = load(name, split, str(tmp_path), as_uint8=True)
    assert raw.images.dtype == torch.uint8
    assert np.array_equal(raw.images[:, 0], pixels)


def test_checksums_are_those_of_the_files(tmp_path: Path) -> None:
    make(tmp_path / "MNIST" / "raw")
    files = load("MNIST", "train", tmp_path).files
    assert [file.path.name for file in files] == ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"]
    for file in files:
        content = file.path.read_bytes()
        assert file.md5 == hashlib.md5(content).hexdigest()
        assert file.sha256 == hashlib.sha256(content).hexdigest()


def test_order_of_the_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the places from the last to the first: each new one wins."""
    monkeypatch.setenv("SCALLA_DATA", str(tmp_path / "env"))
    (tmp_path / "env").mkdir()
    (tmp_path / "root").mkdir()
    folders = ["cache/FashionMNIST/raw", "system", "env/FashionMNIST", "env/FashionMNIST/raw"]
    folders += ["root/FashionMNIST", "root/FashionMNIST/raw"]
    for seed, folder in enumerate(folders):
        pixels = make(tmp_path / folder, seed=seed)
        data = load("FashionMNIST", "train", tmp_path / "root", as_uint8=True)
        assert data.files[0].path.parent == tmp_path / folder
        assert np.array_equal(data.images[:, 0], pixels)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert images_module.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("SCALLA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert images_module.cache_folder() == tmp_path / "xdg" / "scalla"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert images_module.cache_folder() == tmp_path / "home" / ".cache" / "scalla"


def test_a_missing_split_is_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "KMNIST" / "raw", "test")
    monkeypatch.setenv("SCALLA_DATA", str(tmp_path))
    assert len(load("KMNIST", "test")) == NUM["test"]
    with pytest.raises(InputError, match="the train split of KMNIST was not found") as caught:
        load("KMNIST", "train")
    message = str(caught.value)
    assert f"SCALLA_DATA: {tmp_path / 'KMNIST' / 'raw'} holds the test split of KMNIST only" in message
    assert "switched off by SCALLA_OFFLINE" in message
    assert "set the environment variable SCALLA_DATA=<folder>" in message
    monkeypatch.setenv("SCALLA_OFFLINE", "0")
    with pytest.raises(InputError, match="switched off by download=False"):
        load("KMNIST", "train", download=False)


def test_half_a_pair_is_not_used(tmp_path: Path) -> None:
    make(tmp_path / "MNIST" / "raw")
    (tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(InputError, match=r"root: .*raw has no train-labels-idx1-ubyte.gz\n"):
        load("MNIST", "train", tmp_path)


def test_names_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="got name='mnist'; wanted one of FashionMNIST, MNIST, KMNIST"):
        load("mnist")
    with pytest.raises(InputError, match="got split='val'; wanted 'train' or 'test'"):
        load("MNIST", "val")
    with pytest.raises(InputError, match=r"got root='.*nowhere', which is not a folder; .* MNIST/raw/"):
        load("MNIST", root=tmp_path / "nowhere")
    monkeypatch.setenv("SCALLA_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match=r"got SCALLA_DATA='.*nowhere', which is not a folder"):
        load("MNIST")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": 11, "labels": 11}, "got 11 images, wanted the 12 of the train split.*allow_subset=True"),
        ({"images": 13}, r"wanted at most 9,408 \(max_bytes\)"),
        ({"labels": 11}, "got 12 images in .* and 11 labels in"),
        ({"labels": 13}, "13 bytes; wanted at most 12"),
        ({"code": 9}, "wanted unsigned bytes"),
    ],
)
def test_files_that_are_not_the_set(tmp_path: Path, change: dict[str, int], message: str) -> None:
    make(tmp_path / "MNIST" / "raw", **change)
    with pytest.raises(FileFormatError, match=message):
        load("MNIST", "train", tmp_path)


def test_labels_out_of_range(tmp_path: Path) -> None:
    make(tmp_path / "MNIST" / "raw", classes=12)
    with pytest.raises(FileFormatError, match="got label 11, wanted 0 to 9"):
        load("MNIST", "train", tmp_path)


def test_a_part_on_request(tmp_path: Path) -> None:
    make(tmp_path / "MNIST" / "raw", images=3, labels=3)
    assert len(load("MNIST", "train", tmp_path, allow_subset=True)) == 3
    make(tmp_path / "MNIST" / "raw", images=0, labels=0)
    with pytest.raises(FileFormatError, match="got 0 images"):
        load("MNIST", "train", tmp_path, allow_subset=True)
