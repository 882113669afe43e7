"""The exported graph beside PyTorch and beside a dense float64 reference, on batches that it was not traced with."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from cases import CASES, Case, mlp, normal, points, words
from oracles import probit_probs
from scalla import InputError, NotFittedError, ScaLLA, ScallaError, UnsupportedModuleError, export
from scalla.export_graph import OUTPUTS, PredictiveGraph

SLOW = pytest.mark.slow


def fitted(case: Case, surrogate: str = "mirror", **options: Any) -> ScaLLA:
    la = ScaLLA(case.model(), case.likelihood, num_features=8, surrogate=surrogate, prior_precision=3.0, **options)
    return la.fit(case.loader(), num_steps=5)


def run(path: Path, x: Any) -> dict[str, Tensor]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    arrays = {k: v.numpy() for k, v in (x if isinstance(x, dict) else {"input": x}).items()}
    outputs = session.run(None, {i.name: arrays[i.name] for i in session.get_inputs()})
    return {o.name: torch.from_numpy(a) for o, a in zip(session.get_outputs(), outputs, strict=True)}


def reference(la: ScaLLA, x: Any) -> dict[str, Tensor]:
    """Dense and in float64, from features and posterior covariance: Σ = g P⁻¹ gᵀ, log det by numpy."""
    outputs, features = la.feature_map(x)
    covariance = torch.einsum("bcm,mn,bdn->bcd", features.double(), la.posterior_covariance, features.double())
    num_outputs = outputs.shape[-1]
    entropy = 0.5 * np.linalg.slogdet(covariance.detach().numpy())[1] + num_outputs / 2 * math.log(2 * math.pi * math.e)
    found = {
        "variance": covariance.diagonal(dim1=-2, dim2=-1).detach(),
        "ood_score": torch.from_numpy(entropy),
    }
    if la.likelihood == "regression":
        noisy = found["variance"] + la.sigma_noise.square()
        return found | {"mean": outputs.detach(), "variance_with_noise": noisy}
    probs = probit_probs(outputs.detach().double(), covariance.detach()) if num_outputs > 1 else None
    if probs is None:
        probs = torch.sigmoid(outputs / (1 + math.pi / 8 * found["variance"]).sqrt()).detach()
    return found | {"logits": outputs.detach(), "probs": probs}


@pytest.mark.parametrize(
    ("name", "surrogate"),
    [
        ("cnn_batchnorm", "mirror"),
        ("cnn_groupnorm", "trunk"),
        ("transformer_encoder", "mirror"),
        ("regression_three", "trunk"),
        ("one_logit", "mirror"),
        pytest.param("resnet", "trunk", marks=SLOW),
        pytest.param("fused_attention", "trunk", marks=SLOW),
        pytest.param("lstm", "mirror", marks=SLOW),
        pytest.param("weight_norm_old", "mirror", marks=SLOW),
        pytest.param("bert", "trunk", marks=SLOW),
    ],
)
def test_graph_agrees_with_a_dense_reference(name: str, surrogate: str, tmp_path: Path) -> None:
    case = CASES[name]
    la = fitted(case, surrogate)
    exported = la.export(tmp_path / "model.onnx", case.inputs(3))
    assert exported.outputs == OUTPUTS[case.likelihood]
    assert exported.max_difference is not None
    assert exported.max_difference <= 1e-4
    for num in (1, 7):
        x = case.inputs(num)
        found, wanted = run(exported.path, x), reference(la, x)
        assert set(found) == set(wanted) == set(exported.outputs)
        for output, values in found.items():
            torch.testing.assert_close(values.double(), wanted[output].double(), rtol=1e-4, atol=1e-4, msg=output)
    assert [f.name for f in tmp_path.iterdir()] == ["model.onnx"]  # weights and all in one file


def test_named_inputs_with_a_free_sequence_length(tmp_path: Path) -> None:
    case = CASES["dict_keywords"]
    la = fitted(case)
    free = {name: {1: "sequence"} for name in ("input_ids", "attention_mask")}
    example = words(2) | {"labels": torch.tensor([0, 1]), "unknown": torch.zeros(2)}
    exported = export.export(la, tmp_path / "text.onnx", example, dynamic_axes=free)
    assert exported.inputs == ("input_ids", "attention_mask")  # neither the labels nor what the network does not take
    longer = {k: torch.cat([v, v[:, 1:]], 1) for k, v in words(5).items()}
    found, wanted = run(exported.path, longer), reference(la, longer)
    for output, values in found.items():
        torch.testing.assert_close(values.double(), wanted[output].double(), rtol=1e-4, atol=1e-4)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 4), nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.tanh(self.left(a) * self.right(b)))


def test_a_tuple_of_inputs(tmp_path: Path) -> None:
    def batch(num: int) -> tuple[Tensor, Tensor]:
        return normal(num, 2), normal(num, 3, seed=6)

    la = ScaLLA(Two(), num_features=4).fit([(batch(8), torch.arange(8) % 2)], num_steps=3)
    exported = la.export(tmp_path / "two.onnx", batch(1))
    assert exported.inputs == ("input_0", "input_1")
    found = run(exported.path, dict(zip(exported.inputs, batch(5), strict=True)))
    torch.testing.assert_close(found["probs"], la(batch(5)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("link", ["probit", "mc", "bridge", "bridge_norm"])
@pytest.mark.parametrize(
    "score", ["predictive_entropy", "gaussian_entropy_projected", "mutual_information", "max_prob"]
)
def test_the_module_gives_every_score_by_every_link(link: Any, score: str) -> None:
    la, x = fitted(CASES["mlp"]), points(6)
    prediction = la.predict(x, link_approx=link, n_samples=50)
    found = PredictiveGraph(la, prediction, {}, score=score)(x)
    torch.testing.assert_close(found["probs"], prediction.probs)
    wanted = la.ood_score(x, score, link_approx=link, n_samples=50)
    torch.testing.assert_close(found["ood_score"], wanted.float(), rtol=1e-5, atol=1e-5)


def test_draws_are_constants_of_the_graph(tmp_path: Path) -> None:
    la = fitted(CASES["mlp"])
    path = tmp_path / "mc.onnx"
    la.export(path, points(3), score="mutual_information", link_approx="mc", n_samples=40)
    found, prediction = run(path, points(9)), la.predict(points(9), link_approx="mc", n_samples=40)
    torch.testing.assert_close(found["probs"], prediction.probs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["ood_score"], prediction.mutual_information, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(run(path, points(9))["probs"], found["probs"], rtol=0, atol=0)


@pytest.mark.parametrize(("num_outputs", "score"), [(40, "gaussian_entropy"), (9, "gaussian_entropy_projected")])
def test_more_outputs_than_features(num_outputs: int, score: str, tmp_path: Path) -> None:
    la = ScaLLA(mlp(num_outputs), num_features=8, surrogate="trunk")
    la.fit([(normal(40, 2), torch.arange(40) % num_outputs)], num_steps=3)
    la.export(tmp_path / "wide.onnx", points(2), score=score)
    wanted = la.ood_score(points(6), score)
    torch.testing.assert_close(run(tmp_path / "wide.onnx", points(6))["ood_score"], wanted.float(), rtol=1e-4, atol=0)


def test_exported_program() -> None:
    case = CASES["regression_three"]
    la = fitted(case)
    program = la.export_program(case.inputs(1))
    assert isinstance(program, torch.export.ExportedProgram)
    for num in (1, 7):
        found, wanted = program.module()(case.inputs(num)), reference(la, case.inputs(num))
        assert set(found) == set(OUTPUTS["regression"])
        for output, values in found.items():
            torch.testing.assert_close(values.double(), wanted[output].double(), rtol=1e-4, atol=1e-4)


def test_the_file_says_what_it_holds(tmp_path: Path) -> None:
    la = fitted(CASES["mlp"])
    la.temperature = 0.5
    la.export(tmp_path / "model.onnx", points(2), score="variance")
    model = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    facts = json.loads({entry.key: entry.value for entry in model.metadata_props}["scalla"])
    assert facts["score"] == "variance"
    assert facts["likelihood"] == "classification"
    assert facts["num_data"] == 16
    assert facts["prior_precision"] == 3.0
    assert facts["temperature"] == 0.5
    batch = {o.name: o.type.tensor_type.shape.dim[0].dim_param for o in model.graph.output}
    assert set(batch.values()) == {"batch"}


def test_a_graph_that_fails_its_check_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    la, path = fitted(CASES["mlp"]), tmp_path / "model.onnx"
    path.write_bytes(b"the last good one")
    honest = export._expected
    monkeypatch.setattr(export, "_expected", lambda *a: {k: v + 2e-4 for k, v in honest(*a).items()})
    with pytest.raises(UnsupportedModuleError, match=r"differs from PyTorch's by 0\.0002.*no file was written"):
        la.export(path, points(2), score="max_prob")
    assert path.read_bytes() == b"the last good one"
    assert [f.name for f in tmp_path.iterdir()] == ["model.onnx"]
    assert la.export(path, points(2), score="max_prob", tolerance=1e-3).max_difference == pytest.approx(2e-4, rel=0.1)


def test_network_and_method_are_left_alone(tmp_path: Path) -> None:
    la = fitted(CASES["dropout"], "trunk")
    la.model.train()
    la.model[0].weight.requires_grad_(True)
    before, wanted = {k: v.clone() for k, v in la.state_dict().items()}, la(points(4))
    la.export(tmp_path / "model.onnx", points(2), score="variance")
    assert la.model.training
    assert la.model[0].weight.requires_grad
    for name, value in la.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(la(points(4)), wanted)


def test_without_the_runtime_the_file_is_written_unchecked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    la = fitted(CASES["mlp"])
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert la.export(tmp_path / "model.onnx", points(2), score="variance").max_difference is None
    monkeypatch.undo()
    found = run(tmp_path / "model.onnx", points(4))["ood_score"]
    torch.testing.assert_close(found, la.ood_score(points(4), "variance"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_a_missing_package_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    la = fitted(CASES["mlp"])
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ScallaError, match=rf'package {package}, .*pip install "scalla\[export\]"'):
        la.export(tmp_path / "model.onnx", points(2))


def test_what_cannot_be_exported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.onnx"
    with pytest.raises(NotFittedError, match=r"call fit\(train_loader\) first"):
        ScaLLA(mlp()).export(path, points(2))
    la = fitted(CASES["mlp"])
    with pytest.raises(InputError, match="score='novelty'; choose one of predictive_entropy"):
        la.export(path, points(2), score="novelty")
    with pytest.raises(InputError, match="link_approx='logit'"):
        la.export(path, points(2), link_approx="logit")
    with pytest.raises(InputError, match=r"dynamic_axes for \['tokens'\]; the inputs are \('input',\)"):
        la.export(path, points(2), dynamic_axes={"tokens": {1: "sequence"}})
    with pytest.raises(InputError, match="a regression, which has no class probabilities"):
        fitted(CASES["regression_one"]).export(path, points(2), score="max_prob")
    with pytest.raises(InputError, match=r"bfloat16.*la\.float\(\)"):
        fitted(Case("half", lambda: mlp().bfloat16(), points)).to(torch.bfloat16).export(path, points(2))
    monkeypatch.setattr(export, "MAX_BYTES", 100)
    with pytest.raises(InputError, match="more than one ONNX file can"):
        la.export(path, points(2))
    assert not list(tmp_path.iterdir())


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x if float(x.sum()) > 0 else -x)


def test_a_network_that_branches_on_values(tmp_path: Path) -> None:
    la = ScaLLA(Branching(), num_features=4).fit([(normal(8, 2), torch.arange(8) % 3)], num_steps=2)
    with pytest.raises(UnsupportedModuleError, match=r"torch\.export could not trace.*branches on values"):
        la.export(tmp_path / "model.onnx", points(2))


def test_an_input_called_as_an_output(tmp_path: Path) -> None:
    class Named(Branching):
        def forward(self, logits: Tensor) -> Tensor:
            return self.layer(logits)

    batch = {"logits": normal(8, 2), "labels": torch.arange(8) % 3}
    la = ScaLLA(Named(), num_features=4).fit([batch], num_steps=2)
    with pytest.raises(InputError, match="is called as an output is; rename it"):
        la.export(tmp_path / "model.onnx", batch)
