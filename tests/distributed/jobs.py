"""What the processes of a test do: module-level functions, the same for one process alone and for each of several."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cases import mlp, normal
from children import report
from scalla import ScaLLA, distributed
from scalla.distributed import Processes
from scalla.kernel_loss import gram_sums, matching_loss, reduce_sums
from scalla.probes import draw_probe
from scalla.training import HistoryEntry

GLOBAL_BATCH, NUM_STEPS = 12, 20
#: two rows in the last batch: one of three processes has none of them. Shares are of one length: no row is repeated
NUM_DATA = {"alike": 26, "sampler": 24, "shards": 27}
TEST_INPUTS = 7


def rank_and_count() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def network(num_outputs: int = 3) -> nn.Module:
    torch.manual_seed(3)
    return mlp(num_outputs).double()


def data(likelihood: str, num: int) -> tuple[Tensor, Tensor]:
    x = normal(num, 2, seed=1, dtype=torch.float64)
    if likelihood == "regression":
        return x, normal(num, 3, seed=2, dtype=torch.float64)
    return x, torch.randint(3, (num,), generator=torch.Generator().manual_seed(2))


def train_loader(kind: str, x: Tensor, y: Tensor) -> Any:
    """Loaders that make the same global batches in any number of processes.

    "alike": every process has all rows; "sampler": DistributedSampler; "shards": each has a list of its own rows.
    """
    rank, count = rank_and_count()
    dataset = TensorDataset(x, y)
    if kind == "alike" or (kind == "sampler" and count == 1):
        return DataLoader(dataset, batch_size=GLOBAL_BATCH, shuffle=kind == "alike")
    if kind == "sampler":
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, count, rank, shuffle=False)
        return DataLoader(dataset, batch_size=GLOBAL_BATCH // count, sampler=sampler)
    batches = list(zip(x.split(GLOBAL_BATCH), y.split(GLOBAL_BATCH), strict=True))
    return [(xs[rank::count], ys[rank::count]) for xs, ys in batches]


def summary(la: ScaLLA) -> dict[str, Any]:
    """Everything that a fit decides, as numbers."""
    assert la.posterior is not None
    x = normal(TEST_INPUTS, 2, seed=9, dtype=torch.float64)
    prediction = la.predict(x)
    return {
        "losses": [entry.loss for entry in la.history],
        "H": la.posterior.ggn,
        "data loss": la.posterior.loss,
        "number of data": la.n_data,
        "features": la.features(x),
        "mean": prediction.mean,
        "variance": prediction.var,
        "samples": la.predictive_samples(x, 3),
        "score": la.ood_score(x),
    }


def fit(
    kind: str = "alike",
    *,
    likelihood: Any = "classification",
    bias: bool = False,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    num_data: int | None = None,
    dirs: list[str] | None = None,
    stop_at: int | None = None,
    stop_in: int | None = None,
    resume: bool = False,
    num_features: int = 6,
    seeds: list[int] | None = None,
    weights_differ: bool = False,
    at_entry: Callable[[HistoryEntry], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """One fit from the start, stopped at an entry of the history (in one process or all), or resumed."""
    rank, count = rank_and_count()
    torch.manual_seed(rank)  # the global state of each process is its own
    model = network()
    if weights_differ and rank:
        with torch.no_grad():
            next(model.parameters()).add_(1e-9)
    model = wrap(model) if wrap is not None else model
    x, y = data(likelihood, num_data or NUM_DATA[kind])
    context = normal(9, 2, seed=4, dtype=torch.float64) + 3
    if kind == "shards":
        context = [context[rank::count].clone()]  # type: ignore[assignment]
        options.setdefault("context_batch_size", 9 // count)
        options["distributed"] = "shards" if count > 1 else "auto"
    la = ScaLLA(
        model,
        likelihood,
        num_features=num_features,
        seed=seeds[rank] if seeds else 5,
        surrogate_options={"start": "random"},
    )

    def callback(entry: HistoryEntry) -> None:
        if at_entry is not None:
            at_entry(entry)
        if stop_at is not None and entry.step >= stop_at and stop_in in (None, rank):
            raise Stopped(f"stopped at step {entry.step}")

    la.fit(
        train_loader(kind, x, y),
        context=context if bias else None,
        bias=bias,
        num_steps=options.pop("num_steps", NUM_STEPS),
        num_probes=2,
        callback=callback,
        checkpoint_dir=dirs[rank] if dirs else None,
        checkpoint_every=options.pop("checkpoint_every", 0.0),
        resume=resume,
        **options,
    )
    return summary(la)


class Stopped(Exception):
    """What a test stops a fit with."""


def stopped_and_resumed(**options: Any) -> dict[str, Any]:
    with contextlib.suppress(Stopped):
        fit(**{**options, "stop_at": 9})
    return fit(**options, resume=True)


def files_in(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def gradient() -> dict[str, Any]:
    """Loss and gradient of one batch with two groups; its rows are shared out, so some processes may have none."""
    processes = Processes.of("auto")
    model = nn.Linear(2, 3 * 4).double()
    with torch.no_grad():
        model.weight.copy_(normal(12, 2, seed=1, dtype=torch.float64))
        model.bias.copy_(normal(12, seed=2, dtype=torch.float64))
    blocks = []
    for group, size in enumerate((5, 2)):
        x, num_rows = processes.rows(normal(size, 2, seed=3 + group, dtype=torch.float64), own=False)
        z, _ = processes.rows(normal(size, 3, 2, seed=6 + group, dtype=torch.float64), own=False)
        blocks.append((model(x).unflatten(1, (3, 4))[:num_rows], z[:num_rows], group))  # type: ignore[index]
    loss = matching_loss(reduce_sums(gram_sums(blocks), processes.add))
    loss.backward()
    processes.add_gradients(list(model.parameters()))
    return {"loss": loss, "weight": model.weight.grad, "bias": model.bias.grad}


def probes() -> dict[str, Any]:
    rank, _ = rank_and_count()
    torch.manual_seed(100 + rank)
    torch.rand(rank)
    return {f"step {s}": draw_probe({"w": torch.zeros(5, 3)}, kind="rademacher", seed=1, step=s)["w"] for s in range(3)}


def updated(kind: str) -> dict[str, Any]:
    """Data added, and some of them taken out again; H of a fit that trains nothing."""
    x, y = data("classification", 28)
    la = ScaLLA(network(), num_features=6, seed=5)
    la.fit(train_loader("alike", x[:10], y[:10]), num_steps=0)
    la.update(
        train_loader(kind, x[10:], y[10:]),
        distributed="shards" if kind == "shards" and dist.is_initialized() else "auto",
    )
    la.forget([(x[:4], y[:4])])
    return summary(la)


def fit_with_nan(at: int) -> dict[str, Any]:
    """The data of process `at` have a NaN in their last batch."""
    rank, count = rank_and_count()
    x, y = data("classification", 24)
    x[20 + rank] = torch.nan if rank == at else 0
    la = ScaLLA(network(), num_features=6)
    batches = list(zip(x[rank::count].split(4), y[rank::count].split(4), strict=True))
    return summary(la.fit(batches, num_steps=0, distributed="shards"))


def fit_in_the_first_alone() -> dict[str, Any] | None:
    rank, _ = rank_and_count()
    distributed.PATIENCE = timedelta(seconds=2)
    return fit() if rank == 0 else None


def fit_and_report(**options: Any) -> dict[str, Any]:
    """A fit that tells the test at which step it is."""
    return fit(**options, at_entry=lambda entry: report(f"step {entry.step}"))


def data_parallel(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fully_sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def accelerated(model: nn.Module) -> nn.Module:
    return _accelerator().prepare(model)


def fit_with_a_prepared_loader() -> dict[str, Any]:
    x, y = data("classification", 24)
    prepared = _accelerator().prepare(train_loader("alike", x, y))
    return summary(ScaLLA(network(), num_features=6).fit(prepared, num_steps=2))


def mixed_precision(model: nn.Module) -> nn.Module:
    return _accelerator(mixed_precision="bf16").prepare(model)


def unwrapped(model: nn.Module) -> nn.Module:
    accelerator = _accelerator(mixed_precision="bf16")
    return accelerator.unwrap_model(accelerator.prepare(model), keep_fp32_wrapper=False)


def _accelerator(mixed_precision: str = "no") -> Any:
    from accelerate import Accelerator

    rank, count = rank_and_count()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    os.environ.update({name: str(value) for name, value in names.items()})  # as torchrun sets them
    return Accelerator(cpu=True, mixed_precision=mixed_precision)
