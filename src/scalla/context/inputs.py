"""The training inputs that a context is made of: read once, from a tensor, a mapping, a dataset or a loader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from scalla.batches import EndlessBatches, inputs_of
from scalla.functional import batch_size, map_tensors
from scalla.ggn import check_inputs
from scalla.types import InputError, Inputs

Kind: TypeAlias = Literal["images", "tokens", "rows"]
#: where mappings hold their inputs, if `dict_key_x` does not say it
USUAL_KEYS = ("input_ids", "pixel_values", "inputs_embeds", "x")
#: inputs of a dataset or a loader that are kept, drawn at random; a tensor is never copied
MAX_KEPT = 20_000


@dataclass(frozen=True, eq=False)
class TrainingInputs:
    """`images` (N, channels, height, width) and `rows` (N, …) of real numbers, or `tokens` (N, length)."""

    kind: Kind
    values: Tensor
    #: of a mapping: all of its tensors, and the key of the inputs among them
    columns: Mapping[str, Tensor] | None = None
    key: str = ""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def low(self) -> Tensor:
        """The least value of each channel (or column), in the shape that broadcasts against inputs."""
        return self.values.amin(_all_but_channels(self.values), keepdim=True)[0]

    @property
    def high(self) -> Tensor:
        return self.values.amax(_all_but_channels(self.values), keepdim=True)[0]


def read_inputs(inputs: Any, *, dict_key_x: str | None = None, dict_key_y: str = "labels") -> TrainingInputs:
    """Tensors and mappings are taken as inputs, (x, y) pairs for their x; labels play no part.

    `dict_key_x` is the key of a mapping under which its token ids, images or rows are: by default the first of
    "input_ids", "pixel_values", "inputs_embeds" and "x" that there is.
    """
    if isinstance(inputs, TrainingInputs):
        return inputs
    if isinstance(inputs, Tensor | Mapping):
        x: Inputs = inputs
    elif isinstance(inputs, TensorDataset):
        x = inputs.tensors[0]
    elif isinstance(inputs, Dataset):
        x = _kept(DataLoader(_few_of(inputs), batch_size=256))
    elif isinstance(inputs, Iterable):
        x = _kept(inputs)
    else:
        raise InputError(
            f"got training inputs of type {type(inputs).__name__}; wanted a tensor, a mapping of tensors, a dataset or "
            "a loader"
        )
    check_inputs(x, "the training data")
    if isinstance(x, Mapping):
        return _of_mapping({k: v for k, v in x.items() if k != dict_key_y}, dict_key_x)
    if not isinstance(x, Tensor):
        raise InputError(f"got training inputs of type {type(x).__name__}; wanted tensors or mappings of tensors")
    return TrainingInputs(_kind_of(x), x.detach().cpu())


def _kind_of(x: Tensor) -> Kind:
    if len(x) == 0:
        raise InputError(f"got training inputs of shape {tuple(x.shape)}, which is empty; wanted at least one")
    real = x.is_floating_point()
    if real and x.ndim == 4 and min(x.shape[1:]) > 0:
        return "images"
    if real and x.ndim >= 2 and x[0].numel() > 0:
        return "rows"
    if x.ndim == 2 and x.shape[1] > 0 and x.dtype in (torch.int64, torch.int32):
        return "tokens"
    hint = ": scale them as your network takes them, images.float() / 255 say" if x.dtype == torch.uint8 else ""
    raise InputError(
        f"got training inputs of shape {tuple(x.shape)} and dtype {x.dtype}; wanted images (N, channels, height, "
        f"width) or rows (N, …) of real numbers, or token ids (N, length) of int64{hint}"
    )


def _of_mapping(columns: dict[str, Any], key: str | None) -> TrainingInputs:
    found = {k: v.detach().cpu() for k, v in columns.items() if isinstance(v, Tensor)}
    key = key if key is not None else next((k for k in USUAL_KEYS if k in found), None)
    if key is None or key not in found:
        wanted = repr(key) if key is not None else "one of " + ", ".join(map(repr, USUAL_KEYS))
        raise InputError(
            f"got a mapping with tensors under {sorted(map(str, found))}; wanted its inputs under {wanted}: "
            "scalla.context.read_inputs(mapping, dict_key_x=...) says where they are"
        )
    kind = _kind_of(found[key])
    wrong = [k for k, v in found.items() if v.ndim == 0 or len(v) != len(found[key])]
    if wrong:
        raise InputError(f"got {', '.join(wrong)} of another length than {key!r}; wanted one row for each input")
    return TrainingInputs(kind, found[key], found, key)


def _few_of(dataset: Dataset[Any]) -> Dataset[Any]:
    """At most MAX_KEPT of a dataset that can be indexed, in its order."""
    if isinstance(dataset, IterableDataset) or len(dataset) <= MAX_KEPT:  # type: ignore[arg-type]
        return dataset
    rows = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))[:MAX_KEPT]  # type: ignore[arg-type]
    return Subset(dataset, rows.sort().values.tolist())


def _kept(loader: Iterable[Any]) -> Inputs:
    """All inputs of one epoch, or MAX_KEPT of them: those with the largest of as many random numbers."""
    rng = torch.Generator().manual_seed(0)
    blocks: list[Inputs] = []
    priorities = torch.empty(0)
    # The order and the augmentations of the loader are drawn from a random state of their own.
    for batch in EndlessBatches(loader, seed=0, name="the loader of training inputs").one_epoch():
        blocks.append(inputs_of(batch))
        priorities = torch.cat([priorities, torch.rand(batch_size(blocks[-1]), generator=rng)])
        if len(priorities) > 2 * MAX_KEPT:
            kept, priorities = _largest(_joined(blocks), priorities)
            blocks = [kept]
    return _largest(_joined(blocks), priorities)[0]


def _largest(x: Inputs, priorities: Tensor) -> tuple[Inputs, Tensor]:
    size = len(priorities)
    if size <= MAX_KEPT:
        return x, priorities
    rows = priorities.topk(MAX_KEPT).indices.sort().values
    return map_tensors(x, lambda t: t[rows] if t.ndim and len(t) == size else t), priorities[rows]


def _joined(blocks: list[Inputs]) -> Inputs:
    if len(blocks) == 1:
        return blocks[0]
    if all(isinstance(x, Tensor) for x in blocks):
        shapes = {tuple(x.shape[1:]) for x in blocks}  # type: ignore[union-attr]
        if len(shapes) > 1:
            raise InputError(
                f"got inputs of the shapes {sorted(shapes)}; wanted one shape for all: resize images, and give token "
                "ids of different lengths as mappings with an attention_mask"
            )
        return torch.cat(blocks)  # type: ignore[arg-type]
    if not all(isinstance(x, Mapping) for x in blocks):
        kinds = sorted({type(x).__name__ for x in blocks})
        raise InputError(f"got inputs of type {', '.join(kinds)}; wanted tensors or mappings of tensors")
    keys = [k for k, v in blocks[0].items() if isinstance(v, Tensor) and v.ndim]  # type: ignore[union-attr]
    return {k: _padded([x[k] for x in blocks], k, blocks) for k in keys}  # type: ignore[index]


def _padded(parts: list[Tensor], key: str, blocks: list[Inputs]) -> Tensor:
    """Batches that were padded to lengths of their own, padded to the longest of them."""
    lengths = {p.shape[1] for p in parts if p.ndim == 2}
    if len(lengths) <= 1:
        return torch.cat(parts)
    if any("attention_mask" not in x for x in blocks):
        raise InputError(
            f"got {key!r} of lengths {sorted(lengths)} without an attention_mask; wanted one length, or mappings that "
            "say by attention_mask where the padding is"
        )
    fill = 0
    for x, part in zip(blocks, parts, strict=True):
        masked = part[x["attention_mask"] == 0]  # type: ignore[call-overload, index]
        if masked.numel():
            fill = int(masked[0])
            break
    longest = max(lengths)
    return torch.cat([torch.nn.functional.pad(p, (0, longest - p.shape[1]), value=fill) for p in parts])


def _all_but_channels(x: Tensor) -> tuple[int, ...]:
    return tuple(d for d in range(x.ndim) if d != 1)
