"""One run from the data to the JSON, for a row of every kind, on made-up images; and the regression."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_images import write_images

from scalla.benchmark import fmnist, regression
from scalla.benchmark import images as image_data
from scalla.benchmark.images import Sizes
from scalla.benchmark.measure import outputs_of
from scalla.benchmark.methods import ROWS
from scalla.benchmark.methods.row import Problem
from scalla.benchmark.network import NetworkSettings, trained_network
from scalla.benchmark.records import Run, read_json
from scalla.benchmark.run_one import run_one
from scalla.metrics import nll
from scalla.report import write_report

SETS = {"KMNIST", "MNIST", "digits", "photos", "glyphs", "automata", "noise"}


@pytest.fixture(autouse=True)
def _few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes(protocol: str, *, quick: bool) -> Sizes:
        return Sizes(50, 12, 15, *((0.2, 0.4) if protocol == "tuned" else (0.0, 0.0)))

    monkeypatch.setattr(fmnist, "sizes_of", sizes)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Networks and results of all tests here."""
    return tmp_path_factory.mktemp("execute")


def executed(root: Path, folder: Path, method: str, protocol: str, variant: str = "") -> dict[str, Any]:
    runs = fmnist.plan([method], [1], [protocol], quick=True, data_root=root)
    (run,) = [r for r in runs if (r.method, r.variant) == (method, variant)]
    done = run_one(run, out=folder / "results", cache=folder / "runs", data_root=root)
    record = read_json((run.done_path if done else run.failed_path)(folder / "results"))
    assert done, record["error"]
    return record


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for v in value.values() for leaf in leaves(v)]
    return [leaf for v in value for leaf in leaves(v)] if isinstance(value, list) else [value]


def check_head(record: dict[str, Any], root: Path) -> None:
    assert record["status"] == "done"
    assert set(record["run"]["data"]) == set(image_data.checksums(root, allow_subset=True))
    assert record["run"]["settings"]["sizes"]["train"] == 50
    assert {"python", "torch", "scalla"} <= set(record["versions"])
    assert record["hardware"]["threads"] == torch.get_num_threads()
    cost = record["cost"]
    for name in ("fit_seconds", "tuning_seconds", "network_seconds", "measuring_seconds", "peak_memory_mb"):
        assert cost[name] >= 0, name
    assert cost["ratio_to_map"] == pytest.approx(cost["us_per_prediction"] / cost["us_map_forward"], rel=1e-4)
    assert cost["peak_memory_mb"] >= cost["memory_before_mb"] * 0.5
    assert set(record["metrics"]["ood"]) == SETS
    assert not [leaf for leaf in leaves(record) if isinstance(leaf, float) and not math.isfinite(leaf)]


def test_map_is_the_network(root: Path, folder: Path) -> None:
    record = executed(root, folder, "map", "paper")
    check_head(record, root)
    images = image_data.load_images(Sizes(50, 12, 15), root, allow_subset=True)
    network = trained_network(
        images,
        NetworkSettings(**record["run"]["settings"]["network"]),
        seed=1,
        data=record["run"]["data"],
        folder=folder / "runs" / "networks",
    )
    x, y = images.test
    with torch.no_grad():
        probs = network.model(x).softmax(-1)
    assert record["metrics"]["nll"] == pytest.approx(nll(probs, y), rel=1e-5)
    assert record["metrics"]["accuracy"] == pytest.approx(float((probs.argmax(-1) == y).double().mean()), abs=1e-6)
    assert record["metrics"]["as_published"] is None
    assert record["cost"]["fit_seconds"] < record["cost"]["network_seconds"]


def test_a_gaussian_row_by_marginal_likelihood(root: Path, folder: Path) -> None:
    record = executed(root, folder, "lla_last_kron", "paper", "marglik")
    check_head(record, root)
    metrics = record["metrics"]
    assert {"gaussian_entropy", "gaussian_entropy_projected", "entropy", "variance"} <= set(metrics["ood"]["KMNIST"])
    assert set(metrics["as_published"]["auc"]) == SETS
    assert metrics["found"]["prior_precision"] != 1.0
    assert record["cost"]["tuning_seconds"] > 0
    assert "ood_choice" not in metrics


def test_scalla_has_a_kernel_error_and_a_history(root: Path, folder: Path) -> None:
    record = executed(root, folder, "scalla_biased", "paper", "prior 1")
    check_head(record, root)
    error = record["metrics"]["kernel_error"]
    assert 0 < error["floor"] <= error["error"]
    assert error["num_inputs"] == [10, 10]
    scored = [entry for entry in record["history"] if entry["kernel_score"] is not None]
    assert [entry["step"] for entry in scored] == list(range(10, 101, 10))
    assert scored[-1]["kernel_score"] < scored[0]["kernel_score"]
    assert record["metrics"]["found"] == {"prior_precision": 1.0}


def test_a_tuned_row_says_what_it_tried_and_chose(root: Path, folder: Path) -> None:
    record = executed(root, folder, "lla_last_kron", "tuned")
    check_head(record, root)
    tried = {t["prior_precision"]: t["value"] for t in record["trials"]}
    assert len(tried) == 6
    best = record["metrics"]["found"]["prior_precision"]
    assert tried[best] == min(tried.values())
    assert record["chosen"] == ({} if best == 1.0 else {"prior_precision": best})
    choice = record["metrics"]["ood_choice"]
    assert choice["held_out_auc"][choice["score"]] == max(choice["held_out_auc"].values())
    for found in record["metrics"]["ood"].values():
        assert found["chosen"] == found[choice["score"]]
    assert record["metrics"]["as_published"] is None


