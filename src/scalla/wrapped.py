"""What data-parallel training wraps around loaders and networks, and what is inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.data import DistributedSampler

from scalla.functional import batch_size, first_rows
from scalla.types import InputError, Inputs, Loader


def distributed_sampler(loader: Loader) -> DistributedSampler[Any] | None:
    """The sampler that deals out the loader's data to the processes, if it has one."""
    owners = [loader, getattr(loader, "batch_sampler", None)]
    samplers = [getattr(owner, "sampler", None) for owner in owners]
    return next((s for s in samplers if isinstance(s, DistributedSampler)), None)


def without_padding(batches: Iterator[tuple[Inputs, Any]], loader: Loader) -> Iterator[tuple[Inputs, Any]]:
    """One epoch (x, y) of a loader, without the inputs that its DistributedSampler repeats to make shares equal."""
    sampler = distributed_sampler(loader)
    if sampler is None:
        yield from batches
        return
    left = len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))  # type: ignore[arg-type]
    for x, y in batches:
        size = batch_size(x)
        if left >= size:
            yield x, y
        elif left > 0:
            yield first_rows(x, left), y[:left]
        left -= size


def plain_network(model: nn.Module) -> nn.Module:
    """The network inside a data-parallel wrapper; what splits or rounds its weights is refused."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return plain_network(model.module)
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if kinds & {"FullyShardedDataParallel", "FSDPModule"} or any(
        type(p).__name__ == "DTensor" for p in model.parameters()
    ):
        raise InputError(
            "got a network whose weights are sharded (FSDP): Jacobian-vector products need them whole. Load the full "
            "weights into a plain network: plain.load_state_dict(torch.distributed.checkpoint.state_dict."
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))"
        )
    if "_original_forward" in vars(model):
        raise InputError(
            "got a network that Accelerate runs in mixed precision, in which derivatives of its float32 weights are "
            "rounded; give accelerator.unwrap_model(model, keep_fp32_wrapper=False), or the network in one dtype "
            "(model.bfloat16(), say)"
        )
    return model
