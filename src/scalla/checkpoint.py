"""Files: tensors and JSON in one safetensors file, written whole or not at all, checked when read.

No pickle is read or written. The JSON lies in the file's own header, so one rename replaces both, and a
SHA-256 over JSON and tensors tells damage from data.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from scalla.types import FileFormatError

SCHEMA_VERSION = 1


def write_file(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], meta: Mapping[str, Any], kind: str) -> None:
    """Write atomically: a temporary file beside it, fsync, rename. The last good file stays until then."""
    text = json.dumps({"schema": SCHEMA_VERSION, "kind": kind, **meta}, sort_keys=True)
    owned = {k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}
    with replacing(path) as temporary:
        save_file(owned, temporary, metadata={"scalla": text, "sha256": _digest(text, owned)})


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file that takes the place of `path` once what happens inside has worked, and vanishes if not."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise FileFormatError(f"{path} is a folder; wanted the name of a file to write")
    # In a folder of its own: what is written there may come by way of further temporary files (safetensors').
    folder = tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        temporary = Path(folder) / path.name
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _sync_folder(path.parent)


def remove_file(path: Path) -> None:
    """The file, and what writes of it that were killed have left."""
    path.unlink(missing_ok=True)
    for leftover in path.parent.glob(f".{path.name}.*.part"):
        shutil.rmtree(leftover, ignore_errors=True)


def read_file(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and JSON of a file that `write_file` made; anything else is refused."""
    path = Path(path)
    if not path.is_file():
        raise FileFormatError(f"found no file at {path}; wanted one that save() wrote")
    try:
        with safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            if "scalla" not in header or "sha256" not in header:
                raise FileFormatError(f"{path} is a safetensors file, but not one that scalla wrote")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        digest = _digest(header["scalla"], tensors)
    except (
        SafetensorError,
        OSError,
        ValueError,
        RuntimeError,
        KeyError,
        MemoryError,
        OverflowError,
    ) as error:
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError(f"{path} is damaged, cut short or not a safetensors file: {error}") from error
    if digest != header["sha256"]:
        raise FileFormatError(f"{path} is damaged: its checksum does not fit its content; fetch or write it again")
    try:
        meta = json.loads(header["scalla"])
    except (json.JSONDecodeError, RecursionError) as error:
        raise FileFormatError(f"{path} is damaged: its JSON cannot be read ({error})") from error
    if not isinstance(meta, dict) or meta.get("schema") != SCHEMA_VERSION:
        found = meta.get("schema") if isinstance(meta, dict) else None
        raise FileFormatError(
            f"{path} has schema version {found!r}, this scalla reads version {SCHEMA_VERSION}; "
            "use the scalla that wrote it, or write it again"
        )
    if meta.get("kind") != kind:
        raise FileFormatError(f"{path} holds a {meta.get('kind')!r}; wanted a {kind!r}")
    return tensors, meta


def architecture_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Shape of every weight and buffer, kind of every layer: what a saved posterior must find again."""
    return {
        "tensors": {name: list(t.shape) for name, t in model.state_dict().items() if isinstance(t, Tensor)},
        "layers": {name: type(m).__name__ for name, m in model.named_modules() if not any(m.children())},
    }


def check_architecture(stored: Any, model: nn.Module, path: object) -> None:
    for kind, found in architecture_of(model).items():
        expected = stored.get(kind) if isinstance(stored, dict) else None
        if not isinstance(expected, dict):
            raise FileFormatError(f"{path} is not whole: it does not say for which network it was saved")
        differing = [name for name in sorted(set(expected) | set(found)) if expected.get(name) != found.get(name)]
        if differing:
            first = differing[0]
            raise FileFormatError(
                f"{path} was saved for another network: {first!r} is {expected.get(first, 'missing')} in the file and "
                f"{found.get(first, 'missing')} in the network given ({len(differing)} such differences). Give the "
                "network it was fitted to"
            )


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of the network's weights: the posterior belongs to these very values."""
    tensors = {k: t.detach().cpu().contiguous() for k, t in model.state_dict().items() if isinstance(t, Tensor)}
    return _digest("", tensors)


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        t = tensors[name]
        digest.update(f"|{name}|{t.dtype}|{tuple(t.shape)}|".encode())
        if t.numel():
            digest.update(t.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems cannot
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
