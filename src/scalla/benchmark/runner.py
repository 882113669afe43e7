"""Every run of a plan in a process of its own; what is done is not done again, what failed is kept apart."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from tqdm.auto import tqdm

from scalla.benchmark import environment
from scalla.benchmark.fmnist import NETWORK
from scalla.benchmark.records import SCHEMA_VERSION, Run, without_paths, write_json
from scalla.benchmark.tasks import TASKS
from scalla.distributed import rank_under_torchrun
from scalla.types import InputError


@dataclass(frozen=True)
class Summary:
    """How the runs of a plan stand, by label."""

    done: tuple[str, ...]
    skipped: tuple[str, ...]
    failed: tuple[str, ...]

    def __str__(self) -> str:
        return f"{len(self.done)} done, {len(self.skipped)} done before, {len(self.failed)} failed"


def run_benchmark(
    task: str = "fmnist",
    *,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    protocols: Sequence[str] | None = None,
    quick: bool = False,
    out: str | os.PathLike[str] = "results",
    cache: str | os.PathLike[str] = "runs",
    data_root: str | os.PathLike[str] | None = None,
    threads: int = 1,
    jobs: int = 1,
    network_seed: int | None = None,
    retry_failed: bool = True,
    timeout: float | None = None,
    progress_bar: bool = True,
) -> Summary:
    """Run what is not done yet; under torchrun, each process the seeds that are its own.

    Args:
        task: "fmnist" (the published table) or "regression".
        methods: rows by name; all of them if None.
        seeds: by default as many as each row wants (3, or 5 where it is cheap), one if `quick`.
        protocols: "paper", "tuned"; both if None.
        quick: a subset of the data and short fits, in a few minutes.
        out: folder of the JSON files, one a run.
        cache: folder of trained networks and of the runs' logs, which nobody needs to keep.
        data_root: folder of the image data; see `scalla.data.load`.
        threads: of torch, in each run. With one, the processor's seconds are what an idle machine would take.
        jobs: runs at a time. More than one disturbs the timings by the clock, and little those of the processor.
        network_seed: one network for all seeds, rather than one for each.
        retry_failed: run again what failed before.
        timeout: seconds after which a run counts as failed.
        progress_bar: over the runs.
    """
    if task not in TASKS:
        raise InputError(f"got task={task!r}; choose one of {', '.join(TASKS)}")
    if jobs < 1 or threads < 1:
        raise InputError(f"got jobs={jobs} and threads={threads}; wanted at least 1 of each")
    module = TASKS[task]
    root = None if data_root is None else Path(data_root)
    runs = module.plan(
        methods, seeds, protocols or module.PROTOCOLS, quick=quick, data_root=root, network_seed=network_seed
    )
    rank, count = rank_under_torchrun()
    runs = share_of(runs, rank, count)
    out, cache = Path(out), Path(cache)
    done: list[str] = []
    skipped: list[str] = []
    failed: list[str] = []
    todo: list[Run] = []
    for run in runs:
        if run.done_path(out).is_file():
            skipped.append(run.label)
        elif run.failed_path(out).is_file() and not retry_failed:
            failed.append(run.label)
        else:
            todo.append(run)
    children = Children(out, cache, root, threads, timeout)
    with tqdm(
        total=len(runs), initial=len(runs) - len(todo), disable=not progress_bar or rank > 0, desc=task, unit="run"
    ) as bar:
        # The networks are there before the rows that need them.
        for stage in ([r for r in todo if r.method == NETWORK], [r for r in todo if r.method != NETWORK]):
            for run, ok in children.run_all(stage, jobs, bar):
                (done if ok else failed).append(run.label)
                bar.update()
                if not ok:
                    bar.write(f"failed: {run.label}: {children.error_of(run)}", file=sys.stderr)
    return Summary(tuple(done), tuple(skipped), tuple(failed))


def share_of(runs: Sequence[Run], rank: int, count: int) -> list[Run]:
    """The runs of one of several processes: whole seeds, since the rows of a seed need its network."""
    seeds = sorted({run.seed for run in runs})
    return [run for run in runs if seeds.index(run.seed) % count == rank]


class Children:
    """The processes of the runs; none of them outlives this one's interest."""

    def __init__(self, out: Path, cache: Path, root: Path | None, threads: int, timeout: float | None) -> None:
        self.out, self.cache, self.root, self.threads, self.timeout = out, cache, root, threads, timeout
        self._alive: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopping = False

    def run_all(self, runs: Sequence[Run], jobs: int, bar: tqdm) -> Iterator[tuple[Run, bool]]:
        with ThreadPoolExecutor(jobs) as pool:
            futures = {pool.submit(self._run, run, bar): run for run in runs}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BaseException:
                self._stopping = True
                for future in futures:
                    future.cancel()
                with self._lock:
                    for child in self._alive:
                        child.terminate()
                raise

    def _run(self, run: Run, bar: tqdm) -> bool:
        if self._stopping:
            return False
        bar.set_postfix_str(run.label)
        log = self.cache / "logs" / f"{run.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        run.failed_path(self.out).unlink(missing_ok=True)  # of an attempt before this one
        task = {
            "run": run.to_json(),
            "out": str(self.out),
            "cache": str(self.cache),
            "data_root": None if self.root is None else str(self.root),
            "threads": self.threads,
            "progress_bar": True,
            "ends_with_stdin": True,
        }
        environ = os.environ | {name: str(self.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        with tempfile.TemporaryDirectory() as folder, log.open("wb") as output:
            path = Path(folder) / "task.json"
            path.write_text(json.dumps(task), encoding="utf-8")
            command = [sys.executable, "-m", "scalla.benchmark.run_one", str(path)]
            # An interrupt of the terminal is for this process alone, which ends its children; and the pipe closes with
            # this process, however it ends, and the child with the pipe.
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
            )
            with self._lock:
                self._alive.add(child)
                if self._stopping:
                    child.terminate()
            try:
                code = child.wait(self.timeout)
                problem = f"the process ended with code {code}"
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                problem = f"stopped after {self.timeout:g} seconds"
            finally:
                assert child.stdin is not None
                child.stdin.close()
                with self._lock:
                    self._alive.discard(child)
        if run.done_path(self.out).is_file():
            return True
        if not self._stopping and not run.failed_path(self.out).is_file():
            self._write_failure(run, problem, log)  # it could not say for itself: killed, out of memory
        return False

    def _write_failure(self, run: Run, problem: str, log: Path) -> None:
        tail = log.read_text(encoding="utf-8", errors="replace")[-2000:].splitlines()[-5:]
        content = {
            "schema": SCHEMA_VERSION,
            "run": run.to_json(),
            "status": "failed",
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": environment.versions(),
            "hardware": environment.hardware(),
            "error": {"type": "process", "message": problem, "traceback": [without_paths(line) for line in tail]},
        }
        write_json(run.failed_path(self.out), content)

    def error_of(self, run: Run) -> str:
        with contextlib.suppress(OSError, ValueError, KeyError):
            error = json.loads(run.failed_path(self.out).read_text(encoding="utf-8"))["error"]
            return f"{error['type']}: {error['message']}"[:300]
        return "no record was written"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", choices=list(TASKS), help="fmnist: the published table; regression: tables and a toy")
    parser.add_argument("--methods", type=_names, help="rows, separated by commas; all by default")
    parser.add_argument("--seeds", type=_numbers, help="seeds, separated by commas; 3 or 5 by default")
    parser.add_argument("--protocol", dest="protocols", type=_names, help="paper, tuned or both, separated by a comma")
    parser.add_argument("--quick", action="store_true", help="a subset and short fits: a few minutes")
    parser.add_argument("--out", default="results", help="folder of the JSON files")
    parser.add_argument("--cache", default="runs", help="folder of trained networks and logs")
    parser.add_argument("--data", dest="data_root", help="folder of the image data (default: SCALLA_DATA and others)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch in each run (default: 1)")
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs at a time; more than one disturbs the timings by the clock"
    )
    parser.add_argument("--network-seed", type=int, help="one network for all seeds, rather than one for each")
    parser.add_argument("--no-retry", dest="retry_failed", action="store_false", help="leave failed runs as they are")
    parser.add_argument("--timeout", type=float, help="seconds after which a run counts as failed")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scalla benchmark", description="Run the benchmark, one process a run.")
    add_arguments(parser)
    try:
        summary = run_benchmark(**vars(parser.parse_args(argv)))
    except InputError as error:
        print(f"scalla benchmark: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("scalla benchmark: interrupted; the same command goes on with what is not done", file=sys.stderr)
        return 130
    print(summary)
    return 1 if summary.failed else 0


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in _names(text)]
