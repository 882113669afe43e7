"""A fit that several rows have in common is done once; its posterior lies beside the trained networks.

What it cost is stored with it, and counts in every row that uses it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

import scalla
from scalla import ScaLLA
from scalla.benchmark.clock import Seconds, now
from scalla.benchmark.environment import peak_memory_mb
from scalla.benchmark.records import SCHEMA_VERSION, digest_of, read_json, write_json


@dataclass
class SharedFits:
    folder: Path
    #: everything but the settings of the fit that decides it: network, data, seed
    given: Mapping[str, Any]
    #: of the fits that were found, when they were made
    spent_before: Seconds = field(default_factory=Seconds)
    peak_before_mb: float = 0.0

    def fit(self, model: nn.Module, settings: Mapping[str, Any], make: Callable[[], ScaLLA]) -> ScaLLA:
        path = self.folder / f"fit-{digest_of([self.given, settings, code_digest()])[:20]}.safetensors"
        about = path.with_suffix(".json")
        if path.is_file() and about.is_file():
            cost = read_json(about)
            self.spent_before += Seconds(**cost["seconds"])
            self.peak_before_mb = max(self.peak_before_mb, cost["peak_memory_mb"])
            return ScaLLA.load(path, model)
        began = now()
        method = make()
        spent = now() - began
        self.folder.mkdir(parents=True, exist_ok=True)
        method.save(path)
        write_json(about, {"schema": SCHEMA_VERSION, "seconds": asdict(spent), "peak_memory_mb": peak_memory_mb()})
        return method


def code_digest() -> str:
    """Of the library's own modules: a fit by other code is another fit."""
    modules = sorted(Path(scalla.__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in modules)).hexdigest()
