"""The networks that are timed: the benchmark's own, and ones of the size of ResNet-50, ViT-B and GPT-2.

Weights are random: time and memory do not depend on them. The large ones see images of 64×64 pixels (ViT-B: 16 patches)
and sequences of 32 tokens, so that a step on one core takes seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scalla.benchmark.network import build_network


def mlp(num_inputs: int, width: int, depth: int, num_classes: int) -> nn.Sequential:
    sizes = [num_inputs, *[width] * depth]
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, num_classes))


class Bottleneck(nn.Module):
    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        num_out = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(num_in, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, num_out, 1, bias=False), nn.BatchNorm2d(num_out)),
        )
        same = stride == 1 and num_in == num_out
        self.skip = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out))
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def resnet50(num_classes: int = 10) -> nn.Sequential:
    blocks: list[nn.Module] = []
    num_in = 64
    for stage, (width, count) in enumerate(zip((64, 128, 256, 512), (3, 4, 6, 3), strict=True)):
        for i in range(count):
            blocks.append(Bottleneck(num_in, width, 2 if i == 0 and stage else 1))
            num_in = 4 * width
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_in, num_classes))


def _encoder(depth: int, width: int, heads: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(width), enable_nested_tensor=False)


class VisionTransformer(nn.Module):
    def __init__(self, num_classes: int = 10, *, depth: int = 12, width: int = 768, pixels: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (pixels // 16) ** 2, width))
        self.encoder = _encoder(depth, width, width // 64)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).mT + self.positions
        return self.head(self.encoder(tokens).mean(1))


class TokenTransformer(nn.Module):
    """GPT-2's sizes with a classification head on the last token."""

    def __init__(
        self,
        num_classes: int = 10,
        *,
        depth: int = 12,
        width: int = 768,
        num_tokens: int = 32,
        vocabulary: int = 50_257,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(1, num_tokens, width))
        self.encoder = _encoder(depth, width, width // 64)
        self.head = nn.Linear(width, num_classes)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(num_tokens))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.words(ids) + self.positions, mask=self.mask)[:, -1])


@dataclass(frozen=True)
class Case:
    """A network to time, and a batch of inputs for it."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    #: inputs of a step
    batch: int
    num_classes: int = 10

    def network(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build().eval()

    def data(self, num: int | None = None) -> tuple[Tensor, Tensor]:
        """Inputs and labels."""
        num = num or self.batch
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return self.inputs(num), torch.randint(self.num_classes, (num,))


def _pixels(channels: int, size: int) -> Callable[[int], Tensor]:
    return lambda num: torch.rand(num, channels, size, size)


def _wide(num_classes: int) -> Case:
    return Case(
        f"MLP, C = {num_classes}",
        lambda: mlp(784, 512, 2, num_classes),
        lambda num: torch.rand(num, 784),
        batch=64,
        num_classes=num_classes,
    )


FMNIST = Case("FashionMNIST", lambda: build_network(1), _pixels(1, 28), batch=128)
LARGE = (
    Case("ResNet-50", resnet50, _pixels(3, 64), batch=8),
    Case("ViT-B", VisionTransformer, _pixels(3, 64), batch=8),
    Case("GPT-2", TokenTransformer, lambda num: torch.randint(50_257, (num, 32)), batch=8),
)
CLASSES = tuple(_wide(c) for c in (10, 100, 1000))
QUICK = (
    Case("FashionMNIST", lambda: build_network(1), _pixels(1, 28), batch=16),
    Case("ViT, tiny", lambda: VisionTransformer(depth=1, width=64, pixels=32), _pixels(3, 32), batch=4),
)
