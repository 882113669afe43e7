"""The five image files of the benchmark, tiny and made up: clothes are stripes, the other sets blobs and noise."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from scalla.benchmark.images import Images

#: images in each split
NUM = {
    ("FashionMNIST", "train"): 60, ("FashionMNIST", "test"): 20, ("KMNIST", "test"): 20,
    ("MNIST", "test"): 20, ("MNIST", "train"): 40,
}  # fmt: skip


def write_images(root: Path) -> Path:
    """As torchvision lays them out, unpacked."""
    for (name, split), num in NUM.items():
        pixels, labels = made(name, split, num)
        prefix = "train" if split == "train" else "t10k"
        folder = root / name / "raw"
        folder.mkdir(parents=True, exist_ok=True)
        for kind, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (folder / f"{prefix}-{kind}-ubyte").write_bytes(header + array.tobytes())
    return root


def made(name: str, split: str, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes (num, 28, 28) and labels; no two images are the same, within a split or between two."""
    rng = np.random.default_rng([*name.encode(), *split.encode()])
    labels = (np.arange(num) % 10).astype(np.uint8)
    across = np.arange(28)
    if name == "FashionMNIST":  # stripes whose width is the class
        base = 120 + 100 * np.sin(across[None, None, :] * (1 + labels[:, None, None]) / 6)
    elif name == "KMNIST":
        base = np.full((num, 1, 28), 128.0)
    else:
        at = rng.uniform(8, 20, (2, num, 1, 1))
        base = 255 * np.exp(-((across[:, None] - at[0]) ** 2 + (across - at[1]) ** 2) / 20)
    noise = rng.normal(0, 25, (num, 28, 28))
    return np.clip(base + noise, 0, 255).astype(np.uint8), labels


def tiny_images(num: int = 20, *, tuned: bool = True) -> Images:
    """In memory, without files."""

    def floats(name: str, split: str, count: int) -> tuple[Tensor, Tensor]:
        pixels, labels = made(name, split, count)
        return torch.from_numpy(pixels)[:, None].float() / 255, torch.from_numpy(labels).long()

    x, y = floats("FashionMNIST", "train", 3 * num)
    context = floats("MNIST", "test", num)[0]
    kept = num - num // 4 if tuned else num
    return Images(
        train=(x[: 2 * num], y[: 2 * num]),
        validation=(x[2 * num :], y[2 * num :]) if tuned else None,
        test=floats("FashionMNIST", "test", num),
        context=context[:kept],
        context_held_out=context[kept:] if tuned else None,
        out={"KMNIST": floats("KMNIST", "test", num)[0], "MNIST": floats("MNIST", "train", num)[0]},
    )
