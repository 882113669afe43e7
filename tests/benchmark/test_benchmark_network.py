"""The network of the experiment: its training, its file, and going on where it stopped."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_images import tiny_images
from torch import nn
from torch.nn import functional as F

from scalla.benchmark import network as network_module
from scalla.benchmark.images import Images
from scalla.benchmark.network import NetworkSettings, TrainedNetwork, build_network, network_settings, trained_network
from scalla.types import FileFormatError, InputError

SETTINGS = NetworkSettings("paper", num_epochs=3, batch_size=16, lr_decay=0.7)
DATA = {"FashionMNIST/train": "00"}


@pytest.fixture(scope="module")
def images() -> Images:
    return tiny_images()


def train(images: Images, folder: Path, settings: NetworkSettings = SETTINGS, seed: int = 1) -> TrainedNetwork:
    return trained_network(images, settings, seed=seed, data=DATA, folder=folder)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_layers_are_the_published_ones() -> None:
    network = build_network(1)
    shapes = [tuple(p.shape) for p in network.parameters()]
    assert shapes == [(16, 1, 3, 3), (32, 16, 3, 3), (64, 32, 3, 3), (200, 576), (200,), (10, 200), (10,)]
    assert sum(math.prod(s) for s in shapes) == 140_594
    assert not any(isinstance(m, nn.Dropout | nn.BatchNorm2d) for m in network.modules())
    assert torch.equal(weights(build_network(1)), weights(network))
    assert not torch.equal(weights(build_network(2)), weights(network))


def test_settings_of_the_two_protocols() -> None:
    paper, tuned = network_settings("paper", quick=False), network_settings("tuned", quick=False)
    assert (paper.num_epochs, paper.batch_size, paper.lr, paper.shuffle, paper.prior_precision) == (
        40, 64, 1e-3, False, 0,
    )  # fmt: skip
    assert [paper.rate(e) for e in (0, 1, 10)] == pytest.approx([1e-3, 0.7e-3, 1e-3 * 0.7**10])
    assert tuned.shuffle
    assert tuned.prior_precision == 1
    assert tuned.rate(0) == pytest.approx(1e-3)
    assert tuned.rate(tuned.num_epochs // 2) == pytest.approx(5e-4)
    with pytest.raises(InputError, match="got protocol='best'; choose 'paper' or 'tuned'"):
        network_settings("best", quick=True)


def test_training_is_plain_adam_in_the_order_of_the_data(images: Images, tmp_path: Path) -> None:
    settings = replace(SETTINGS, num_epochs=2)
    found = train(images, tmp_path, settings)
    network = build_network(1)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    x, y = images.train
    for epoch in range(2):
        optimizer.param_groups[0]["lr"] = 1e-3 * 0.7**epoch
        for inputs, labels in zip(x.split(16), y.split(16), strict=True):
            loss = F.cross_entropy(network(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.testing.assert_close(weights(found.model), weights(network), rtol=0, atol=0)


def test_loss_of_the_tuned_variant_is_the_negative_log_posterior(images: Images, tmp_path: Path) -> None:
    """One step of plain descent from the same weights: its gradient is that of mean loss + δ/2 ‖θ‖²/N."""
    x, y = images.train
    settings = NetworkSettings("tuned", num_epochs=1, batch_size=len(x), prior_precision=4.0, shuffle=True)
    network, other = build_network(1), build_network(1)
    network_module.train_epoch(network, torch.optim.SGD(network.parameters(), lr=0.1), x, y, settings, seed=0)
    loss = F.cross_entropy(other(x), y) + 4.0 / 2 * weights_of(other).square().sum() / len(x)
    gradients = torch.autograd.grad(loss, [*other.parameters()])
    expected = torch.cat([(p - 0.1 * g).flatten() for p, g in zip(other.parameters(), gradients, strict=True)])
    torch.testing.assert_close(weights(network), expected, rtol=1e-5, atol=1e-7)


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.flatten() for p in model.parameters()])


def test_history_has_held_out_numbers_where_something_is_held_out(images: Images, tmp_path: Path) -> None:
    found = train(images, tmp_path, replace(SETTINGS, num_epochs=1))
    assert images.validation is not None
    x, y = images.validation
    with torch.no_grad():
        logits = found.model(x)
    (entry,) = found.history
    assert entry["validation_nll"] == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-5)
    assert entry["validation_accuracy"] == pytest.approx(float((logits.argmax(1) == y).double().mean()))
    assert not found.model.training


def test_second_call_reads_the_file(images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train(images, tmp_path)

    def never(*_: object, **__: object) -> float:
        raise AssertionError("trained again")

    monkeypatch.setattr(network_module, "train_epoch", never)
    second = train(images, tmp_path)
    assert torch.equal(weights(second.model), weights(first.model))
    assert (second.history, second.time) == (first.history, first.time)
    assert [p.suffixes for p in tmp_path.iterdir()] == [[".safetensors"]]


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_interrupted_training_goes_on_to_the_same_bits(
    images: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: bool
) -> None:
    settings = replace(SETTINGS, shuffle=shuffle)
    whole = train(images, tmp_path / "whole", settings)
    epoch = network_module.train_epoch
    calls: list[int] = []

    def breaks_off(*args: object, **options: object) -> float:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return epoch(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(network_module, "train_epoch", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        train(images, tmp_path / "parts", settings)
    found = train(images, tmp_path / "parts", settings)
    assert len(calls) == 4  # two epochs, the one that broke off, and that one again
    assert torch.equal(weights(found.model), weights(whole.model))
    assert found.history == whole.history


def test_other_data_seed_or_settings_are_another_file(images: Images, tmp_path: Path) -> None:
    settings = replace(SETTINGS, num_epochs=0)
    train(images, tmp_path, settings)
    train(images, tmp_path, settings, seed=2)
    train(images, tmp_path, replace(settings, lr=0.1))
    trained_network(images, settings, seed=1, data={"FashionMNIST/train": "01"}, folder=tmp_path)
    assert len([*tmp_path.iterdir()]) == 4


def test_a_damaged_file_is_an_error_and_not_another_network(images: Images, tmp_path: Path) -> None:
    train(images, tmp_path, replace(SETTINGS, num_epochs=0))
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(FileFormatError, match=path.name):
        train(images, tmp_path, replace(SETTINGS, num_epochs=0))
