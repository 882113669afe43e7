"""One seed, one result: whatever the loader's workers, the batches of a prediction, and who else runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kill_jobs
import pytest
import torch
from fault_table import FaultTable
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cases import CASES, Case, normal
from children import assert_same
from scalla import ScaLLA


def fitted(
    case: Case,
    *,
    seed: int = 0,
    num_steps: int = 6,
    dtype: torch.dtype = torch.float32,
    model: nn.Module | None = None,
) -> ScaLLA:
    la = ScaLLA(model or case.model(dtype=dtype), case.likelihood, num_features=4, seed=seed)
    return la.fit(case.loader(), num_steps=num_steps)


def answers(la: ScaLLA, x: Any) -> dict[str, Tensor]:
    prediction = la.predict(x)
    return {"mean": prediction.mean, "variance": prediction.var, "score": la.ood_score(x), "features": la.features(x)}


@pytest.mark.parametrize("name", ["cnn_batchnorm", "transformer_encoder", "lstm", "regression_three"])
def test_one_seed_gives_one_result(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(1)
    first = answers(fitted(case), case.inputs(5))
    torch.manual_seed(2)
    torch.rand(7)
    assert_same(answers(fitted(case), case.inputs(5)), first)
    other = answers(fitted(case, seed=1), case.inputs(5))
    assert not torch.equal(other["features"], first["features"])


@pytest.mark.parametrize("name", ["cnn_batchnorm", "transformer_encoder", "gru", "dict_keywords"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_batches_of_a_prediction_do_not_matter(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    la = fitted(case, dtype=dtype)
    x = case.inputs(9)
    whole = answers(la, x)
    for size in (1, 4):
        parts = [answers(la, _rows(x, slice(i, i + size))) for i in range(0, 9, size)]
        for key, wanted in whole.items():
            found = torch.cat([part[key] for part in parts])
            scale = float(wanted.abs().max())
            tolerance = 1e-6 if dtype == torch.float32 else 1e-12  # of the largest entry
            torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance * scale)


def _rows(x: Any, rows: slice) -> Any:
    return {k: v[rows] for k, v in x.items()} if isinstance(x, dict) else x[rows]


class Numbered(TensorDataset):
    """A dataset that draws random numbers of its own where it is read, in a worker or not: it must not matter."""

    def __getitem__(self, index: int) -> Any:
        torch.rand(index % 3)
        return super().__getitem__(index)


def test_the_number_of_workers_does_not_matter() -> None:
    case = CASES["mlp"]
    x, y = case.inputs(24), case.labels(24)
    found = []
    for num_workers in (0, 2):
        loader = DataLoader(Numbered(x, y), batch_size=8, shuffle=True, num_workers=num_workers)
        la = ScaLLA(case.model(), num_features=4).fit(loader, context=x + 3, bias=True, num_steps=5)
        found.append({**answers(la, x), "H": la.posterior_precision, "losses": [e.loss for e in la.history]})
    assert_same(found[1], found[0])


def in_threads(functions: list[Callable[[], Any]]) -> list[Any]:
    """All begun at the same moment."""
    gate = threading.Barrier(len(functions))

    def run(function: Callable[[], Any]) -> Any:
        gate.wait(60)
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(120) for future in [pool.submit(run, function) for function in functions]]


@pytest.mark.parametrize("times", [3, pytest.param(200, marks=pytest.mark.stress)])
@pytest.mark.parametrize("name", ["cnn_batchnorm", "transformer_encoder", "lstm"])
def test_predictions_from_several_threads(table: FaultTable, name: str, times: int) -> None:
    case = CASES[name]
    la = fitted(case)
    inputs = [_rows(case.inputs(16), slice(i, i + 3)) for i in range(4)]
    wanted = [answers(la, x) for x in inputs]
    for _ in range(times):
        found = in_threads([lambda x=x: answers(la, x) for x in inputs])  # type: ignore[misc]
        for one, alone in zip(found, wanted, strict=True):
            assert_same(one, alone)
    table.add(f"4 threads predict at once ({name})", "each gets what it would alone", count=4 * times, outcome="equal")


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.stress)])
@pytest.mark.parametrize("name", ["transformer_encoder", "lstm"])
def test_predictions_while_others_fit(table: FaultTable, name: str, times: int) -> None:
    """The fits' derivatives need switches of PyTorch's kernels that are one for the whole process.

    That all of them are as before in the end is seen to for every test.
    """
    case = CASES[name]
    la = fitted(case)
    x = case.inputs(5)
    wanted, fit_alone = answers(la, x), answers(fitted(case, seed=3), x)
    for _ in range(times):
        model = case.model()  # here: a network begins with draws of the global random state, which is everybody's
        fit = lambda model=model: answers(fitted(case, seed=3, model=model), x)
        predict = lambda: [answers(la, x) for _ in range(10)]
        first, second, many = in_threads([fit, fit, predict])
        for found in (first, second):
            assert_same(found, fit_alone, rtol=1e-4, atol=1e-4)
        for found in many:  # with another kernel while a derivative has it switched off: the same but for rounding
            assert_same(found, wanted, rtol=1e-4, atol=1e-5)
    promise = "fits and predictions as if alone, no switch left behind"
    table.add(f"2 fits and a prediction at once ({name})", promise, count=times, outcome="equal")


def test_a_fit_in_a_thread_is_that_of_the_main_thread(tmp_path: Path) -> None:
    """Signals belong to the main thread: a fit with a checkpoint does without them in another."""
    x = normal(6, 2, seed=9)

    def fit(folder: str) -> dict[str, Tensor]:
        la = ScaLLA(kill_jobs.network(), num_features=5)
        la.fit(kill_jobs.train_loader(), num_steps=10, checkpoint_dir=tmp_path / folder, checkpoint_every=0.0)
        return answers(la, x)

    alone = fit("a")
    (found,) = in_threads([lambda: fit("b")])
    assert_same(found, alone)
