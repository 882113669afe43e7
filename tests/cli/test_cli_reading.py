"""Sources of data → tensors: every format by its content, every wrong one by its message."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from scalla import FileFormatError, InputError
from scalla.cli.contexts import GENERATORS, read_context
from scalla.cli.reading import InputOptions, read_data

PLAIN = InputOptions()


def all_of(data) -> tuple[torch.Tensor, ...]:
    (batch,) = data.loader(1000)
    return tuple(batch)


def write_images(folder: Path, levels: dict[str, list[int]], *, shape: tuple[int, int] = (4, 6)) -> Path:
    """Grey images of one level each: name of a folder → levels."""
    for name, values in levels.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i, level in enumerate(values):
            Image.fromarray(np.full(shape, level, dtype=np.uint8)).save(folder / name / f"{i}.png")
    return folder


def write_idx(path: Path, array: np.ndarray) -> Path:
    header = struct.pack(">HBB", 0, 0x08, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())
    return path


def test_folders_are_classes_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder = write_images(tmp_path, {"cat": [0, 51], "ant": [255]})
    data = read_data(str(folder), PLAIN)
    x, y = all_of(data)
    assert data.classes == ("ant", "cat")
    assert list(data.names) == ["ant/0.png", "cat/0.png", "cat/1.png"]
    assert y.tolist() == [0, 1, 1]
    assert x.shape == (3, 3, 4, 6)
    assert torch.allclose(x[:, 0, 0, 0], torch.tensor([1.0, 0.0, 0.2]))


def test_images_are_resized_grey_and_normalised(tmp_path: Path) -> None:
    folder = write_images(tmp_path, {"a": [51]})
    options = InputOptions(size=(8, 5), grey=True, mean=(0.1,), std=(0.5,))
    x, _ = all_of(read_data(str(folder), options))
    assert x.shape == (1, 1, 8, 5)
    assert torch.allclose(x, torch.full_like(x, (0.2 - 0.1) / 0.5))


def test_mean_and_std_of_each_channel() -> None:
    x = torch.arange(24.0).view(2, 3, 2, 2)
    found = InputOptions(mean=(1.0, 2.0, 3.0), std=(2.0, 4.0, 8.0)).normalised(x)
    for channel, (mean, std) in enumerate(((1, 2), (2, 4), (3, 8))):
        assert torch.allclose(found[:, channel], (x[:, channel] - mean) / std)
    with pytest.raises(InputError, match="got 2 numbers as mean for inputs of 3 channels"):
        InputOptions(mean=(0.0, 1.0)).normalised(x)


def test_a_folder_without_folders_has_no_labels(tmp_path: Path) -> None:
    write_images(tmp_path, {".": [0, 255]})
    data = read_data(str(tmp_path), PLAIN)
    assert not data.labelled
    assert data.first_input().shape == (3, 4, 6)
    assert len(data) == 2


def test_wrong_folders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="found no image below"):
        read_data(str(tmp_path), PLAIN)
    write_images(tmp_path / "a", {"x": [1]})
    write_images(tmp_path / "a", {"y": [1]}, shape=(5, 5))
    with pytest.raises(InputError, match="give --size"):
        all_of(read_data(str(tmp_path / "a"), PLAIN))
    with pytest.raises(InputError, match="a regression has no classes"):
        read_data(str(tmp_path / "a"), PLAIN, likelihood="regression")
    (tmp_path / "b" / "x").mkdir(parents=True)
    (tmp_path / "b" / "x" / "0.png").write_text("no image")
    with pytest.raises(FileFormatError, match="cannot be read as an image"):
        all_of(read_data(str(tmp_path / "b"), PLAIN))


@pytest.mark.parametrize(("inputs", "labels"), [("x", "y"), ("images", "labels")])
def test_npz_with_bytes_as_pixels(tmp_path: Path, inputs: str, labels: str) -> None:
    pixels = np.array([[[0, 255], [51, 102]]], dtype=np.uint8)
    np.savez(tmp_path / "d.npz", **{inputs: pixels, labels: np.array([3])})
    x, y = all_of(read_data(str(tmp_path / "d.npz"), PLAIN))
    assert torch.allclose(x, torch.tensor([[[0.0, 1.0], [0.2, 0.4]]]))
    assert y.tolist() == [3]
    assert y.dtype == torch.int64


def test_npz_of_a_regression_and_of_tokens(tmp_path: Path) -> None:
    np.savez(tmp_path / "r.npz", x=np.ones((2, 3)), y=np.array([0.5, 1.5]))
    x, y = all_of(read_data(str(tmp_path / "r.npz"), PLAIN, likelihood="regression"))
    assert x.dtype == y.dtype == torch.float32
    assert y.tolist() == [[0.5], [1.5]]
    np.savez(tmp_path / "t.npz", x=np.array([[1, 2], [3, 4]]))
    (tokens,) = all_of(read_data(str(tmp_path / "t.npz"), PLAIN))
    assert tokens.dtype == torch.int64


def test_wrong_npz(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    path.write_text("no archive")
    with pytest.raises(FileFormatError, match=r"not a \.npz file"):
        read_data(str(path), PLAIN)
    np.savez(path, x=np.array([{"a": 1}], dtype=object))
    with pytest.raises(FileFormatError, match="plain numbers"):
        read_data(str(path), PLAIN)
    np.savez(path, weights=np.ones(3))
    with pytest.raises(FileFormatError, match="holds weights; wanted at least one of x"):
        read_data(str(path), PLAIN)
    np.savez(path, y=np.ones(3))
    with pytest.raises(InputError, match="holds y; wanted inputs under one of x"):
        read_data(str(path), PLAIN)
    np.savez(path, x=np.ones((3, 2)), y=np.ones(2))
    with pytest.raises(InputError, match="3 inputs and 2 labels"):
        read_data(str(path), PLAIN)
    np.savez(path, x=np.ones((2, 2)), y=np.array([0.5, 1.0]))
    with pytest.raises(InputError, match="wanted one class index"):
        read_data(str(path), PLAIN)
    np.savez(path, x=np.array(["a", "b"]))
    with pytest.raises(FileFormatError, match="wanted plain numbers"):
        read_data(str(path), PLAIN)


def test_csv_by_name_of_columns(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text("b,label,a\n1,0,2\n3,1,4\n")
    data = read_data(str(path), PLAIN)
    x, y = all_of(data)
    assert data.columns == ("b", "a")
    assert x.tolist() == [[1, 2], [3, 4]]
    assert y.tolist() == [0, 1]
    # A later file may have other columns, in another order, and no labels.
    path.write_text("extra,a,b\n9,2,1\n")
    (x,) = all_of(read_data(str(path), InputOptions(columns=("b", "a"))))
    assert x.tolist() == [[1, 2]]


def test_csv_with_two_targets(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text("a,p,q\n1,2.5,3\n4,5,6\n")
    x, y = all_of(read_data(str(path), InputOptions(targets=("q", "p")), likelihood="regression"))
    assert x.tolist() == [[1], [4]]
    assert y.tolist() == [[3, 2.5], [6, 5]]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a,label\n", PLAIN, "holds 1 lines"),
        ("a,a\n1,2\n", PLAIN, "two columns of the same name"),
        ("a,label\n1,2,3\n", PLAIN, "line 2: got 3 values, wanted 2"),
        ("a,label\n1,0\nred,1\n", PLAIN, "line 3: could not convert.*wanted numbers in a"),
        ("a,b\n1,2\n", InputOptions(targets=("c",)), "wanted the targets c"),
        ("a,b\n1,2\n", InputOptions(targets=("b", "c")), "lacks the columns"),
        ("a,b\n1,2\n", InputOptions(columns=("z",)), "wanted z"),
        ("label\n1\n", PLAIN, "wanted inputs, too"),
    ],
)
def test_wrong_csv(tmp_path: Path, text: str, options: InputOptions, message: str) -> None:
    path = tmp_path / "d.csv"
    path.write_text(text)
    with pytest.raises((InputError, FileFormatError), match=message):
        read_data(str(path), options)


def test_idx_files_find_their_labels(tmp_path: Path) -> None:
    images = write_idx(tmp_path / "train-images-idx3-ubyte", np.arange(24).reshape(2, 3, 4) * 10)
    (x,) = all_of(read_data(str(images), PLAIN))
    assert x.shape == (2, 1, 3, 4)
    assert torch.allclose(x.flatten(), torch.arange(24) * 10 / 255)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.array([7, 1]))
    assert all_of(read_data(str(images), PLAIN))[1].tolist() == [7, 1]
    other = write_idx(tmp_path / "others-idx1-ubyte", np.array([2, 3]))
    assert all_of(read_data(str(images), PLAIN, labels=other))[1].tolist() == [2, 3]
    np.savez(tmp_path / "d.npz", x=np.ones((1, 1)))
    with pytest.raises(InputError, match="wanted one for IDX files only"):
        read_data(str(tmp_path / "d.npz"), PLAIN, labels=other)


def test_unknown_sources(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"found nothing at .*wanted a folder of images"):
        read_data(str(tmp_path / "none.csv"), PLAIN)
    (tmp_path / "d.xlsx").write_text("")
    with pytest.raises(InputError, match="wanted a folder of images"):
        read_data(str(tmp_path / "d.xlsx"), PLAIN)


@pytest.mark.parametrize("wrong", [{"size": (0, 3)}, {"std": (0.0,)}, {"mean": (float("nan"),)}])
def test_wrong_options(wrong: dict) -> None:
    with pytest.raises(InputError, match="wanted"):
        InputOptions(**wrong)


def test_contexts_by_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=torch.rand(20, 1, 8, 8).numpy(), y=np.zeros(20, dtype=int))
    data = read_data(str(tmp_path / "d.npz"), PLAIN)

    def made(source: str):
        return read_context(source, data, PLAIN, likelihood="classification", seed=3)

    assert "Textures" in GENERATORS
    assert "Mixture" not in GENERATORS
    direct = GENERATORS["Textures"](data.dataset, seed=3) + GENERATORS["Strokes"](data.dataset, seed=3)
    assert torch.equal(made("Textures+Strokes").generate(6), direct.generate(6))
    assert made("default").generate(3).shape == (3, 1, 8, 8)
    assert torch.equal(made(str(tmp_path / "d.npz"))[0][0], data.first_input())
    with pytest.raises(InputError, match=r"neither data nor a generator; wanted a path, default, .*PatchShuffle"):
        made("Textures+Nonsense")
