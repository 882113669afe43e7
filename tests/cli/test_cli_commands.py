"""The commands as they are typed: fit, predict, export, info, benchmark, report, their output and exit codes."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

import scalla
from scalla import ScaLLA
from scalla.cli.app import app
from scalla.cli.network import read_network

CODE = """
import torch
from torch import nn
def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
def one():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
"""
FIT = ("--steps", "4", "--num-features", "5", "--batch-size", "8", "-q")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Code, data and a classification that was fitted to them."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "nets.py").write_text(CODE)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, 2))
    write_csv(folder / "train.csv", x, rng.integers(3, size=24))
    write_csv(folder / "val.csv", x[:9] + 0.1, np.arange(9) % 3)
    write_csv(folder / "new.csv", x[:5] + 0.2, None)
    np.savez(folder / "around.npz", x=3 * rng.normal(size=(20, 2)))
    result = run(
        "fit", folder / "train.csv", "-n", f"{folder}/nets.py:make", "--val", folder / "val.csv",
        "--context", folder / "around.npz", "--bias", "--tune", "marglik", "-o", folder / "fitted", *FIT,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "fitted to 24 inputs" in result.stdout
    return folder


def write_csv(path: Path, x: np.ndarray, y: np.ndarray | None) -> None:
    lines = ["a,b" + (",label" if y is not None else "")]
    lines += [",".join(map(str, [*row, *([] if y is None else [y[i]])])) for i, row in enumerate(x)]
    path.write_text("\n".join(lines) + "\n")


def net(place: Path, name: str = "make") -> tuple[str, str]:
    return "--network", f"{place}/nets.py:{name}"


def test_what_fit_writes_is_what_the_library_fits(place: Path) -> None:
    model = read_network(f"{place}/nets.py:make")
    la = ScaLLA.from_pretrained(place / "fitted", model)
    rows = np.loadtxt(place / "train.csv", delimiter=",", skiprows=1)
    data = torch.utils.data.TensorDataset(torch.tensor(rows[:, :2]).float(), torch.tensor(rows[:, 2]).long())
    around = torch.from_numpy(np.load(place / "around.npz")["x"]).float()
    own = ScaLLA(model, num_features=5).fit(
        torch.utils.data.DataLoader(data, 8, shuffle=True), context=around, bias=True, num_steps=4
    )
    own.optimize_prior_precision("marglik")
    x = data.tensors[0]
    assert float(own.prior_precision) == pytest.approx(float(la.prior_precision), rel=1e-6)
    assert torch.allclose(own.functional_variance(x), la.functional_variance(x), rtol=1e-5)


def test_predictions_are_those_of_the_library(place: Path) -> None:
    result = run("predict", place / "fitted", place / "new.csv", *net(place))
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    la = ScaLLA.from_pretrained(place / "fitted", read_network(f"{place}/nets.py:make"))
    x = torch.tensor(np.loadtxt(place / "new.csv", delimiter=",", skiprows=1)).float()
    wanted = la.predict(x)
    assert [int(r["input"]) for r in rows] == list(range(5))
    assert [int(r["prediction"]) for r in rows] == wanted.probs.argmax(-1).tolist()
    for i, row in enumerate(rows):
        assert float(row["ood_score"]) == pytest.approx(float(wanted.gaussian_entropy[i]), rel=1e-5)
        assert float(row["entropy"]) == pytest.approx(float(wanted.entropy[i]), rel=1e-5)
        assert [float(row[f"p_{c}"]) for c in range(3)] == pytest.approx(wanted.probs[i].tolist(), rel=1e-5)
        assert float(row["confidence"]) == pytest.approx(float(wanted.max_prob[i]), rel=1e-5)


def test_predictions_as_json_lines_in_a_file_with_a_summary(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.jsonl"
    result = run(
        "predict", place / "fitted", place / "val.csv", *net(place), "--json", "-o", out, "--score", "variance",
        "--batch-size", "4",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    right = sum(row["prediction"] == i % 3 for i, row in enumerate(rows))
    assert len(rows) == 9
    assert result.stdout == ""
    assert f"accuracy {100 * right / 9:.2f}%" in result.stderr
    assert "on 9 inputs" in result.stderr
    la = ScaLLA.from_pretrained(place / "fitted", read_network(f"{place}/nets.py:make"))
    x = torch.tensor(np.loadtxt(place / "val.csv", delimiter=",", skiprows=1)[:, :2]).float()
    assert [r["ood_score"] for r in rows] == pytest.approx(la.ood_score(x, "variance").tolist(), rel=1e-5)


def test_a_residual_comes_with_the_fit(place: Path, tmp_path: Path) -> None:
    fitted = tmp_path / "fitted"
    result = run("fit", place / "train.csv", *net(place), "--val", place / "val.csv", "--residual", "-o", fitted, *FIT)
    assert result.exit_code == 0, result.output
    la = ScaLLA.from_pretrained(fitted, read_network(f"{place}/nets.py:make"))
    assert la.residual is not None
    assert la.residual.layers == ["0", "2"]


def test_a_regression(place: Path, tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("a,b,price\n" + "".join(f"{i / 10},{i % 3},{i / 7}\n" for i in range(20)))
    common = ("--likelihood", "regression", "--target", "price", "--sigma-noise", "0.5", "--surrogate", "trunk")
    result = run("fit", tmp_path / "r.csv", *net(place, "one"), *common, "-o", tmp_path / "fitted", *FIT)
    assert result.exit_code == 0, result.output
    result = run("predict", tmp_path / "fitted", tmp_path / "r.csv", *net(place, "one"))
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert list(rows[0]) == ["input", "mean", "std", "std_with_noise", "ood_score"]
    for row in rows:
        assert float(row["std_with_noise"]) ** 2 == pytest.approx(float(row["std"]) ** 2 + 0.25, rel=1e-4)
    errors = [float(r["mean"]) - i / 7 for i, r in enumerate(rows)]
    assert f"RMSE {np.sqrt(np.mean(np.square(errors))):.4f}" in result.stderr


def test_export_runs_elsewhere(place: Path, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    result = run("export", place / "fitted", tmp_path / "m.onnx", *net(place), "--score", "variance", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["outputs"] == ["logits", "probs", "variance", "ood_score"]
    la = ScaLLA.from_pretrained(place / "fitted", read_network(f"{place}/nets.py:make"))
    x = torch.randn(3, 2)
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    (score,) = session.run(["ood_score"], {"input": x.numpy()})
    assert torch.allclose(torch.from_numpy(score), la.ood_score(x, "variance"), rtol=1e-4)


def test_info(place: Path) -> None:
    facts = json.loads(run("info", place / "fitted", "--json").stdout)
    saved = facts[str(place / "fitted")]
    assert saved["num_data"] == 24
    assert saved["num_features"] == 5
    assert saved["input_shape"] == [2]
    assert saved["measured"]["num_inputs"] == 9
    assert facts["versions"]["torch"] == torch.__version__
    shown = run("info", place / "fitted" / "scalla.safetensors").stdout
    assert "num features" in shown
    assert "classification" in shown


def test_resumed_fit_is_the_uninterrupted_one(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint's folder is handed on; that resuming is exact is tested where it is done."""
    given = {}
    original = ScaLLA.fit

    def fit(self, *args, **kwargs):
        given.update(kwargs)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(ScaLLA, "fit", fit)
    result = run(
        "fit", place / "train.csv", *net(place), "-o", tmp_path / "f", "--checkpoint-dir", tmp_path / "c", "--resume",
        "--val", place / "val.csv", "--patience", "3", "--lr", "0.01", "--schedule", "constant", "--bfloat16", *FIT,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert given["checkpoint_dir"] == tmp_path / "c"
    assert given["resume"] is True
    assert (given["lr"], given["schedule"], given["patience"]) == (0.01, "constant", 3)
    assert given["autocast"] is torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fit", "{place}/none.csv", "-n", "{place}/nets.py:make", "-o", "{tmp}/x"), "found nothing at"),
        (("fit", "{place}/new.csv", "-n", "{place}/nets.py:make", "-o", "{tmp}/x"), "inputs without labels"),
        (("fit", "{place}/train.csv", "-n", "{place}/nets.py:make", "-o", "{tmp}/x", "--bias"), "without context"),
        (
            ("fit", "{place}/train.csv", "-n", "{place}/nets.py:make", "-o", "{tmp}/x", "--tune", "gradient"),
            "without --val",
        ),
        (
            ("fit", "{place}/train.csv", "-n", "{place}/nets.py:make", "-o", "{tmp}/x", "--residual"),
            "without --val",
        ),
        (
            ("fit", "{place}/train.csv", "-n", "{place}/nets.py:make", "-o", "{tmp}/x", "--device", "nowhere"),
            "--device nowhere",
        ),
        (
            ("fit", "{place}/train.csv", "-n", "{place}/nets.py:make", "-o", "{tmp}/x", "--size", "1,2,3"),
            "HEIGHT,WIDTH",
        ),
        (("fit", "{place}/train.csv", "-n", "{place}/nets.py:make", "-o", "{tmp}/x", "--mean", "a"), "got --mean a"),
        (("predict", "{place}/fitted", "{place}/new.csv"), "--network {place}/nets.py:make"),
        (("predict", "{place}", "{place}/new.csv", "-n", "{place}/nets.py:make"), "wrote"),
        (("predict", "{place}/fitted", "{place}/new.csv", "-n", "{place}/nets.py:one"), "saved for another network"),
        (
            ("predict", "{place}/fitted", "{place}/new.csv", "-n", "{place}/nets.py:make", "--score", "luck"),
            "got score='luck'",
        ),
        (("export", "{place}/fitted", "{tmp}/m.onnx", "-n", "{place}/nets.py:make", "--link", "x"), "got --link x"),
        (("info", "{place}/nothing"), "found nothing at"),
        (("report", "{tmp}"), "found no run below"),
        (("benchmark", "fmnist", "--seeds", "one"), "got --seeds one"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    place: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = run(*(a.format(place=place, tmp=tmp_path) for a in arguments))
    assert result.exit_code == 2, result.output
    assert message.format(place=place) in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_usage_errors_have_code_2() -> None:
    assert run("predict").exit_code == 2
    assert run("nonsense").exit_code == 2
    assert run("fit", "x", "-n", "a:b", "-o", "y", "--steps", "-1").exit_code == 2


def test_other_failures_have_codes_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from scalla.benchmark import runner

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("scalla.benchmark.run_benchmark", interrupted)
    assert run("benchmark", "fmnist").exit_code == 130
    summary = runner.Summary(("a",), (), ("b",))
    monkeypatch.setattr("scalla.benchmark.run_benchmark", lambda *args, **kwargs: summary)
    result = run("benchmark", "fmnist", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"done": ["a"], "skipped": [], "failed": ["b"]}
    monkeypatch.setattr(
        "scalla.benchmark.run_benchmark", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("full"))
    )
    result = run("benchmark", "fmnist")
    assert (result.exit_code, result.stderr) == (1, "error: full\n")


def test_benchmark_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from scalla.benchmark import runner

    given: dict = {}

    def record(task: str, **options: object) -> runner.Summary:
        given.update(options, task=task)
        return runner.Summary((), (), ())

    monkeypatch.setattr("scalla.benchmark.run_benchmark", record)
    result = run(
        "benchmark", "regression", "--methods", "map,scalla", "--seeds", "1,2", "--quick", "--jobs", "2", "--no-retry"
    )
    assert result.stdout == "0 done, 0 done before, 0 failed\n"
    assert given["task"] == "regression"
    assert given["methods"] == ("map", "scalla")
    assert given["seeds"] == [1, 2]
    assert given["protocols"] is None
    assert (given["quick"], given["jobs"], given["retry_failed"]) == (True, 2, False)


def test_help_and_version() -> None:
    assert run("--version").stdout == f"scalla {scalla.__version__}\n"
    overview = run("--help").stdout
    for name in ("demo", "fit", "predict", "export", "info", "benchmark", "report"):
        assert name in overview
        helped = run(name, "--help")
        assert helped.exit_code == 0
        assert f"$ scalla {name}" in helped.stdout  # an example
