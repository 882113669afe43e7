"""The runner: its processes are stand-ins here, but for two runs that are real."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scalla.benchmark import regression, runner
from scalla.benchmark.records import Run, read_json
from scalla.benchmark.run_one import describe
from scalla.benchmark.runner import main, run_benchmark
from scalla.types import InputError

STAND_IN = Path(__file__).with_name("stand_in_child.py")


def made(variant: str, seed: int = 1) -> Run:
    return Run("made", "method", variant, seed=seed)


class Made:
    """A task whose runs are those given, in the stand-in's process."""

    def __init__(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out, self.runs = out, list[Run]()
        python = out.parent / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{STAND_IN}" "$@"\n')
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        plan = SimpleNamespace(PROTOCOLS=("paper",), plan=lambda *_, **__: self.runs)
        monkeypatch.setattr(runner, "TASKS", {"made": plan})
        monkeypatch.setattr(sys, "executable", str(python))

    def run(self, *runs: Run, **options: Any) -> runner.Summary:
        self.runs = [*runs]
        self.out.mkdir(exist_ok=True)
        paths = {f"{r.variant} {r.seed}": [str(r.done_path(self.out)), str(r.failed_path(self.out))] for r in runs}
        (self.out / "paths.json").write_text(json.dumps(paths))
        cache = self.out.parent / "cache"
        return run_benchmark("made", out=self.out, cache=cache, progress_bar=False, **options)

    def began(self) -> list[str]:
        """Which runs had a process, and how often."""
        return sorted(path.name.rpartition(" ")[0] for path in self.out.glob("began/*"))

    def records(self) -> list[str]:
        """Every file below the folder that is there for good."""
        return sorted(p.parent.name for p in self.out.glob("*/*") if p.parent.name in ("made", "failed"))


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(tmp_path / "results", monkeypatch)


def error_of(run: Run, out: Path) -> dict[str, Any]:
    record = read_json(run.failed_path(out))
    assert record["status"] == "failed"
    assert Run.from_json(record["run"]) == run
    return record["error"]


def test_what_is_done_is_not_run_again(task: Made) -> None:
    first = task.run(made("works", 1), made("works", 2))
    assert str(first) == "2 done, 0 done before, 0 failed"
    contents = {path: path.stat().st_mtime_ns for path in task.out.glob("made/*.json")}
    second = task.run(made("works", 1), made("works", 2), made("works", 3))
    assert (second.done, second.skipped) == (
        (made("works", 3).label,),
        (made("works", 1).label, made("works", 2).label),
    )
    assert task.began() == ["works 1", "works 2", "works 3"]
    assert all(path.stat().st_mtime_ns == then for path, then in contents.items())


def test_other_settings_are_another_run(task: Made) -> None:
    task.run(made("works"))
    changed = Run("made", "method", "works", settings={"lr": 0.1})
    assert task.run(changed).done == (changed.label,)
    assert len(task.records()) == 2


def test_a_failed_run_is_kept_apart_and_the_others_go_on(task: Made, capsys: pytest.CaptureFixture[str]) -> None:
    summary = task.run(made("fails"), made("works"))
    assert str(summary) == "1 done, 0 done before, 1 failed"
    assert task.records() == ["failed", "made"]
    assert error_of(made("fails"), task.out)["message"] == "a matrix was not positive definite"
    assert "failed: paper method fails seed 1: InputError: a matrix was not positive" in capsys.readouterr().err


def test_failed_runs_are_run_again_unless_they_are_to_be_left(task: Made) -> None:
    task.run(made("fails"))
    assert task.run(made("fails"), retry_failed=False).failed == (made("fails").label,)
    assert task.began() == ["fails 1"]
    task.run(made("fails"))
    assert task.began() == ["fails 1", "fails 1"]


@pytest.mark.parametrize(
    ("variant", "message"),
    [("dies", "the process ended with code -9"), ("crashes before it can say why", "the process ended with code 1")],
)
def test_a_process_that_cannot_speak_for_itself(task: Made, variant: str, message: str) -> None:
    assert task.run(made(variant)).failed == (made(variant).label,)
    error = error_of(made(variant), task.out)
    assert (error["type"], error["message"]) == ("process", message)
    assert error["traceback"] == ["a line of the log from data.gz"]  # without the folders of the machine


def test_an_old_error_is_not_taken_for_the_new_one(task: Made) -> None:
    run = made("dies")
    run.failed_path(task.out).parent.mkdir(parents=True)
    run.failed_path(task.out).write_text(json.dumps({"schema": 1, "error": {"type": "Old", "message": "old"}}))
    task.run(run)
    assert error_of(run, task.out)["type"] == "process"


def test_timeout(task: Made) -> None:
    assert task.run(made("hangs"), timeout=0.5).failed == (made("hangs").label,)
    assert error_of(made("hangs"), task.out)["message"] == "stopped after 0.5 seconds"


def test_threads_are_those_of_the_process(task: Made) -> None:
    task.run(made("works"), threads=3)
    assert [path.read_text() for path in task.out.glob("began/*")] == ["3"]


def test_jobs_run_side_by_side(task: Made) -> None:
    runs = [made("works", seed) for seed in range(1, 6)]
    assert len(task.run(*runs, jobs=3).done) == 5
    assert task.began() == [f"works {seed}" for seed in range(1, 6)]


def test_an_interrupt_ends_the_processes_and_leaves_nothing_half_written(task: Made) -> None:
    with interrupted_after(lambda: len(task.began()) == 3), pytest.raises(KeyboardInterrupt):
        task.run(made("works"), made("hangs", 1), made("hangs", 2), made("hangs", 3), jobs=2)
    assert task.began() == ["hangs 1", "hangs 2", "works 1"]  # the last never began
    assert not any(alive(int(path.name.split()[-1])) for path in task.out.glob("began/*"))
    assert task.records() == ["made"]
    assert task.run(made("works")).skipped == (made("works").label,)


@contextlib.contextmanager
def interrupted_after(reached: Any) -> Iterator[None]:
    """SIGINT to this process, as from the terminal, once that is so."""

    def wait() -> None:
        deadline = time.monotonic() + 30
        while not reached() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "cifar"}, r"got task='cifar'; choose one of fmnist, regression"),
        ({"task": "regression", "jobs": 0}, "got jobs=0 and threads=1"),
        ({"task": "regression", "methods": ["lla"]}, r"got methods \['lla'\]; choose from map, "),
    ],
)
def test_wrong_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_benchmark(**options, out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(runner, "run_benchmark", lambda **options: given.update(options) or runner.Summary((), (), ()))
    rows = ["--methods", "map,scalla", "--seeds", "1,2", "--protocol", "paper"]
    assert main(["fmnist", *rows, "--quick", "--no-retry"]) == 0
    assert (given["task"], given["methods"], given["seeds"]) == ("fmnist", ["map", "scalla"], [1, 2])
    assert (given["protocols"], given["quick"], given["retry_failed"]) == (["paper"], True, False)
    monkeypatch.setattr(runner, "run_benchmark", lambda **_: runner.Summary((), (), ("one",)))
    assert main(["fmnist"]) == 1
    monkeypatch.undo()
    assert main(["fmnist", "--methods", "none"]) == 2
    assert "scalla benchmark: got methods ['none']" in capsys.readouterr().err

    def interrupted(**_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run_benchmark", interrupted)
    assert main(["fmnist"]) == 130
    assert "interrupted; the same command goes on" in capsys.readouterr().err


def test_real_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that works and one that cannot, in processes of their own; the second ends with an error of ours."""
    monkeypatch.setattr(regression, "TABLES", ("toy",))
    plan = regression.plan

    def with_a_wrong_one(*args: Any, **options: Any) -> list[Run]:
        (run,) = plan(*args, **options)
        return [run, Run(**{**run.to_json(), "variant": "no_such_table"})]

    monkeypatch.setattr(regression, "plan", with_a_wrong_one)
    summary = run_benchmark(
        "regression", methods=["map"], quick=True, out=tmp_path / "results", cache=tmp_path / "runs", progress_bar=False
    )
    assert str(summary) == "1 done, 0 done before, 1 failed"
    (done,) = (tmp_path / "results" / "regression").iterdir()
    record = read_json(done)
    assert record["status"] == "done"
    assert record["run"]["settings"]["network"]["num_epochs"] == 50
    assert set(record["run"]["data"]) == {"toy/seed1"}
    assert {"python", "torch", "scalla", "laplace-torch"} <= set(record["versions"])
    assert record["hardware"]["threads"] == 1
    assert record["hardware"]["cores"] == os.cpu_count()
    assert 0 < record["cost"]["peak_memory_mb"] < 1e5
    assert record["seconds"] > 0
    assert 0 < record["metrics"]["rmse"] < 1
    (failed,) = (tmp_path / "results" / "failed").iterdir()
    error = read_json(failed)["error"]
    assert error["type"] == "InputError"
    assert "got name='no_such_table'" in error["message"]
    assert any(line.startswith("benchmark/regression.py:") for line in error["traceback"])


def test_an_error_is_described_without_the_folders_of_the_machine() -> None:
    try:
        raise ValueError("no file at /home/someone/data/train.gz")
    except ValueError as error:
        found = describe(error)
    assert found["type"] == "ValueError"
    assert found["message"] == "no file at train.gz"
    assert found["traceback"][0].startswith("benchmark/test_benchmark_runner.py:")
