"""Several processes that fit together, on torch.distributed: what they share out, add up and agree on.

Batches that all processes have alike are shared out row by row, so the global batch, and with it the fit, is that
of one process. GᵀG, GᵀZ, ZᵀZ, the gradients and the sums of the precision are added over processes; probes are
functions of seed and step, and the same everywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scalla.functional import batch_size, first_rows, map_tensors, tensors_of
from scalla.ggn import GGNSums
from scalla.types import InputError, Inputs, Loader, ProcessError
from scalla.wrapped import distributed_sampler

#: "auto": together if a process group is initialised; "shards": and every loader holds its own process's share
Distributed: TypeAlias = Literal["auto", "shards"] | bool

#: how long the first process may have to wait for the last one to begin the fit
PATIENCE = timedelta(minutes=10)


class Processes:
    """The processes of one fit; without arguments, this one alone."""

    def __init__(self, rank: int = 0, count: int = 1, *, shards: bool = False) -> None:
        self.rank, self.count, self.shards = rank, count, shards

    @staticmethod
    def of(distributed: Distributed) -> Processes:
        """Those of the process group, once all of them are here."""
        if distributed not in ("auto", "shards", True, False):
            raise InputError(f"got distributed={distributed!r}; choose 'auto', 'shards', True or False")
        ready = dist.is_available() and dist.is_initialized()
        if distributed in ("shards", True) and not ready:
            raise InputError(
                f"got distributed={distributed!r} without a process group; start the script with torchrun and call "
                "torch.distributed.init_process_group() before the fit"
            )
        if distributed is False or not ready or dist.get_world_size() == 1:
            return Processes(shards=distributed == "shards")
        if dist.get_backend() == "gloo":
            try:
                dist.monitored_barrier(timeout=PATIENCE)
            except RuntimeError as error:
                raise ProcessError(
                    f"only some of the {dist.get_world_size()} processes began this fit ({_first_line(error)}); call "
                    "fit in all of them, or with distributed=False where one is to fit alone"
                ) from error
        return Processes(dist.get_rank(), dist.get_world_size(), shards=distributed == "shards")

    # -- the data --

    def own_share(self, loader: Loader) -> bool:
        """Whether the loader yields this process's share alone, rather than what every process has."""
        if self.count > 1 and type(loader).__module__.startswith("accelerate."):
            raise InputError(
                f"got a {type(loader).__name__} that Accelerate prepared: it repeats inputs to fill its batches, which "
                "the precision would count twice; give the loader as it was before accelerator.prepare(...)"
            )
        return self.shards or distributed_sampler(loader) is not None

    def shares_of_a_batch(self, loader: Loader) -> int:
        """How many of its batches make a step's, where contexts are shared out by rows."""
        return self.count if self.own_share(loader) and not self.shards else 1

    def slice(self, size: int) -> slice:
        """This process's rows of a batch that all have."""
        return slice(size * self.rank // self.count, size * (self.rank + 1) // self.count)

    def rows(self, x: Inputs, *, own: bool) -> tuple[Inputs, int]:
        """This process's rows of a batch, and how many they are; where there are none, one that must not count."""
        size = batch_size(x)
        if own or self.count == 1:
            return x, size
        mine = self.slice(size)
        if mine.start == mine.stop:
            return first_rows(x, 1), 0
        return map_tensors(x, lambda t: t[mine] if t.ndim and len(t) == size else t), mine.stop - mine.start

    def first_rows_of_all(self, x: Inputs, *, own: bool, count: int = 256) -> Inputs:
        """The first rows of the global batch, in all processes; this one's alone where theirs are of other shapes."""
        if self.count == 1 or not own:
            return x
        x = first_rows(x, -(-count // self.count))
        size = batch_size(x)
        kinds = [f"{t.dtype}{tuple(t.shape[1:])}" for t in tensors_of(x)]
        found = self._gather([_number(kinds), size])
        if len({kind for kind, _ in found}) > 1:
            return x
        rows = [num for _, num in found]
        # Row i of every process before row i + 1 of any: the order from which DistributedSampler dealt them out.
        places = [(i, rank) for rank, num in enumerate(rows) for i in range(num)]
        order = torch.tensor(sorted(range(len(places)), key=places.__getitem__))

        def joined(t: Tensor) -> Tensor:
            if not t.ndim or len(t) != size:
                return t
            content = t.detach().to(self._device).contiguous().view(-1).view(torch.uint8)
            of_a_row = content.numel() // size
            parts = [content.new_zeros(max(rows) * of_a_row) for _ in rows]
            padded = torch.cat([content, content.new_zeros((max(rows) - size) * of_a_row)])
            _collective(dist.all_gather, parts, padded)
            whole = torch.cat([part[: num * of_a_row] for part, num in zip(parts, rows, strict=True)])
            return whole.view(t.dtype).view(-1, *t.shape[1:])[order.to(whole.device)].to(t.device)

        return first_rows(map_tensors(x, joined), count)

    # -- agreement --

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What fails inside in one process fails in all: none is left waiting for one that has gone."""
        try:
            yield
        except ProcessError:
            raise
        except Exception:
            self._agree(failed=True)
            raise
        self._agree()

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set in any process."""
        return self._agree(flag=flag)

    def _agree(self, *, failed: bool = False, flag: bool = False) -> bool:
        if self.count == 1:
            return flag
        state = torch.tensor([self.rank + 1 if failed else 0, int(flag)], device=self._device)
        _collective(dist.all_reduce, state, dist.ReduceOp.MAX)
        if int(state[0]) and not failed:
            raise ProcessError(f"process {int(state[0]) - 1} of {self.count} failed, its own error says why")
        return bool(state[1])

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Settings and weights are the same in all processes."""
        if self.count == 1:
            return
        all_of_them = self._gather([_number(facts[name]) for name in sorted(facts)])
        differing = [n for n, *values in zip(sorted(facts), *all_of_them, strict=True) if len(set(values)) > 1]
        if differing:
            raise InputError(
                f"the {self.count} processes of this fit differ in {', '.join(differing)}; give all of them the same "
                "network (weights included) and the same settings"
            )

    def from_first(self, value: float) -> float:
        """The first process's value."""
        if self.count == 1:
            return value
        t = torch.tensor(value, dtype=torch.float64, device=self._device)
        _collective(dist.broadcast, t, 0)
        return float(t)

    def same_tensors(self, module: nn.Module) -> None:
        """The first process's weights and buffers, in all."""
        if self.count > 1:
            for t in module.state_dict().values():
                if isinstance(t, Tensor):
                    whole = t.contiguous()
                    _collective(dist.broadcast, whole, 0)
                    t.copy_(whole)

    def positions(self, position: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """Where every process is in its data."""
        if self.count == 1:
            return [list(position)]
        gathered = self._gather([number for pair in position for number in pair])
        return [list(zip(numbers[::2], numbers[1::2], strict=True)) for numbers in gathered]

    # -- sums --

    def add(self, t: Tensor) -> Tensor:
        """Σ over processes, the same bits in each."""
        if self.count == 1:
            return t
        total = t.detach().clone().contiguous()
        _collective(dist.all_reduce, total)
        return total

    def add_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """The gradient of the global batch's loss, in one message."""
        if self.count == 1:
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        total = self.add(torch.cat([g.flatten() for g in gradients]))
        for p, part in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p).to(p.dtype)

    def add_ggn(self, sums: GGNSums) -> GGNSums:
        """Σ over processes of H, loss and number of data; batches are counted as this process met them."""
        if self.count == 1:
            return sums
        num_data = torch.tensor([float(sums.num_data)], dtype=torch.float64, device=sums.ggn.device)
        total = self.add(torch.cat([sums.ggn.flatten(), sums.loss, num_data]))
        ggn, loss, num_data = total.split([sums.ggn.numel(), sums.loss.numel(), 1])
        return replace(sums, ggn=ggn.view_as(sums.ggn), loss=loss, num_data=int(num_data))

    def root_mean_square(self, value: float) -> float:
        """Of the values of all processes."""
        if self.count == 1:
            return value
        return math.sqrt(float(self.add(torch.tensor(value**2, dtype=torch.float64, device=self._device))) / self.count)

    # -- files --

    @contextlib.contextmanager
    def file_of_first(self, path: Path) -> Iterator[Path | None]:
        """The first process's file, None if it has none: the others, on other machines perhaps, get a copy."""
        if self.count == 1:
            yield path if path.exists() else None
            return
        with self.together():
            content = path.read_bytes() if self.rank == 0 and path.exists() else b""
        size = int(self.from_first(len(content)))
        if size == 0:
            yield None
            return
        t = torch.frombuffer(bytearray(content or bytes(size)), dtype=torch.uint8).to(self._device)
        _collective(dist.broadcast, t, 0)
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / path.name
            copy.write_bytes(t.cpu().numpy().tobytes())
            yield copy

    def _gather(self, numbers: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(list(numbers), dtype=torch.int64, device=self._device)
        parts = [torch.empty_like(mine) for _ in range(self.count)]
        _collective(dist.all_gather, parts, mine)
        return [part.tolist() for part in parts]

    @property
    def _device(self) -> torch.device:
        """Of messages that are not tensors of the fit: nccl knows the GPU's memory only."""
        if self.count > 1 and dist.get_backend() == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


ALONE = Processes()


def rank_under_torchrun() -> tuple[int, int]:
    """Number of this process and how many there are, as torchrun says; (0, 1) without it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """In a script that torchrun started, the group of its processes; otherwise nothing."""
    if rank_under_torchrun()[1] == 1 or dist.is_initialized():
        yield
        return
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _collective(operation: Any, *arguments: Any) -> None:
    try:
        operation(*arguments)
    except RuntimeError as error:
        raise ProcessError(
            f"another process of this fit is gone or does not answer ({_first_line(error)}); start all of them again, "
            "with checkpoint_dir=... and resume=True to go on where they were"
        ) from error


def _number(fact: Any) -> int:
    """The same for equal facts only: what processes compare."""
    text = json.dumps(fact, sort_keys=True, default=str)
    return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]
