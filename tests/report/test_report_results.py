"""Runs → rows: what is done, failed, missing, set aside."""

from pathlib import Path

import pytest
from made_runs import fail, record_of, run_of, write_results

from scalla.benchmark.methods import ROWS
from scalla.benchmark.records import Run, write_json
from scalla.report.results import load_results, value_at
from scalla.types import FileFormatError, InputError


def row_of(folder: Path, method: str, variant: str = "", protocol: str = "paper"):
    (found,) = [r for r in load_results(folder).of(protocol) if (r.method, r.variant) == (method, variant)]
    return found


def test_rows_are_those_of_the_plan_in_its_order(tmp_path: Path) -> None:
    write_results(tmp_path, protocols=["paper"], methods=["knn", "scalla"], seeds=[1], with_regression=False)
    results = load_results(tmp_path)
    expected = [(r.name, v) for r in ROWS.values() if "paper" in r.protocols for v in r.variants]
    assert sorted((r.method, r.variant) for r in results.of("paper")) == sorted(expected)
    kinds = [r.kind for r in results.of("paper")]
    assert kinds == sorted(kinds, key=["method", "control", "detector"].index)
    assert results.of("tuned") == []
    assert {r.method for r in results.of("paper", "control")} == {"context_classifier", "prior_score", "brightness"}


def test_seeds_of_a_row(tmp_path: Path) -> None:
    for seed, nll in ((1, 0.25), (2, 0.27)):
        run = run_of("scalla", "prior 1", "paper", seed)
        write_json(run.done_path(tmp_path), record_of(run, nll=nll))
    fail(tmp_path, run_of("scalla", "prior 1", "paper", 3))
    row = row_of(tmp_path, "scalla", "prior 1")
    assert row.by_seed(("metrics", "nll")) == {1: 0.25, 2: 0.27}
    found = row.spread(("metrics", "nll"))
    assert found is not None
    assert (found.mean, found.count) == (pytest.approx(0.26), 2)
    assert found.std == pytest.approx(0.02 / 2**0.5)
    assert list(row.failures) == [3]
    assert row.missing == ()
    assert row.label == "ScaLLA · prior 1"
    assert row.slug == "fmnist-paper-scalla-prior-1"
    other = row_of(tmp_path, "scalla", "marglik")
    assert (dict(other.records), other.missing) == ({}, (1, 2, 3))
    assert other.spread(("metrics", "nll")) is None


def test_a_run_that_was_done_later_is_no_longer_failed(tmp_path: Path) -> None:
    run = run_of("map", "", "paper", 1)
    fail(tmp_path, run)
    assert list(row_of(tmp_path, "map").failures) == [1]
    write_json(run.done_path(tmp_path), record_of(run))
    row = row_of(tmp_path, "map")
    assert (list(row.records), list(row.failures)) == ([1], [])


def test_null_and_text_are_no_numbers(tmp_path: Path) -> None:
    run = run_of("map", "", "paper", 1)
    write_json(run.done_path(tmp_path), record_of(run, nll=float("nan"), ece="high"))
    row = row_of(tmp_path, "map")
    assert row.by_seed(("metrics", "nll")) == {}
    assert row.by_seed(("metrics", "ece")) == {}
    assert value_at({"a": {"b": 0}}, ("a", "b", "c")) is None


def test_other_settings_are_set_aside_and_said_so(tmp_path: Path) -> None:
    for seed in (1, 2):
        run = run_of("map", "", "paper", seed)
        write_json(run.done_path(tmp_path), record_of(run))
    old = run_of("map", "", "paper", 3, lr=0.5)
    write_json(old.done_path(tmp_path), record_of(old))
    results = load_results(tmp_path)
    assert list(row_of(tmp_path, "map").records) == [1, 2]
    assert results.set_aside == ("1 runs of paper map with other settings or data",)


def test_quick_runs_are_shown_only_where_there_are_no_full_ones(tmp_path: Path) -> None:
    quick = Run(**{**run_of("map", "", "paper", 1).to_json(), "quick": True})
    write_json(quick.done_path(tmp_path), record_of(quick, nll=9.0))
    results = load_results(tmp_path)
    assert results.quick
    assert row_of(tmp_path, "map").by_seed(("metrics", "nll")) == {1: 9.0}
    assert row_of(tmp_path, "map").missing == ()  # one seed is all that a quick run plans
    full = run_of("map", "", "paper", 1)
    write_json(full.done_path(tmp_path), record_of(full, nll=0.25))
    results = load_results(tmp_path)
    assert not results.quick
    assert results.set_aside == ("1 quick runs of fmnist, since there are full ones",)
    assert row_of(tmp_path, "map").by_seed(("metrics", "nll")) == {1: 0.25}


def test_a_method_that_is_planned_no_more_is_still_shown(tmp_path: Path) -> None:
    run = run_of("map", "", "paper", 1)
    gone = Run(**{**run.to_json(), "method": "gone"})
    write_json(gone.done_path(tmp_path), {**record_of(run), "run": gone.to_json(), "title": "Gone"})
    assert row_of(tmp_path, "gone").title == "Gone"


def test_networks_are_no_rows(tmp_path: Path) -> None:
    write_results(tmp_path, protocols=["paper"], methods=["map"], seeds=[1], with_regression=False)
    results = load_results(tmp_path)
    assert "network" not in {r.method for r in results.of("paper")}
    assert list(results.networks["paper"].records) == [1]


def test_a_folder_without_runs_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="run `scalla benchmark fmnist` first"):
        load_results(tmp_path)


def test_a_broken_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    write_results(tmp_path, protocols=["paper"], methods=["map"], seeds=[1], with_regression=False)
    (tmp_path / "fmnist" / "half.json").write_text('{"schema": 1,')
    with pytest.raises(FileFormatError, match=r"half\.json cannot be read"):
        load_results(tmp_path)
