"""The table of faults and promises: tests of this folder add lines, and a run that had any ends by printing it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fault_table import FaultTable

_table = FaultTable()
_FAILED: pytest.StashKey[bool] = pytest.StashKey()


@pytest.fixture
def table(request: pytest.FixtureRequest) -> Iterator[FaultTable]:
    """Where a test writes what it did; what a failing test wrote does not count."""
    before = len(_table.rows)
    yield _table
    if request.node.stash.get(_FAILED, True):
        del _table.rows[before:]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[_FAILED] = report.failed
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _table.rows:
        terminalreporter.section("faults and promises")
        for line in _table.lines():
            terminalreporter.write_line(line)
