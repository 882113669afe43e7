"""SIGKILL at random moments: what was being done is done again, or goes on, and ends in the same bits."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kill_jobs
import pytest
from fault_table import FaultTable

from children import Child, ChildError, assert_same
from scalla import ScaLLA
from scalla.benchmark import regression


def in_long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.stress)


def killed_between(start: Callable[[], Child], seconds: float, rng: random.Random) -> Child | None:
    """A child that was killed up to so many seconds after it reported "begun"; None if it was faster."""
    child = start()
    child.wait_for("begun")
    time.sleep(rng.uniform(0, seconds))
    child.kill()
    return None if child.ended_by_itself() else child


def seconds_of(child: Child) -> float:
    """From "begun" to its end."""
    child.wait_for("begun")
    began = time.monotonic()
    child.result()
    return time.monotonic() - began


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return Child(kill_jobs.fit, str(tmp_path_factory.mktemp("whole")), phase="training", resume=False).result()


@pytest.mark.parametrize(
    ("phase", "kills"), [("training", 2), ("pass", 1), in_long("training", 20), in_long("pass", 12)]
)
def test_a_killed_fit_goes_on_bit_by_bit(
    tmp_path: Path, table: FaultTable, never_stopped: dict[str, Any], phase: str, kills: int
) -> None:
    rng = random.Random(f"{phase} {kills}")
    seconds = seconds_of(Child(kill_jobs.fit, str(tmp_path / "timed"), phase=phase, resume=False))
    done = trials = resumed = 0
    while done < kills or not resumed:
        trials += 1
        assert trials <= 5 * kills, f"{done} of {trials} processes were killed before their end"
        folder = str(tmp_path / f"killed{trials}")
        for number in range(rng.choice((1, 1, 2, 3))):  # a fit that goes on may be killed again
            start = lambda: Child(kill_jobs.fit, folder, phase=phase, resume=number > 0)  # noqa: B023
            if killed_between(start, seconds, rng) is None:  # the machine has become faster
                seconds *= 0.8
                break
            done += 1
        resumed += (Path(folder) / "fit.safetensors").exists()
        assert_same(Child(kill_jobs.fit, folder, phase=phase, resume=True).result(), never_stopped)
        assert list(Path(folder).iterdir()) == []  # neither checkpoint nor half-written file
    where = "training" if phase == "training" else "pass over the data (H)"
    table.add(f"kill -9 in the {where}", "the resumed fit ends in the same bits", count=done, outcome="all equal")


@pytest.mark.parametrize("kills", [2, in_long(12)])
def test_a_killed_save_leaves_a_whole_file(tmp_path: Path, table: FaultTable, kills: int) -> None:
    rng = random.Random(kills)
    good = [kill_jobs.everything(la) for la in kill_jobs.two_posteriors()]
    path = tmp_path / "posterior.safetensors"
    for _ in range(kills):
        assert killed_between(lambda: Child(kill_jobs.save_for_ever, str(path)), 0.5, rng) is not None
        found = kill_jobs.everything(ScaLLA.load(path, kill_jobs.network()))
        assert_same(found, good[found["number of data"] == good[1]["number of data"]])
    table.add("kill -9 in save", "the file is the old one or the new one", count=kills, outcome="all whole")


@pytest.mark.parametrize(
    ("number", "phase"),
    [
        (signal.SIGTERM, "training"),
        (signal.SIGINT, "pass"),
        in_long(signal.SIGINT, "training"),
        in_long(signal.SIGTERM, "pass"),
    ],
)
def test_a_signal_writes_a_checkpoint_and_leaves(
    tmp_path: Path, table: FaultTable, never_stopped: dict[str, Any], number: signal.Signals, phase: str
) -> None:
    """No checkpoint is due for an hour: the one that is found was written for the signal."""
    options = {"phase": phase, "checkpoint_every": 3600.0}
    child = Child(kill_jobs.fit, str(tmp_path), resume=False, **options)
    child.wait_for("begun")
    child.send(number)
    with pytest.raises(ChildError, match=r"KeyboardInterrupt: stopped by a signal; fit\(..., resume=True\) goes on"):
        child.result()
    assert [path.name for path in tmp_path.iterdir()] == ["fit.safetensors"]
    assert_same(Child(kill_jobs.fit, str(tmp_path), resume=True, **options).result(), never_stopped)
    promise = "a checkpoint is written, and the fit goes on in the same bits"
    table.add(f"{number.name} in the {phase}", promise, count=1, outcome="equal")


def measured(path: Path) -> dict[str, Any]:
    """A run's JSON without what the clock said."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return {k: content[k] for k in ("run", "status", "metrics", "curves", "history")}


def test_a_killed_run_of_the_benchmark_leaves_nothing_and_is_done_again(tmp_path: Path) -> None:
    run = next(r for r in regression.plan(["map"], [1], quick=True) if r.variant == "diabetes")
    start = lambda out: Child(kill_jobs.benchmark_run, run.to_json(), str(tmp_path / out), str(tmp_path / "cache"))
    seconds = seconds_of(start("whole"))
    assert killed_between(lambda: start("killed"), 0.9 * seconds, random.Random(1)) is not None
    left = [p for p in (tmp_path / "killed").rglob("*") if p.is_file() and not p.name.startswith(".")]
    assert left == []
    assert start("killed").result()
    assert measured(run.done_path(tmp_path / "killed")) == measured(run.done_path(tmp_path / "whole"))


@pytest.mark.stress
@pytest.mark.parametrize("kills", [6])
def test_a_killed_benchmark_goes_on_where_it_was(tmp_path: Path, table: FaultTable, kills: int) -> None:
    """The whole runner with its processes, killed all together, or itself alone."""
    rng = random.Random(kills)
    runs = regression.plan(["map"], [1], quick=True)

    def start(out: Path) -> subprocess.Popen[bytes]:
        options = ["--quick", "--methods", "map", "--seeds", "1", "--out", str(out), "--cache", str(tmp_path / "cache")]
        command = [sys.executable, "-m", "scalla.benchmark", "regression", *options]
        return subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    began = time.monotonic()
    assert start(tmp_path / "whole").wait() == 0
    seconds = time.monotonic() - began
    for number in range(kills):
        process = start(tmp_path / "killed")
        time.sleep(rng.uniform(0, 0.8 * seconds / 2))
        (os.killpg if number % 2 else os.kill)(process.pid, signal.SIGKILL)
        process.wait()
        if all(run.done_path(tmp_path / "killed").exists() for run in runs):
            for run in runs:
                run.done_path(tmp_path / "killed").unlink()
    assert start(tmp_path / "killed").wait() == 0
    for run in runs:
        assert measured(run.done_path(tmp_path / "killed")) == measured(run.done_path(tmp_path / "whole"))
        assert not run.failed_path(tmp_path / "killed").exists()
    table.add("kill -9 of the benchmark", "run again, it ends in the same numbers", count=kills, outcome="all equal")
