"""The documentation: every page's Python runs and prints what the page shows, and the site is whole."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where its dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


pages = _module(DOCS / "scripts" / "pages.py")
PAGES = [str(path.relative_to(DOCS)) for path in pages.pages()]


def same(printed: str, shown: str) -> str:
    """ "" where the words are the same and the numbers close; otherwise what differs.

    Another processor or another version of a library trains a slightly different network.
    """
    words = [" ".join(NUMBER.sub("#", text).split()) for text in (printed, shown)]
    if words[0] != words[1]:
        return f"printed {printed!r}, but the page shows {shown!r}"
    for a, b in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
        if abs(float(a) - float(b)) > 0.1 + 0.3 * abs(float(b)):
            return f"printed {a} in {printed!r}, but the page shows {b}"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
# laplace-torch's own, on the page about it
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:By default `link_approx` is `probit`:UserWarning")
def test_a_page_runs_and_prints_what_it_shows(page: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shown = 0
    for block, printed in pages.run(DOCS / page, tmp_path):
        assert not same(printed, block.shown or ""), f"{page}, line {block.line}: {same(printed, block.shown or '')}"
        shown += block.shown is not None
    assert shown == len([b for b in pages.blocks((DOCS / page).read_text("utf-8")) if b.shown is not None])
    for image in tmp_path.glob("*.png"):
        assert (DOCS / "images" / image.name).is_file(), f"run docs/scripts/pages.py docs/{page}"


def test_the_tutorials_are_among_what_is_run() -> None:
    assert {f"tutorials/{name}.md" for name in ("images", "regression", "transformer", "onnx", "continual")} <= set(
        PAGES
    )
    assert {"index.md", "migration.md"} <= set(PAGES)


@pytest.mark.parametrize(
    ("printed", "shown", "found"),
    [
        ("loss 0.52\n", "loss 0.5", ""),
        ("loss 0.9\n", "loss 0.5", "printed 0.9"),
        ("loss 0.5\n", "error 0.5", "but the page shows 'error 0.5'"),
        ("(100, 10)", "(100, 20)", "printed 10"),
    ],
)
def test_outputs_are_compared_in_words_and_roughly_in_numbers(printed: str, shown: str, found: str) -> None:
    assert found in same(printed, shown)
    assert bool(found) == bool(same(printed, shown))


def test_blocks_and_their_outputs_are_found_and_rewritten(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = (
        "a\n\n```python\nx = 2\nprint(x)\n```\n\n```text\nold\n```\n\n```sh\nls\n```\n\n```python\nprint(x + 1)\n```\n"
    )
    page.write_text(text + "words\n\n```text\nnot an output\n```\n")
    first, second = pages.blocks(page.read_text())
    assert (first.code, first.shown, first.line) == ("x = 2\nprint(x)\n", "old\n", 3)
    assert (second.code, second.shown) == ("print(x + 1)\n", None)
    pages.rewrite(page)
    assert page.read_text() == (text + "words\n\n```text\nnot an output\n```\n").replace("old", "2")


def test_an_error_names_the_line_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n\n```python\nx = 1\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as error:
        list(pages.run(page, tmp_path))
    assert (str(error.traceback[-1].path), error.traceback[-1].lineno) == (str(page), 4)


def test_every_function_that_the_method_page_names_exists() -> None:
    names = re.findall(r"`(scalla(?:\.\w+)+)`", "".join(p.read_text("utf-8") for p in DOCS.rglob("*.md")))
    assert len(set(names)) > 10
    for name in set(names):
        parts = name.split(".")
        for split in range(len(parts), 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:split]))
            except ModuleNotFoundError:
                continue
            for attribute in parts[split:]:
                assert hasattr(found, attribute), name
                found = getattr(found, attribute)
            break
        else:
            raise AssertionError(name)


def test_the_site_is_built_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    """Strictly: a dead link, a page outside the navigation or an object that is not found is an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    built = {str(p.relative_to(tmp_path / "site")) for p in (tmp_path / "site").rglob("*.html")}
    assert {"index.html", "method.html", "choosing.html", "api/scalla.html", "tutorials/onnx.html"} <= built
    assert not [name for name in built if name.startswith("scripts")]
    for name in built:
        html = (tmp_path / "site" / name).read_text("utf-8")
        # styles, scripts, fonts and images come from the site itself
        assert not re.findall(r'<(?:script|img)[^>]+src="(?:https?:)?//[^"]+"', html), name
        assert not re.findall(r'<link[^>]+rel="(?:stylesheet|preconnect)"[^>]+href="(?:https?:)?//[^"]+"', html), name
    # The reference says something: every public name of the contract is on the page.
    reference = (tmp_path / "site" / "api" / "scalla.html").read_text("utf-8")
    for name in ("fit", "predict", "ood_score", "functional_samples", "update", "forget", "kernel_error", "export"):
        assert f'id="scalla.ScaLLA.{name}"' in reference, name
