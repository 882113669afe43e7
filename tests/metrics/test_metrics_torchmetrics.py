import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torchmetrics import Metric

from scalla import metrics
from scalla.metrics.torchmetrics import OODAUROC, OODFPR95, GaussianCRPS, IntervalCoverage
from scalla.types import InputError

GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.randn(90, generator=GENERATOR).round(decimals=1)
IS_OUT = torch.rand(90, generator=GENERATOR) < 0.4
MEAN, Y = torch.randn(2, 90, generator=GENERATOR)
VAR = torch.rand(90, generator=GENERATOR) + 0.1

#: each class, the arguments of its update over all the data, and the value that the functions give
CASES: list[tuple[type[Metric], tuple[torch.Tensor, ...], float]] = [
    (OODAUROC, (SCORES, IS_OUT), metrics.auroc(SCORES[~IS_OUT], SCORES[IS_OUT])),
    (OODFPR95, (SCORES, IS_OUT), metrics.fpr95(SCORES[~IS_OUT], SCORES[IS_OUT])),
    (GaussianCRPS, (MEAN, VAR, Y), metrics.crps_gaussian(MEAN, VAR, Y)),
    (IntervalCoverage, (MEAN, VAR, Y), metrics.interval_coverage(MEAN, VAR, Y)),
]


@pytest.mark.parametrize(("kind", "arrays", "expected"), CASES)
def test_batches_give_the_value_of_the_whole(kind: type[Metric], arrays: tuple, expected: float) -> None:
    metric = kind()
    for batch in zip(*(a.split([7, 1, 50, 32]) for a in arrays), strict=True):
        metric.update(*batch)
    assert isinstance(metric.compute(), torch.Tensor)
    assert float(metric.compute()) == pytest.approx(expected, rel=1e-6)
    metric.reset()
    assert float(metric(*arrays)) == pytest.approx(expected, rel=1e-6)  # forward: the value of the batch
    assert float(metric.compute()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("kind", "arrays", "expected"), CASES)
def test_merged_states(kind: type[Metric], arrays: tuple, expected: float) -> None:
    first, second = kind(), kind()
    first.update(*(a[:33] for a in arrays))
    second.update(*(a[33:] for a in arrays))
    first.merge_state(second)
    assert float(first.compute()) == pytest.approx(expected, rel=1e-6)


def _one_of_two_processes(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    share = slice(0, 33) if rank == 0 else slice(33, 90)  # of unequal size
    values = []
    for kind, arrays, _ in CASES:
        metric = kind()
        metric.update(*(a[share] for a in arrays))
        values.append(float(metric.compute()))
    torch.save(values, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_agree_on_the_value_of_the_whole(tmp_path: Path) -> None:
    mp.spawn(_one_of_two_processes, args=(str(tmp_path),), nprocs=2)
    for rank in range(2):
        values = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert values == pytest.approx([expected for _, _, expected in CASES], rel=1e-6)


def test_an_empty_batch_changes_nothing() -> None:
    metric = OODAUROC()
    metric.update(SCORES, IS_OUT)
    metric.update(torch.zeros(0), torch.zeros(0))
    assert float(metric.compute()) == pytest.approx(CASES[0][2], rel=1e-6)


def test_level_of_the_interval() -> None:
    metric = IntervalCoverage(level=0.5)
    metric.update(MEAN, VAR, Y)
    assert float(metric.compute()) == pytest.approx(metrics.interval_coverage(MEAN, VAR, Y, 0.5))


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
def test_errors() -> None:
    with pytest.raises(InputError, match="no scores yet"):
        OODAUROC().compute()
    with pytest.raises(InputError, match="no predictions yet"):
        GaussianCRPS().compute()
    metric = OODFPR95()
    metric.update(torch.randn(3), torch.zeros(3))
    with pytest.raises(InputError, match="got 3 in-distribution and 0 OOD scores; wanted at least one of each"):
        metric.compute()
    with pytest.raises(InputError, match="1 NaN among"):
        metric.update(torch.tensor([float("nan")]), torch.ones(1))
    with pytest.raises(InputError, match="values other than 0 and 1"):
        metric.update(torch.randn(2), torch.tensor([0, 2]))
    with pytest.raises(InputError, match=r"got scores of shape \(2,\) and is_out of shape \(3,\)"):
        metric.update(torch.randn(2), torch.ones(3))
    with pytest.raises(InputError, match="negative"):
        GaussianCRPS().update(MEAN, -VAR, Y)


def test_without_torchmetrics_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "scalla.metrics.torchmetrics")
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(ImportError, match=r"pip install \"scalla\[metrics\]\""):
        importlib.import_module("scalla.metrics.torchmetrics")
