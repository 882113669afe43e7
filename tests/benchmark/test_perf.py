"""The measurements of speed run, on tiny networks, and their arithmetic and tables are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PERF = Path(__file__).parents[2] / "benchmarks" / "perf"


@pytest.fixture
def perf(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The scripts import each other by their plain names, as they do when they are run."""
    monkeypatch.syspath_prepend(str(PERF))
    names = {path.stem for path in PERF.glob("*.py")}
    yield lambda name: __import__(name)
    for name in names:
        sys.modules.pop(name, None)


def test_exponent_and_ratio(perf: Any) -> None:
    timing = perf("timing")
    assert timing.exponent([1.0, 10.0, 100.0], [3.0, 3e2, 3e4]) == pytest.approx(2)
    assert timing.median_ratio([2.0, 9.0, 8.0], [1.0, 3.0, 1.0]) == 3.0


def test_a_page_gets_the_tables_between_its_markers(perf: Any) -> None:
    row = perf("matching").measure(4, 3, 5, repeats=1)
    about = {
        "hardware": {"threads": 1, "cpu": "a processor"},
        "versions": dict.fromkeys(("torch", "laplace-torch"), "1"),
    }
    found = {"matching": {"rows": [row], **about, "versions": {**about["versions"], "python": "3"}}}
    page = "before\n<!-- matching -->\nold\n<!-- /matching -->\nafter\n<!-- step -->\nkept\n<!-- /step -->\n"
    table = perf("table")
    filled = table.filled(page, found)
    assert "| 4, 3 |" in filled
    assert "| 4, 3 |" in table.tables(found)
    assert "old" not in filled
    assert filled.startswith("before\n")
    assert filled.endswith("after\n<!-- step -->\nkept\n<!-- /step -->\n")
    assert table.filled(filled, found) == filled


def test_the_large_networks_have_their_sizes(perf: Any) -> None:
    wanted = {"ResNet-50": 23.5e6, "ViT-B": 85.7e6, "GPT-2": 123.7e6}
    with torch.device("meta"):
        for case in perf("networks").LARGE:
            assert sum(p.numel() for p in case.build().parameters()) == pytest.approx(wanted[case.name], rel=0.01)


def test_both_forms_of_the_matching_loss(perf: Any) -> None:
    row = perf("matching").measure(4, 3, 5, repeats=1)
    assert row["pairwise_numbers"] == 2 * 12**2
    assert row["ratio"] > 0


def test_a_step_and_its_floor_do_the_same_work(perf: Any) -> None:
    """Both change every weight of the surrogate, and none of the network's."""
    networks, step = perf("networks"), perf("step")
    model = networks.mlp(3, 4, 1, 2).eval()
    before = [p.detach().clone() for p in model.parameters()]
    prepared = step.Prepared.of(model, torch.rand(6, 3), torch.arange(6) % 2, "mirror", 5)
    for run in (prepared.step(), prepared.floor()):
        weights = [p.detach().clone() for p in prepared.features.trainable()]
        run()
        assert all(not torch.equal(a, b) for a, b in zip(weights, prepared.features.trainable(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_ways_of_a_step_and_the_one_without_a_compiler(perf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each changes the surrogate's weights; of the compiled one a row says why there is no number."""
    variants, networks = perf("variants"), perf("networks")
    monkeypatch.setattr(variants, "compiler_here", lambda: None)
    rows = list(variants.measure(networks.QUICK[0], num_features=3, num_steps=1, repeats=1))
    assert [row["way"] for row in rows] == [
        "float32",
        "channels_last",
        "bfloat16 autocast",
        "channels_last, bfloat16 autocast",
        "4 probes",
        "surrogate compiled",
    ]
    assert rows[0]["ratio"] == 1
    assert all(row["ratio"] > 0 for row in rows[:-1])
    assert all(0 < row["product_error"] < 0.1 for row in rows[2:4])
    assert "no C++ compiler" in rows[-1]["failed"]
    table = perf("table")._variants(rows)
    assert "8 + 8 inputs" in table
    assert "| surrogate compiled | not measured: there is no C++ compiler |  |" in table


def test_a_step_in_bfloat16_and_channels_last_is_what_it_says(perf: Any) -> None:
    variants, networks = perf("variants"), perf("networks")
    ready = variants.prepared(networks.QUICK[0], 3, memory_format=torch.channels_last)
    weights = [p for p in ready.features.trainable() if p.ndim == 4 and p.shape[1] > 1]
    assert weights
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)
    lowered = variants.in_bfloat16(ready)
    assert lowered.autocast is lowered.product.autocast is torch.bfloat16
    before = [p.detach().clone() for p in weights]
    lowered.step()()
    assert all(not torch.equal(a, b) for a, b in zip(before, weights, strict=True))


@pytest.mark.slow
def test_quick_run_writes_measurements_table_and_plots(tmp_path: Path) -> None:
    command = [sys.executable, str(PERF / "run.py"), "--out", str(tmp_path), "--quick"]
    parts = ["step", "variants", "matching", "prediction", "scaling", "classes"]
    done = subprocess.run([*command, "--parts", *parts], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = {part: json.loads((tmp_path / f"{part}.json").read_text()) for part in parts}
    assert {row["surrogate"] for row in found["step"]["rows"]} == {"mirror", "trunk"}
    compiled = found["variants"]["rows"][-1]
    assert compiled["way"] == "surrogate compiled"
    assert compiled.get("failed") or compiled["ratio"] > 0
    (row,) = found["prediction"]["rows"]
    assert row["ratio"]["forward"] == 1
    assert all(ratio > 0 for ratio in row["ratio"].values())
    assert {row["letter"] for row in found["scaling"]["rows"]} == set("PBSCmN")
    table = (tmp_path / "table.md").read_text()
    assert f"| {row['network']} | mirror |" in table
    assert (tmp_path / "scaling.png").stat().st_size > 1000
