"""What a run ran on: versions, hardware, memory. No host names, no paths."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

#: packages whose version may change a number
PACKAGES = ("torch", "numpy", "laplace-torch", "scikit-learn", "safetensors")


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), "scalla": _version("scalla")}
    return found | {name: _version(name) for name in PACKAGES}


def hardware() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "ram_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "device": "cpu",
    }


def restart_peak_memory() -> None:
    """Let the next `peak_memory_mb` speak of what comes now (Linux; elsewhere it is that of the whole process)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mb() -> float:
    """The most memory that this process has held. (Linux: VmHWM, since ru_maxrss outlives an exec.)"""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 1024)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
