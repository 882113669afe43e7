"""What goes wrong in one of several processes: none hangs, each says why, and the checkpoint goes on."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jobs
import pytest

from children import ChildError, assert_same, on_ranks, result_or_error, start_ranks


def errors(results: Sequence[Any]) -> list[str]:
    """Their words, in the processes' order; all must have failed."""
    assert all(isinstance(r, ChildError) for r in results), results
    return [f"{r.kind}: {r.message}" for r in results]


def folders(tmp_path: Path, count: int) -> list[str]:
    """A checkpoint folder of its own for each process, as on several machines."""
    made = [tmp_path / f"machine{rank}" for rank in range(count)]
    for folder in made:
        folder.mkdir()
    return [str(folder) for folder in made]


def test_resumed_in_as_many_processes_it_ends_bit_by_bit_where_it_would_have(tmp_path: Path) -> None:
    dirs = folders(tmp_path, 2)
    options = {"kind": "sampler", "bias": True, "dirs": dirs}
    stopped, never_stopped = on_ranks(2, jobs.stopped_and_resumed, **options), on_ranks(2, jobs.fit, **options)
    for found, wanted in zip(stopped, never_stopped, strict=True):
        assert_same(found, wanted)
    assert [jobs.files_in(folder) for folder in dirs] == [[], []]  # a finished fit needs no checkpoint


@pytest.mark.parametrize(("kind", "before", "after"), [("alike", 3, 2), ("sampler", 2, 3), ("sampler", 2, 1)])
def test_resumed_in_another_number_of_processes(tmp_path: Path, kind: str, before: int, after: int) -> None:
    dirs = folders(tmp_path, 3)
    for result in on_ranks(before, jobs.fit, kind=kind, dirs=dirs, stop_at=9):
        assert isinstance(result, ChildError)
        assert result.kind == "Stopped"
    # The first process alone writes; the others find what it wrote.
    assert [len(jobs.files_in(folder)) for folder in dirs] == [1, 0, 0]
    for found in on_ranks(after, jobs.fit, kind=kind, dirs=dirs, resume=True):
        assert_same(found, jobs.fit(kind), rtol=1e-6, atol=1e-9)


def test_an_error_in_one_process_ends_all() -> None:
    first, second, third = errors(on_ranks(3, jobs.fit, stop_at=5, stop_in=1))
    assert second == "Stopped: stopped at step 5"
    assert first == third == "ProcessError: process 1 of 3 failed, its own error says why"


def test_data_that_are_wrong_in_one_process_end_all() -> None:
    first, second = errors(on_ranks(2, jobs.fit_with_nan, at=1))
    assert "got NaN or infinite values in the inputs" in second
    assert first == "ProcessError: process 1 of 2 failed, its own error says why"


def test_networks_and_settings_must_be_the_same() -> None:
    for message in errors(on_ranks(2, jobs.fit, weights_differ=True)):
        assert message.startswith(
            "InputError: the 2 processes of this fit differ in weights; give all of them the same"
        )
    for message in errors(on_ranks(2, jobs.fit, seeds=[1, 2])):
        assert "differ in seed" in message


def test_a_fit_that_only_some_begin_is_an_error() -> None:
    begun, _ = on_ranks(2, jobs.fit_in_the_first_alone)
    assert begun.kind == "ProcessError"
    assert "only some of the 2 processes began this fit" in begun.message
    assert "distributed=False" in begun.message


def test_a_process_that_is_killed_ends_the_others_and_they_go_on_later(tmp_path: Path) -> None:
    dirs = folders(tmp_path, 2)
    children = start_ranks(2, jobs.fit_and_report, tmp_path, dirs=dirs)
    children[1].wait_for("step 9")
    children[1].kill()
    left = result_or_error(children[0])
    assert left.kind == "ProcessError"
    assert "another process of this fit is gone" in left.message
    assert "resume=True" in left.message
    for found, wanted in zip(on_ranks(2, jobs.fit, dirs=dirs, resume=True), on_ranks(2, jobs.fit), strict=True):
        assert_same(found, wanted)


def test_a_signal_to_one_process_writes_a_checkpoint_and_ends_all(tmp_path: Path) -> None:
    dirs = folders(tmp_path, 2)
    children = start_ranks(2, jobs.fit_and_report, tmp_path, dirs=dirs, num_steps=100_000, checkpoint_every=1e9)
    children[1].wait_for("step 50")
    children[1].send(signal.SIGTERM)
    for message in errors([result_or_error(child) for child in children]):
        assert message.startswith("KeyboardInterrupt: stopped by a signal; fit(..., resume=True) goes on from")
    assert jobs.files_in(dirs[0]) == ["fit.safetensors"]