@pytest.mark.parametrize(("method", "protocol"), [("knn", "tuned"), ("context_classifier", "paper")])
def test_detectors_and_controls(root: Path, folder: Path, method: str, protocol: str, monkeypatch: Any) -> None:
    few = tuple({"num_neighbours": k} for k in (1, 5))
    monkeypatch.setitem(ROWS, "knn", replace(ROWS["knn"], trials=few))
    record = executed(root, folder, method, protocol)
    check_head(record, root)
    assert record["metrics"]["nll"] is None
    assert set(record["metrics"]["ood"]["KMNIST"]) == {"score"}
    assert 0 <= record["metrics"]["ood"]["KMNIST"]["score"]["auc"] <= 1
    assert len(record["trials"]) == (2 if method == "knn" else 0)


def test_an_error_is_kept_with_its_place(root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ValueError(f"no file at {root}/x.gz")

    monkeypatch.setattr("scalla.benchmark.methods.map.MAP", broken)
    (_, run) = fmnist.plan(["map"], [2], ["paper"], quick=True, data_root=root)
    assert not run_one(run, out=folder / "failing", cache=folder / "runs", data_root=root)
    record = read_json(run.failed_path(folder / "failing"))
    assert record["error"]["message"] == "no file at x.gz"
    assert any("methods/map.py" in line for line in record["error"]["traceback"])
    assert str(root) not in json.dumps(record)
    monkeypatch.undo()
    monkeypatch.setattr(fmnist, "sizes_of", lambda *_, **__: Sizes(50, 12, 15))
    assert run_one(run, out=folder / "failing", cache=folder / "runs", data_root=root)
    assert not run.failed_path(folder / "failing").exists()


def test_one_seed_gives_the_same_numbers_twice(root: Path, folder: Path, tmp_path: Path) -> None:
    first = executed(root, folder, "lla_last_kron", "paper", "marglik")
    run = Run.from_json(first["run"])
    assert run_one(run, out=tmp_path, cache=folder / "runs", data_root=root)
    second = read_json(run.done_path(tmp_path))
    assert (second["metrics"], second["curves"], second["gallery"]) == (
        first["metrics"], first["curves"], first["gallery"],
    )  # fmt: skip


def test_the_network_run_is_its_history(root: Path, folder: Path) -> None:
    run = fmnist.plan(["map"], [1], ["paper"], quick=True, data_root=root)[0]
    assert run_one(run, out=folder / "results", cache=folder / "runs", data_root=root)
    record = read_json(run.done_path(folder / "results"))
    assert (record["kind"], [entry["epoch"] for entry in record["history"]]) == ("network", [1, 2, 3, 4])


def test_a_page_of_real_runs(root: Path, folder: Path, tmp_path: Path) -> None:
    """What the benchmark writes is what the report reads."""
    executed(root, folder, "map", "paper")
    page = write_report(folder / "results", tmp_path / "report.html").read_text(encoding="utf-8")
    assert "These are quick runs" in page
    assert '<tr><th scope="row"><a href="#note-fmnist-paper-map">MAP</a>' in page


def test_problem_of_a_method_holds_no_test_image(root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Problem] = []
    row = ROWS["map"]
    monkeypatch.setitem(ROWS, "map", replace(row, fit=lambda p, s: seen.append(p) or row.fit(p, s)))
    run = fmnist.plan(["map"], [1], ["tuned"], quick=True, data_root=root)[-1]
    assert run_one(run, out=folder / "watched", cache=folder / "runs", data_root=root)
    (problem,) = seen
    sizes = Sizes(50, 12, 15, 0.2, 0.4)
    images = image_data.load_images(sizes, root, allow_subset=True)
    test = {image.numpy().tobytes() for image in images.test[0]}
    assert problem.watched is not None
    for part in (problem.train[0], problem.watched, problem.context):
        assert part is not None
        assert not test & {image.numpy().tobytes() for image in part}


@pytest.mark.parametrize("method", ["map", "lla_last_full", "scalla"])
def test_regression(tmp_path: Path, method: str) -> None:
    (run,) = [r for r in regression.plan([method], [1], quick=True) if r.variant == "toy"]
    assert run_one(run, out=tmp_path, cache=tmp_path)
    record = read_json(run.done_path(tmp_path))
    metrics, gap = record["metrics"], record["metrics"]["gap"]
    assert metrics["rmse"] < 0.5
    assert 0.5 < metrics["coverage"] <= 1
    assert gap["rmse"] > 0
    stds = record["curves"]["toy"]["std"]
    assert (max(stds) == 0) == (method == "map")
    assert all(a >= b for a, b in zip(record["curves"]["toy"]["std_with_noise"], stds, strict=True))
    assert (metrics["kernel_error"] is not None) == (method == "scalla")
    assert (metrics["prior_precision"] is None) == (method == "map")


def test_outputs_do_not_depend_on_the_chunk_for_a_real_method(root: Path) -> None:
    images = image_data.load_images(Sizes(50, 12, 15), root, allow_subset=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    problem = Problem(model, images.train, images.context, seed=1)
    row = ROWS["lla_last_full"]
    method = row.fit(problem, {**row.settings, "num_samples": 16})
    whole = outputs_of(method, images.test[0], num_samples=16)
    parts = outputs_of(method, images.test[0], num_samples=16, chunk=5)
    torch.testing.assert_close(whole.probs, parts.probs, rtol=1e-4, atol=1e-6)
