"""One thread, shapes checked at run time, and the guards that every test shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from jaxtyping import install_import_hook

from untouched import process_state

#: what tests start as processes of their own is no module to look for doctests in
collect_ignore_glob = ["**/*_child.py", "**/*_script.py"]

torch.set_num_threads(1)
install_import_hook("scalla", "shapes.checker")


@pytest.fixture(autouse=True)
def _process_left_as_found() -> Iterator[None]:
    before = process_state()
    yield
    assert process_state() == before


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1234)
