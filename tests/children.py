"""Processes that tests start, and kill: forked from a server that has imported torch and scalla once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

#: fork of a process that has run nothing yet: as fast as a fork, and no thread's lock is copied
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "scalla"])
PATIENCE_SECONDS = 240.0


class Child:
    """One process that calls `function`; what it reports and returns comes through a pipe."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_run, args=(theirs, function, arguments, options), daemon=True)
        self.process.start()
        theirs.close()

    def wait_for(self, word: str) -> None:
        """Until the function has called `report(word)`."""
        while (found := self._receive()) != ("report", word):
            assert found[0] == "report", f"the process ended ({found}) before it reported {word!r}"

    def result(self, *, patience: float = PATIENCE_SECONDS) -> Any:
        """What the function returned, once it has ended; its error as a ChildError."""
        while (found := self._receive(patience))[0] == "report":
            pass
        self.process.join()
        if found[0] == "error":
            raise ChildError(*found[1:])
        return found[1]

    def send(self, number: int) -> None:
        """A signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL: nothing in the process can prevent, see or tidy up after it."""
        self.process.kill()
        self.process.join()

    def ended_by_itself(self) -> bool:
        """Whether it had come to its end before it was killed."""
        return self.process.exitcode != -signal.SIGKILL

    def _receive(self, patience: float = PATIENCE_SECONDS) -> tuple[Any, ...]:
        if not self.pipe.poll(patience):
            self.kill()
            raise AssertionError(f"the process said nothing for {patience:g} seconds: it hangs")
        try:
            return self.pipe.recv()
        except EOFError:
            self.process.join()
            return ("gone", self.process.exitcode)


@dataclass
class ChildError(Exception):
    """An error in a child: the name of its class, its message, where."""

    kind: str
    message: str
    place: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}\n{self.place}"


def report(word: str) -> None:
    """In a child: tell the test how far it is."""
    assert _pipe is not None
    _pipe.send(("report", word))


def on_ranks(count: int, function: Callable[..., Any], **options: Any) -> list[Any]:
    """`function(**options)` in each of `count` processes of one group: what each returned, or its ChildError."""
    with tempfile.TemporaryDirectory() as folder:
        children = start_ranks(count, function, Path(folder), **options)
        return [result_or_error(child) for child in children]


def start_ranks(count: int, function: Callable[..., Any], folder: Path, **options: Any) -> list[Child]:
    """The processes of a group that meet in a file of `folder`."""
    return [Child(_in_group, rank, count, str(folder / "meeting"), function, options) for rank in range(count)]


def result_or_error(child: Child) -> Any:
    try:
        return child.result()
    except ChildError as error:
        return error


def _in_group(rank: int, count: int, meeting: str, function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=count, timeout=timedelta(seconds=60)
    )
    value = function(**options)
    dist.barrier()  # the file and the connections are needed until the last has ended
    dist.destroy_process_group()
    return value


_pipe: Any = None


def _run(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    global _pipe
    _pipe = pipe
    torch.set_num_threads(1)
    try:
        value = ("value", _plain(function(*arguments, **options)))
    except BaseException as error:
        value = ("error", type(error).__name__, str(error), traceback.format_exc())
    pipe.send(value)


def _plain(value: Any) -> Any:
    """Tensors as arrays: those of torch travel in memory that goes with the process."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def assert_same(found: Mapping[str, Any], wanted: Mapping[str, Any], *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Equal by name: to the bit unless a tolerance is given."""
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(_plain(found[name]), _plain(wanted[name]), rtol=rtol, atol=atol, err_msg=name)
