"""The README: its Python runs and prints what it shows, its links lead somewhere, its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from scalla.cli.app import app
from test_docs import pages, same

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")


def test_the_python_runs_and_prints_what_is_shown(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shown = 0
    for block, printed in pages.run(README, tmp_path):
        assert not same(printed, block.shown or ""), f"line {block.line}: {same(printed, block.shown or '')}"
        shown += block.shown is not None
    assert shown


def test_links_and_pictures_are_there() -> None:
    targets = re.findall(r"\]\(([^)#]+)", TEXT) + re.findall(r'src="([^"]+)"', TEXT)
    local = [target for target in targets if "://" not in target]
    assert local
    for target in local:
        assert (ROOT / target).exists(), target


def test_commands_are_those_that_there_are() -> None:
    quoted = re.findall(r"`scalla ([a-z]+)[^`\n]*`", TEXT) + re.findall(r"^scalla ([a-z]+)", TEXT, re.MULTILINE)
    named = set(quoted)
    existing = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert named
    assert named <= existing
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"(?:^|`)make ([a-z]+)", TEXT, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize(
    "marker", ["<!-- table: benchmarks/tables.py, tuned, rows that were run -->", "<!-- end of table -->"]
)
def test_the_benchmark_table_has_its_place(marker: str) -> None:
    assert TEXT.count(marker) == 1
