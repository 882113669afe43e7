"""Run the Python of the documentation's pages, and write what it prints and draws back into them.

    python docs/scripts/pages.py                          every page that has Python
    python docs/scripts/pages.py docs/tutorials/onnx.md   these

The blocks that begin with ```python are run from top to bottom in one namespace, in an empty folder. A ```text block
right after one holds what it prints; images that a page writes (`figure.savefig("band.png")`) go to docs/images.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent
FENCED = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A piece of Python and, where the page shows one, its output with the place of that in the page."""

    code: str
    line: int
    shown: str | None
    place: tuple[int, int]


def pages() -> list[Path]:
    """Every page with Python that can be run."""
    return sorted(path for path in DOCS.rglob("*.md") if blocks(path.read_text(encoding="utf-8")))


def blocks(text: str) -> list[Block]:
    fences = list(FENCED.finditer(text))
    found = []
    for fence, after in zip_longest(fences, fences[1:]):
        if fence["info"].strip() != "python":
            continue
        shown, place = None, (0, 0)
        if after is not None and after["info"].strip() == "text" and not text[fence.end() : after.start()].strip():
            shown, place = after["body"], after.span("body")
        found.append(Block(fence["body"], text[: fence.start("body")].count("\n"), shown, place))
    return found


def run(path: Path, folder: Path) -> Iterator[tuple[Block, str]]:
    """Each block of a page with what it prints, run in `folder`."""
    namespace = {"__name__": "__main__"}
    for block in blocks(path.read_text(encoding="utf-8")):
        # So that a traceback names the line of the page.
        code = compile("\n" * block.line + block.code, str(path), "exec")
        printed = io.StringIO()
        with _inside(folder), contextlib.redirect_stdout(printed):
            exec(code, namespace)
        yield block, printed.getvalue()


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def rewrite(path: Path) -> None:
    """Run a page, put its outputs into it and its images beside it."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [(block, printed) for block, printed in run(path, Path(folder)) if block.shown is not None]
        for image in sorted(Path(folder).glob("*.png")):
            shutil.copyfile(image, DOCS / "images" / image.name)
    text = path.read_text(encoding="utf-8")
    for block, printed in reversed(outputs):
        start, end = block.place
        text = text[:start] + printed.rstrip("\n") + "\n" + text[end:]
    path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="pages; by default every one that has Python")
    for path in parser.parse_args().paths or pages():
        began = time.process_time()
        rewrite(path.resolve())
        print(f"{path}: {time.process_time() - began:.1f} s of CPU time")


if __name__ == "__main__":
    main()
