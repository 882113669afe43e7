"""The experiments by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

from scalla.benchmark import fmnist, regression
from scalla.benchmark.records import Run


class Task(Protocol):
    """A module that says what is to be run, and runs it."""

    NAME: str
    PROTOCOLS: tuple[str, ...]

    def method_names(self) -> list[str]: ...

    def plan(
        self,
        methods: Sequence[str] | None = None,
        seeds: Sequence[int] | None = None,
        protocols: Sequence[str] = (),
        *,
        quick: bool = False,
        data_root: Path | None = None,
        network_seed: int | None = None,
    ) -> list[Run]: ...

    def execute(
        self, run: Run, *, data_root: Path | None, cache: Path, progress_bar: bool = False
    ) -> dict[str, Any]: ...


def _task(module: ModuleType) -> Task:
    return cast(Task, module)


TASKS: dict[str, Task] = {module.NAME: _task(module) for module in (fmnist, regression)}
