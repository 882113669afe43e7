"""One run in a process of its own: `python -m scalla.benchmark.run_one TASK.json`, as the runner calls it.

TASK.json holds {"run", "out", "cache", "data_root", "threads", "progress_bar", "ends_with_stdin"}. The run's JSON is
written to the folder of the done runs or to that of the failed ones; the exit code is 0 or 1.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from scalla.benchmark import environment
from scalla.benchmark.clock import now
from scalla.benchmark.records import SCHEMA_VERSION, Run, without_paths, write_json
from scalla.benchmark.tasks import TASKS


def run_one(
    run: Run,
    *,
    out: Path,
    cache: Path,
    data_root: Path | None = None,
    threads: int = 1,
    progress_bar: bool = False,
) -> bool:
    """Execute, write the JSON, say whether it was done."""
    torch.set_num_threads(threads)
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    began = now()
    content: dict[str, Any] = {
        "schema": SCHEMA_VERSION,
        "run": run.to_json(),
        "started": started,
        "versions": environment.versions(),
        "hardware": environment.hardware(),
    }
    messages: dict[str, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, category, *_, **__: _count(messages, f"{category.__name__}: {message}")
        try:
            record = TASKS[run.task].execute(run, data_root=data_root, cache=cache, progress_bar=progress_bar)
        except Exception as error:
            content |= {"status": "failed", "error": describe(error)}
        else:
            content |= {"status": "done", **record}
    spent = now() - began
    content |= {"seconds": spent.cpu, "wall_seconds": spent.wall, "warnings": messages}
    done = content["status"] == "done"
    write_json(run.done_path(out) if done else run.failed_path(out), content)
    if done:
        run.failed_path(out).unlink(missing_ok=True)
    return done


def describe(error: BaseException) -> dict[str, Any]:
    """Type, message and the places in scalla, without the paths of this machine."""
    frames = [
        f"{Path(frame.filename).parent.name}/{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    return {"type": type(error).__name__, "message": without_paths(str(error))[:4000], "traceback": frames[-12:]}


def end_with_stdin() -> None:
    """Leave as soon as the process that holds the other end of stdin is gone: nobody waits for the run any more."""

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _count(messages: dict[str, int], text: str) -> None:
    text = without_paths(text)[:500]
    messages[text] = messages.get(text, 0) + 1


def main(argv: Sequence[str] | None = None) -> int:
    (path,) = sys.argv[1:] if argv is None else argv
    task = json.loads(Path(path).read_text(encoding="utf-8"))
    if task["ends_with_stdin"]:
        end_with_stdin()
    root = task["data_root"]
    done = run_one(
        Run.from_json(task["run"]),
        out=Path(task["out"]),
        cache=Path(task["cache"]),
        data_root=None if root is None else Path(root),
        threads=task["threads"],
        progress_bar=task["progress_bar"],
    )
    return 0 if done else 1


if __name__ == "__main__":
    raise SystemExit(main())
