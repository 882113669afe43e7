"""Files: written whole or not at all, read back to the bit, refused when they are not ours or not whole."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from cases import BatchNormCNN, mlp
from scalla import FileFormatError
from scalla.checkpoint import (
    SCHEMA_VERSION,
    _digest,
    architecture_of,
    check_architecture,
    read_file,
    replacing,
    weights_digest,
    write_file,
)
from untouched import same_bits

TENSORS: dict[str, Tensor] = {
    "matrix": torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3),
    "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
    "number": torch.tensor(7),
    "nothing": torch.zeros(0, 4),
    "transposed": torch.arange(6.0).view(2, 3).T,
}
META: dict[str, Any] = {"a": 1, "text": "δ = 1", "list": [1.5, None]}


def written(path: Path) -> bytes:
    write_file(path, TENSORS, META, kind="thing")
    return path.read_bytes()


def test_what_is_written_is_read_again_to_the_bit(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    written(path)
    tensors, meta = read_file(path, kind="thing")
    assert meta == {**META, "schema": SCHEMA_VERSION, "kind": "thing"}
    assert tensors.keys() == TENSORS.keys()
    assert all(same_bits(tensors[k], t) for k, t in TENSORS.items())
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert os.listdir(path.parent) == ["file"]


def test_the_same_content_gives_the_same_tensors_and_digest(tmp_path: Path) -> None:
    written(tmp_path / "one")
    written(tmp_path / "two")
    one, two = (read_file(tmp_path / name, kind="thing") for name in ("one", "two"))
    assert one[1] == two[1]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_what_fails_leaves_the_last_good_file(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = written(path)
    with pytest.raises(type(error)), replacing(path) as temporary:  # noqa: PT012
        temporary.write_bytes(b"half of it")
        raise error
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["file"]


def test_what_cannot_be_written_leaves_the_last_good_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = written(path)
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_file(path, TENSORS, {"a": object()}, kind="thing")
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="is a folder; wanted the name of a file to write"):
        write_file(tmp_path, TENSORS, META, kind="thing")
    with pytest.raises(FileFormatError, match=r"found no file at .*; wanted one that save\(\) wrote"):
        read_file(tmp_path, kind="thing")
    with pytest.raises(FileFormatError, match="found no file at"):
        read_file(tmp_path / "missing", kind="thing")


def test_every_cut_and_every_flipped_byte_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = written(path)
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place])
        with pytest.raises(FileFormatError):
            read_file(path, kind="thing")
    for place in range(0, len(content), 5):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
        try:
            tensors, meta = read_file(path, kind="thing")
        except FileFormatError:
            continue
        # The one thing that may change unseen is how the header is written down, never what it says.
        assert meta == {**META, "schema": SCHEMA_VERSION, "kind": "thing"}
        assert all(same_bits(tensors[k], t) for k, t in TENSORS.items())


def rewritten(path: Path, meta: Any) -> None:
    """A file with other JSON inside, its checksum as `write_file` computes it."""
    text = meta if isinstance(meta, str) else json.dumps(meta)
    owned = {k: t.contiguous() for k, t in TENSORS.items()}
    save_file(owned, path, metadata={"scalla": text, "sha256": _digest(text, owned)})


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (
            {"schema": SCHEMA_VERSION + 1, "kind": "thing"},
            f"has schema version {SCHEMA_VERSION + 1}, this scalla reads version {SCHEMA_VERSION}; use the",
        ),
        ({"kind": "thing"}, "has schema version None"),
        ({"schema": SCHEMA_VERSION, "kind": "other"}, "holds a 'other'; wanted a 'thing'"),
        ([1, 2], "has schema version None"),
        ("{", "damaged: its JSON cannot be read"),
        ("[" * 100_000, "damaged: its JSON cannot be read"),
    ],
)
def test_files_of_another_kind_or_version_are_refused(meta: Any, message: str, tmp_path: Path) -> None:
    rewritten(tmp_path / "file", meta)
    with pytest.raises(FileFormatError, match=message):
        read_file(tmp_path / "file", kind="thing")


def test_files_that_are_not_ours_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(FileFormatError, match="is a safetensors file, but not one that scalla wrote"):
        read_file(path, kind="thing")
    torch.save({"a": torch.zeros(2)}, path)
    with pytest.raises(FileFormatError, match="damaged, cut short or not a safetensors file"):
        read_file(path, kind="thing")
    save_file({"a": torch.zeros(2)}, path, metadata={"scalla": "{}", "sha256": "0"})
    with pytest.raises(FileFormatError, match="its checksum does not fit its content; fetch or write it again"):
        read_file(path, kind="thing")


# ---------------------------------------------------------------- the network that a file belongs to


def test_the_architecture_is_shapes_and_kinds() -> None:
    model = nn.Sequential(mlp(), nn.Dropout())
    stored = json.loads(json.dumps(architecture_of(model)))
    check_architecture(stored, nn.Sequential(mlp(), nn.Dropout()), "file")
    for other, found in (
        (nn.Sequential(mlp(width=6), nn.Dropout()), r"'0.0.bias' is \[5\] in the file and \[6\] in .*\(3 such"),
        (nn.Sequential(mlp()), "'1' is Dropout in the file and missing in the network given"),
        (nn.Sequential(nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 3)), nn.Dropout()), "'0.1' is Tanh in"),
    ):  # fmt: skip
        with pytest.raises(FileFormatError, match=f"was saved for another network: {found}"):
            check_architecture(stored, other, "file")
    for nonsense in (None, 3, {}, {"tensors": 1}):
        with pytest.raises(FileFormatError, match="does not say for which network it was saved"):
            check_architecture(nonsense, model, "file")


def test_the_digest_sees_every_weight_and_buffer() -> None:
    torch.manual_seed(0)
    model = BatchNormCNN()
    before = weights_digest(model)
    assert weights_digest(model) == before
    for name, t in model.state_dict().items():
        kept = t.clone()
        with torch.no_grad():
            t.view(-1)[-1:].add_(1)
        assert weights_digest(model) != before, name
        with torch.no_grad():
            t.copy_(kept)
    assert weights_digest(model) == before
    assert weights_digest(model.double()) != before
