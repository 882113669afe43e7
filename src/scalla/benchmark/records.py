"""A run's identity, and its JSON: written whole or not at all, done ones and failed ones in folders of their own.

<out>/<task>/<name>.json    what was measured
<out>/failed/<name>.json    what went wrong
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scalla.types import FileFormatError

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Run:
    """What is to be run. Everything that decides the numbers is in here, and so in the file's name."""

    task: str
    method: str
    variant: str = ""
    protocol: str = "paper"
    seed: int = 1
    quick: bool = False
    #: the seed of the network where it is not the run's own
    network_seed: int | None = None
    #: of the method, of the network and of the data
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: SHA-256 of each data file
    data: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Of all of the above: other settings make another run."""
        return digest_of({"schema": SCHEMA_VERSION, **asdict(self)})

    @property
    def name(self) -> str:
        parts = [self.protocol, self.method, self.variant, f"seed{self.seed}", self.digest[:10]]
        return "quick-" * self.quick + "-".join(p for p in parts if p)

    @property
    def label(self) -> str:
        return " ".join(p for p in (self.protocol, self.method, self.variant, f"seed {self.seed}") if p)

    def done_path(self, out: Path) -> Path:
        return out / self.task / f"{self.name}.json"

    def failed_path(self, out: Path) -> Path:
        return out / "failed" / f"{self.task}-{self.name}.json"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> Run:
        return Run(**stored)


def digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A temporary file beside it, then a rename. NaN and infinity become null: JSON has neither."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(jsonable(content), indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False)
    text = _one_line_lists(text)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileFormatError(
            f"{path.name} cannot be read as a run's JSON ({error}); delete it and run the benchmark again"
        ) from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA_VERSION:
        raise FileFormatError(
            f"{path.name} is no run of this benchmark (schema {SCHEMA_VERSION}); take it out of the folder"
        )
    return content


def jsonable(value: Any) -> Any:
    """Plain JSON; floats to six significant digits, which is more than any of them deserves."""
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def without_paths(text: str) -> str:
    """A message without the folders of this machine: the last part of each absolute path stays, and so do URLs."""
    return re.sub(r"(?<![\w.])(?<!:/)(?:/[\w.@+\-]+)+/(?=[\w.@+\-])", "", text)


def _one_line_lists(text: str) -> str:
    """Lists of numbers on one line each: a curve is one line of a diff."""
    return re.sub(r"\[\s+([-\d.eE+,\snul]+?)\s+\]", lambda m: "[" + re.sub(r"\s+", " ", m[1]) + "]", text)
