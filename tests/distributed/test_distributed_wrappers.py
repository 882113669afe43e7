"""Networks and loaders as other libraries wrap them, and torchrun itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jobs
import pytest
from torch import nn

from children import ChildError, assert_same, on_ranks
from scalla import InputError, ScaLLA
from scalla.benchmark import regression
from scalla.benchmark.runner import share_of
from scalla.distributed import process_group, rank_under_torchrun
from scalla.wrapped import plain_network


@pytest.mark.parametrize("wrap", [jobs.data_parallel, jobs.accelerated, jobs.unwrapped])
def test_data_parallel_networks_fit_as_the_plain_one(wrap: Callable[[nn.Module], nn.Module]) -> None:
    for found in on_ranks(2, jobs.fit, wrap=wrap):
        assert_same(found, jobs.fit(), rtol=1e-6, atol=1e-9)


def test_mixed_precision_is_refused() -> None:
    for error in on_ranks(2, jobs.fit, wrap=jobs.mixed_precision):
        assert error.kind == "InputError"
        assert "give accelerator.unwrap_model(model, keep_fp32_wrapper=False)" in error.message


def test_sharded_networks_are_refused() -> None:
    for error in on_ranks(2, jobs.fit, wrap=jobs.fully_sharded):
        assert isinstance(error, ChildError)
        assert error.kind == "InputError"
        assert "whose weights are sharded (FSDP)" in error.message
        assert "full_state_dict=True" in error.message


def test_loaders_that_repeat_inputs_are_refused() -> None:
    for error in on_ranks(2, jobs.fit_with_a_prepared_loader):
        assert error.kind == "InputError"
        assert "give the loader as it was before accelerator.prepare(...)" in error.message


def test_without_a_group_a_fit_is_alone_or_an_error() -> None:
    loader = jobs.train_loader("alike", *jobs.data("classification", 12))
    for distributed in (True, "shards"):
        with pytest.raises(InputError, match=r"without a process group; start the script with torchrun"):
            ScaLLA(jobs.network(), num_features=6).fit(loader, num_steps=1, distributed=distributed)
    with pytest.raises(InputError, match=r"got distributed='ddp'; choose 'auto', 'shards', True or False"):
        ScaLLA(jobs.network(), num_features=6).fit(loader, num_steps=1, distributed="ddp")  # type: ignore[arg-type]
    model = jobs.network()
    assert plain_network(nn.DataParallel(model)) is model
    with process_group():  # not started by torchrun: nothing happens
        assert ScaLLA(model, num_features=6).fit(loader, num_steps=1, distributed=False).n_data == 12


def test_torchrun_shares_out_a_benchmark_by_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run is somebody's, none is two processes', and a seed's rows stay with its network."""
    assert rank_under_torchrun() == (0, 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert rank_under_torchrun() == (1, 3)
    runs = regression.plan(["map", "scalla"], [1, 2, 5, 7])
    shares = [share_of(runs, rank, 3) for rank in range(3)]
    assert sorted(run.name for share in shares for run in share) == sorted(run.name for run in runs)
    assert [sorted({run.seed for run in share}) for share in shares] == [[1, 7], [2], [5]]


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    here = Path(__file__).parent
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environ = {**os.environ, "PYTHONPATH": f"{here.parent}{os.pathsep}{here}", "OMP_NUM_THREADS": "1"}
    out = tmp_path / "result.json"
    done = subprocess.run(
        [*command, str(here / "torchrun_script.py"), str(out)], env=environ, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert_same(json.loads(out.read_text(encoding="utf-8")), jobs.fit("sampler", bias=True), rtol=1e-6, atol=1e-9)
