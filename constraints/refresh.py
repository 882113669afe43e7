"""Resolve every extra for the Python that runs this, and write the pinned list.

    python constraints/refresh.py              writes constraints/py310.txt or constraints/py311.txt
    python constraints/refresh.py -c FILE      the same, held to the versions in FILE

torch is left out of the list but for its own version: which build of it (CPU, CUDA) is the machine's business,
and so are the CUDA packages that come with one. torchvision is left out altogether: three packages that compare
ScaLLA with others ask for it and none of what is used here needs it, while a torchvision built for another torch
breaks every import of torchmetrics. That is why `make install` installs this list with --no-deps.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TORCH = "2.13.0"
#: ask for torchvision: taken without their dependencies, which are listed below instead
WITHOUT_DEPENDENCIES = (
    "asdfghjkl==0.1a4",
    "backpack-for-pytorch==1.7.1",
    "curvlinops-for-pytorch==3.0.1",
    "laplace-torch==0.3",
)
THEIR_DEPENDENCIES = ("einconv", "einops", "linear_operator", "opt-einsum", "scipy", "unfoldNd")
BUILD = ("hatchling", "editables", "setuptools")
NOT_OURS = re.compile(r"^(torch|torchvision|triton|nvidia-.*|cuda-.*)$")
HEADER = """\
# Every package that `make install` puts beside torch, for Python {python}. Written by constraints/refresh.py.
# Installed with --no-deps after torch=={torch}: see there why.
"""


def main() -> None:
    root = Path(__file__).parent.parent
    wanted = [*requirements(root / "pyproject.toml"), *THEIR_DEPENDENCIES, *BUILD, f"torch=={TORCH}"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        subprocess.run([*command, "--report", str(report), *sys.argv[1:], *wanted], check=True)
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    pins = [f"{m['name']}=={m['version']}" for m in found if not NOT_OURS.match(m["name"].lower())]
    lines = sorted({*pins, *WITHOUT_DEPENDENCIES}, key=str.lower)
    name, python = ("py310.txt", "3.10") if sys.version_info < (3, 11) else ("py311.txt", "3.11 and later")
    (root / "constraints" / name).write_text(HEADER.format(python=python, torch=TORCH) + "\n".join(lines) + "\n")


def requirements(pyproject: Path) -> list[str]:
    """What the project and all of its extras ask for, each once (read without tomllib, which 3.10 lacks)."""
    text = pyproject.read_text()
    body = text[text.index("\ndependencies = [") : text.index("[project.scripts]")]
    known = {re.split(r"[=<>]", pin)[0] for pin in WITHOUT_DEPENDENCIES}
    found = re.findall(r'"([A-Za-z][\w.-]*(?:\[[\w,]+\])?)((?:[<>=!~][^"]*)?)"', body)
    return sorted({name + versions for name, versions in found if not name.startswith("scalla") and name not in known})


if __name__ == "__main__":
    main()
