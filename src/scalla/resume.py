"""A fit that can be stopped at any moment and goes on bit by bit where it was."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scalla.checkpoint import read_file, remove_file, write_file
from scalla.distributed import ALONE, Processes
from scalla.ggn import GGNSums
from scalla.saving import load_tensors
from scalla.training import TrainingSettings, TrainingState
from scalla.types import InputError

FILE_NAME = "fit.safetensors"


class FitCheckpoint:
    """The file in `checkpoint_dir`: surrogate, optimiser, place in the data, sums of the GGN pass."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        identity: dict[str, Any],
        every_seconds: float = 30.0,
        processes: Processes = ALONE,
        shares: bool = False,
        lengths: Sequence[int | None] = (),
    ) -> None:
        """`shares`: each process has its own part of the data; `lengths`: batches in an epoch of each source."""
        self.path = Path(folder) / FILE_NAME
        self.identity = identity
        self.every_seconds = every_seconds
        self.processes = processes
        self.shares, self.lengths = shares, list(lengths)
        self._written = time.monotonic()
        self.stop_requested = False

    @property
    def due(self) -> bool:
        return self.stop_requested or time.monotonic() - self._written >= self.every_seconds

    def write(
        self,
        surrogate: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: TrainingState,
        target_scale: float,
        ggn: GGNSums | None = None,
    ) -> None:
        tensors = {f"surrogate.{k}": t for k, t in surrogate.state_dict().items()}
        for index, entry in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{k}": t for k, t in entry.items()}
        meta: dict[str, Any] = {
            "identity": self.identity,
            "training": state.to_json(),
            "target_scale": target_scale,
            "ggn": None,
            "positions": self.processes.positions(state.position),
            "shares": self.shares,
            "lengths": self.lengths,
        }
        if ggn is not None:
            tensors |= {"ggn.ggn": ggn.ggn, "ggn.loss": ggn.loss}
            meta["ggn"] = {"num_data": ggn.num_data, "num_batches": ggn.num_batches}
        with self.processes.together():
            if self.processes.rank == 0:
                write_file(self.path, tensors, meta, kind="fit checkpoint")
        self._written = time.monotonic()
        if self.processes.any(self.stop_requested):
            self.leave()

    def leave(self) -> None:
        raise KeyboardInterrupt(f"stopped by a signal; fit(..., resume=True) goes on from {self.path}")

    def read(
        self, surrogate: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[TrainingState, float, GGNSums | None] | None:
        """Put surrogate and optimiser where they were; None where there is no file yet."""
        with self.processes.file_of_first(self.path) as path:
            if path is None:
                return None
            tensors, meta = read_file(path, kind="fit checkpoint")
        if meta["identity"] != self.identity:
            differing = sorted(k for k in self.identity if meta["identity"].get(k) != self.identity[k])
            raise InputError(
                f"{self.path} belongs to a fit with other settings ({', '.join(differing)} differ); give the same "
                "settings, another checkpoint_dir, or resume=False to start over"
            )
        load_tensors(surrogate, "surrogate.", tensors, self.path)
        entries: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _under("optimizer.", tensors).items():
            index, key = name.split(".", 1)
            entries.setdefault(int(index), {})[key] = tensor
        optimizer.load_state_dict({**optimizer.state_dict(), "state": entries})
        ggn = None
        count = len(meta["positions"])
        same = (count, meta["shares"]) == (self.processes.count, self.shares)
        # Sums over a part of each share say nothing where the shares are others.
        other_shares = not same and (meta["shares"] or self.shares)
        if meta["ggn"] is not None and not other_shares:
            device = next(iter(surrogate.state_dict().values()), torch.empty(0)).device
            ggn = GGNSums(tensors["ggn.ggn"].to(device), tensors["ggn.loss"].to(device), **meta["ggn"])
        state = TrainingState.from_json(meta["training"])
        position = meta["positions"][self.processes.rank if count == self.processes.count else 0]
        state.position = [(int(epoch), int(index)) for epoch, index in position]
        if other_shares:  # of other lengths: as far in them
            lengths = zip(state.position, meta["lengths"], self.lengths, strict=True)
            state.position = [(e, i * now // then if now and then else i) for (e, i), then, now in lengths]
        return state, float(meta["target_scale"]), ggn

    def remove(self) -> None:
        """A finished fit needs no checkpoint."""
        if self.processes.rank == 0:
            remove_file(self.path)

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM finish the step, write the checkpoint and leave by KeyboardInterrupt."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def request_stop(*_: object) -> None:
            self.stop_requested = True

        before = {s: signal.signal(s, request_stop) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def fit_identity(settings: TrainingSettings, **others: Any) -> dict[str, Any]:
    """What must be equal for a fit to go on: every setting that decides its result."""
    return {k: str(v) if isinstance(v, torch.dtype) else v for k, v in (asdict(settings) | others).items()}


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
