from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_images import NUM, made, write_images
from torch import Tensor

from scalla.benchmark import images as images_module
from scalla.benchmark.images import Images, Sizes, as_bytes, as_float, checksums, digest, load_images, sizes_of
from scalla.types import FileFormatError

TINY = Sizes(train=50, test=12, context=15)
TINY_TUNED = Sizes(train=50, test=12, context=15, validation_share=0.1, context_held_out_share=0.2)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"))


def parts(images: Images) -> dict[str, Tensor]:
    """Every set of images, by its role."""
    found = {"fit": images.train[0], "test": images.test[0], "context": images.context}
    if images.validation is not None:
        found["validation"] = images.validation[0]
    if images.context_held_out is not None:
        found["context held out"] = images.context_held_out
    return found | images.out


def as_set(x: Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in as_bytes(x)}


def pixels(name: str, split: str) -> Tensor:
    return torch.from_numpy(made(name, split, NUM[name, split])[0])[:, None].float() / 255


@pytest.mark.parametrize("sizes", [TINY, TINY_TUNED])
def test_no_image_has_two_roles(root: Path, sizes: Sizes) -> None:
    images = load_images(sizes, root, allow_subset=True)
    for (first, a), (second, b) in combinations(parts(images).items(), 2):
        assert not as_set(a) & as_set(b), (first, second)


def test_paper_protocol_holds_nothing_out(root: Path) -> None:
    images = load_images(TINY, root, allow_subset=True)
    assert images.validation is None
    assert images.context_held_out is None
    torch.testing.assert_close(images.train[0], pixels("FashionMNIST", "train")[:50])
    torch.testing.assert_close(images.context, pixels("MNIST", "test")[:15])


def test_tuned_protocol_holds_out_the_last_tenth_and_the_last_fifth(root: Path) -> None:
    images = load_images(TINY_TUNED, root, allow_subset=True)
    assert images.validation is not None
    assert images.context_held_out is not None
    x, y = pixels("FashionMNIST", "train"), torch.arange(60) % 10
    torch.testing.assert_close(images.train[0], x[:45])
    torch.testing.assert_close(images.validation[0], x[45:50])
    assert images.validation[1].tolist() == y[45:50].tolist()
    torch.testing.assert_close(images.context, pixels("MNIST", "test")[:12])
    torch.testing.assert_close(images.context_held_out, pixels("MNIST", "test")[12:15])


def test_out_of_distribution_mnist_is_the_end_of_its_training_part(root: Path) -> None:
    images = load_images(TINY, root, allow_subset=True)
    torch.testing.assert_close(images.out["MNIST"], pixels("MNIST", "train")[-12:])
    torch.testing.assert_close(images.out["KMNIST"], pixels("KMNIST", "test")[:12])
    assert set(images.out) == {"KMNIST", "MNIST", "digits", "photos", "glyphs", "automata", "noise"}
    assert all(x.shape == (12, 1, 28, 28) for x in images.out.values())


@pytest.mark.parametrize("protocol", ["paper", "tuned"])
def test_sizes(protocol: str) -> None:
    full, quick = sizes_of(protocol, quick=False), sizes_of(protocol, quick=True)
    assert (full.train, full.test, full.context) == (None, None, None)
    assert quick.train is not None
    assert quick.train <= 6000
    assert (full.validation_share > 0) == (full.context_held_out_share > 0) == (protocol == "tuned")
    assert (quick.validation_share, quick.context_held_out_share) == (
        full.validation_share,
        full.context_held_out_share,
    )


def test_a_part_of_the_data_is_refused_unless_it_is_meant(root: Path) -> None:
    with pytest.raises(FileFormatError, match="allow_subset"):
        load_images(TINY, root)
    with pytest.raises(FileFormatError, match="allow_subset"):
        checksums(root)


def test_checksums_are_of_the_content(root: Path) -> None:
    found = checksums(root, allow_subset=True)
    assert set(found) == {f"{name}/{split}" for name, split in NUM}
    x, y = made("KMNIST", "test", NUM["KMNIST", "test"])
    images, labels = torch.from_numpy(x)[:, None], torch.from_numpy(y).long()
    assert found["KMNIST/test"] == digest(images, labels)
    assert digest(images, labels) != digest(images.float(), labels)
    assert digest(images, labels) != digest(images.view(-1), labels)


def test_bytes_survive_floats() -> None:
    x = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(as_bytes(as_float(x)), x)
    assert float(as_float(x).max()) == 1
    assert np.allclose(as_float(x).numpy(), np.arange(256) / 255)


def test_splits_name_every_set_once() -> None:
    assert len(set(images_module.SPLITS)) == len(images_module.SPLITS)
