"""Networks of every family the method must run on, tiny, with inputs: name -> Case."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

NUM_CLASSES = 3


def mlp(num_outputs: int = NUM_CLASSES, *, width: int = 5, inputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, num_outputs))


class BatchNormCNN(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(4 * 9, NUM_CLASSES),
        )  # fmt: skip
        with torch.no_grad():  # statistics that are not those of any batch
            self[1].running_mean.uniform_(-0.5, 0.5)
            self[1].running_var.uniform_(0.5, 2)


class GroupNormCNN(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(4, NUM_CLASSES),
        )  # fmt: skip


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))), inplace=True)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.Sequential(Residual(4), Residual(4))
        self.fc = nn.Linear(4, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


class EncoderClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class MultiheadClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0][:, 0])


class FusedAttentionClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(q, k, v)[:, 0].mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(8, 5, batch_first=True)
        self.head = nn.Linear(5, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 5)), nn.Tanh(), nn.Linear(5, NUM_CLASSES))


def parametrised_weight_norm() -> nn.Module:
    hidden = nn.utils.parametrizations.weight_norm(nn.Linear(2, 5))
    return nn.Sequential(hidden, nn.Tanh(), nn.Linear(5, NUM_CLASSES))


class BagClassifier(nn.Module):
    """EmbeddingBag: no forward mode, no double backward."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(10, 4, mode="mean")
        self.head = nn.Linear(4, NUM_CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids))


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class KeywordClassifier(nn.Module):
    """Hugging Face style: tensors by keyword, labels optional, an object with `.logits` back."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.hidden = nn.Linear(6, 6)
        self.classifier = nn.Linear(6, NUM_CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Output:
        h = self.embedding(input_ids)
        weight = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        h = (h * weight[..., None].to(h)).sum(1) / weight.sum(1, keepdim=True)
        logits = self.classifier(torch.tanh(self.hidden(h)))
        return Output(logits, None if labels is None else F.cross_entropy(logits, labels))


class StarredClassifier(KeywordClassifier):
    def forward(self, **kwargs: Tensor) -> Output:  # type: ignore[override]
        return super().forward(kwargs["input_ids"], kwargs.get("attention_mask"))


class BatchClassifier(KeywordClassifier):
    """`model(batch)` with the whole mapping as its one argument."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(batch["input_ids"], batch["attention_mask"]).logits


def tiny_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=10,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            max_position_embeddings=8,
            num_labels=NUM_CLASSES,
        )
    )


def dropout_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, NUM_CLASSES))


def normal(*shape: int, seed: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def words(num: int, *, seed: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 10, (num, 4), generator=generator)
    mask = torch.ones_like(ids)
    mask[::2, -1] = 0
    return {"input_ids": ids, "attention_mask": mask}


@dataclass(frozen=True)
class Case:
    """A network's builder, its inputs, and the first route of differentiation that may serve it."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    likelihood: str = "classification"
    num_outputs: int = NUM_CLASSES
    trunk: bool = True

    def model(self, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.build().to(dtype)

    def labels(self, num: int, *, seed: int = 7) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.likelihood == "regression":
            return torch.randn(num, self.num_outputs, generator=generator)
        return torch.randint(max(self.num_outputs, 2), (num,), generator=generator)

    def loader(self, num: int = 16, *, batch_size: int = 8) -> list[Any]:
        """A list of batches: mappings with "labels" inside, or (x, y)."""
        x, y = self.inputs(num), self.labels(num)
        if isinstance(x, dict):
            return [
                {k: v[i : i + batch_size] for k, v in {**x, "labels": y}.items()} for i in range(0, num, batch_size)
            ]
        return [(x[i : i + batch_size], y[i : i + batch_size]) for i in range(0, num, batch_size)]


def points(num: int) -> Tensor:
    return normal(num, 2)


def images(num: int) -> Tensor:
    return normal(num, 1, 6, 6)


def sequences(num: int) -> Tensor:
    return normal(num, 4, 8)


CASES = {
    case.name: case
    for case in [
        Case("mlp", mlp, points),
        Case("one_logit", lambda: mlp(1), points, num_outputs=1),
        Case("dropout", dropout_mlp, points),
        Case("cnn_batchnorm", BatchNormCNN, images),
        Case("cnn_groupnorm", GroupNormCNN, images),
        Case("resnet", ResNet, images),
        Case("transformer_encoder", EncoderClassifier, sequences),
        Case("multihead_attention", MultiheadClassifier, sequences),
        Case("fused_attention", FusedAttentionClassifier, sequences),
        Case("lstm", lambda: Recurrent(nn.LSTM), sequences),
        Case("gru", lambda: Recurrent(nn.GRU), sequences),
        Case("weight_norm_old", old_weight_norm, points),
        Case("weight_norm", parametrised_weight_norm, points),
        Case("regression_one", lambda: mlp(1), points, "regression", 1),
        Case("regression_three", lambda: mlp(3), points, "regression", 3),
        Case("dict_keywords", KeywordClassifier, words),
        Case("dict_starred", StarredClassifier, words),
        Case("dict_batch", BatchClassifier, words),
        Case("bert", tiny_bert, words),
    ]
}


class Mappings(Dataset[dict[str, Tensor]]):
    """What a tokenised dataset looks like: one mapping for each input."""

    def __init__(self, num: int = 16) -> None:
        self.columns = words(num) | {"labels": CASES["dict_keywords"].labels(num)}

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {k: v[index] for k, v in self.columns.items()}


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Inputs that can be gone through again and again, but not indexed."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Any:
        return iter(zip(self.x, self.y, strict=True))


def loader(x: Tensor, y: Tensor, batch_size: int = 8, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, **options)
