"""Repositories of the Hugging Face Hub: written to a folder, read again bit for bit; the Hub itself is a stand-in."""

from __future__ import annotations

import json
import math
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors import safe_open
from sklearn.metrics import roc_auc_score
from torch import nn

from cases import CASES, Case, KeywordClassifier, mlp, normal, points
from scalla import FileFormatError, InputError, NotFittedError, ScaLLA, ScallaError
from scalla.calibration import measure

FILES = ["README.md", "config.json", "model.safetensors", "scalla.safetensors"]


def fitted(case: Case, surrogate: Any = "mirror", model: nn.Module | None = None, **options: Any) -> ScaLLA:
    la = ScaLLA(model or case.model(), case.likelihood, num_features=6, surrogate=surrogate, **options)
    la.fit(case.loader(), num_steps=3)
    la.prior_precision = 2.5
    return la


def assert_same(found: ScaLLA, wanted: ScaLLA, x: Any) -> None:
    theirs, ours = wanted.predict(x), found.predict(x)
    assert torch.equal(ours.mean, theirs.mean)
    assert torch.equal(ours.factor, theirs.factor)
    assert torch.equal(ours.noise, theirs.noise)  # the seed, too
    assert found.n_data == wanted.n_data


@pytest.mark.parametrize(
    ("name", "surrogate"),
    [
        ("mlp", "mirror"),
        ("cnn_batchnorm", "trunk"),
        ("one_logit", "trunk"),
        ("regression_three", "mirror"),
        ("dict_keywords", "mirror"),
        ("weight_norm", "mirror"),
    ],
)
def test_a_folder_gives_back_what_was_fitted(name: str, surrogate: str, tmp_path: Path) -> None:
    case = CASES[name]
    la = fitted(case, surrogate)
    la.save_pretrained(tmp_path / "new" / "folder")
    assert sorted(f.name for f in (tmp_path / "new" / "folder").iterdir()) == FILES
    other = case.model(seed=9)  # the same architecture, other weights
    before = {k: v.clone() for k, v in other.state_dict().items()}
    assert_same(ScaLLA.from_pretrained(tmp_path / "new" / "folder", other), la, case.inputs(5))
    for key, value in other.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_in_double_precision(tmp_path: Path) -> None:
    case = Case("double", lambda: mlp().double(), lambda num: normal(num, 2, dtype=torch.float64))
    la = fitted(case)
    la.save_pretrained(tmp_path)
    assert_same(ScaLLA.from_pretrained(tmp_path, mlp()), la, case.inputs(5))  # the file's dtype, not the given one's


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.head = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    la = fitted(Case("tied", Tied, points))
    la.save_pretrained(tmp_path)
    found = ScaLLA.from_pretrained(tmp_path, Tied())
    assert_same(found, la, points(4))
    assert found.model.first.weight is found.model.second.weight


def test_a_surrogate_of_ones_own(tmp_path: Path) -> None:
    def own() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 18), nn.Unflatten(1, (3, 6)))

    la = fitted(CASES["mlp"], own())
    la.save_pretrained(tmp_path)
    assert_same(ScaLLA.from_pretrained(tmp_path, mlp(), surrogate=own()), la, points(4))
    with pytest.raises(FileFormatError, match="give that module"):
        ScaLLA.from_pretrained(tmp_path, mlp())


# ---------------------------------------------------------------- what is measured


def expected_calibration_error(probs: np.ndarray, y: np.ndarray) -> float:
    confidence, right = probs.max(1), probs.argmax(1) == y
    total = 0.0
    for k in range(15):
        inside = (confidence > k / 15) & (confidence <= (k + 1) / 15)
        if inside.any():
            total += inside.sum() * abs(right[inside].mean() - confidence[inside].mean())
    return total / len(y)


@pytest.mark.parametrize("name", ["mlp", "one_logit"])
def test_measured_of_a_classification(name: str) -> None:
    la = fitted(CASES[name], prior_precision=0.1)
    loader, far = CASES[name].loader(96, batch_size=40), normal(50, 2, seed=3) * 4
    x, y = (torch.cat([b[i] for b in loader]) for i in (0, 1))
    found = measure(la, loader, far)
    assert (found.num_inputs, found.num_ood) == (96, 50)
    logits = la.model(x).detach().double()
    alone = torch.softmax(torch.cat([torch.zeros_like(logits), logits], 1) if name == "one_logit" else logits, 1)
    ours = la(x).double()
    ours = torch.cat([1 - ours, ours], 1) if name == "one_logit" else ours
    for side, probs in ((found.network, alone.numpy()), (found.scalla, ours.numpy())):
        labels, one_hot = y.numpy(), np.eye(probs.shape[1])[y.numpy()]
        assert side["accuracy"] == pytest.approx((probs.argmax(1) == labels).mean())
        assert side["nll"] == pytest.approx(-np.log(probs[np.arange(96), labels]).mean(), rel=1e-5)
        assert side["ece"] == pytest.approx(expected_calibration_error(probs, labels), rel=1e-4, abs=1e-6)
        assert side["brier"] == pytest.approx(((probs - one_hot) ** 2).sum(1).mean(), rel=1e-5)
    outlying = np.repeat([0, 1], [96, 50])
    for score in ("predictive_entropy", "gaussian_entropy"):
        scores = torch.cat([la.ood_score(x, score), la.ood_score(far, score)]).detach().numpy()
        assert found.scalla[f"ood_auroc_{score}"] == pytest.approx(roc_auc_score(outlying, scores), abs=2e-3)
    assert "ood_auroc_gaussian_entropy" not in found.network


def test_measured_of_a_regression() -> None:
    case = CASES["regression_three"]
    la = fitted(case, sigma_noise=0.6)
    loader, far = case.loader(80, batch_size=30), normal(40, 2, seed=3) * 4
    x, y = (torch.cat([b[i] for b in loader]) for i in (0, 1))
    found = measure(la, loader, [(far, torch.zeros(40, 3))])
    mean, cov = la(x)
    var = cov.diagonal(dim1=-2, dim2=-1) + 0.36
    for side, v in ((found.network, torch.full_like(var, 0.36)), (found.scalla, var)):
        assert side["rmse"] == pytest.approx(float((y - mean).square().mean().sqrt()), rel=1e-5)
        normal_nll = (0.5 * (y - mean).square() / v + 0.5 * (2 * math.pi * v).log()).mean()
        assert side["nll"] == pytest.approx(float(normal_nll), rel=1e-5)
        inside = ((y - mean).abs() <= 1.959964 * v.sqrt()).double().mean()
        assert side["coverage_95"] == pytest.approx(float(inside))
    assert found.scalla["crps"] != found.network["crps"]
    assert set(found.scalla) - set(found.network) == {"ood_auroc_gaussian_entropy"}


# ---------------------------------------------------------------- the model card and the other files


def test_the_card_holds_what_was_measured(tmp_path: Path) -> None:
    la = fitted(CASES["mlp"])
    loader, far = CASES["mlp"].loader(48), normal(30, 2, seed=3) * 4
    options = {"dataset": "Points: “near”", "ood_dataset": "points far away", "license": "mit"}
    la.save_pretrained(tmp_path, val_loader=loader, ood=far, repo_id="somebody/points", **options)
    card = huggingface_hub.ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "scalla"
    assert card.data.license == "mit"
    measured = measure(la, loader, far)
    results = {r.metric_type: r for r in card.data.eval_results}
    assert {name: r.metric_value for name, r in results.items()} == measured.scalla
    assert results["nll"].dataset_name == options["dataset"]
    assert (
        f"| Expected calibration error (15 bins) | {measured.network['ece']:.4f} | {measured.scalla['ece']:.4f} |"
        in (card.text)
    )
    assert "On 48 inputs (Points: “near”), and for OOD against 30 others (points far away)." in card.text
    assert "| prior precision δ | 2.5 |" in card.text
    assert "from_pretrained('somebody/points', model)" in card.text
    block = json.loads((tmp_path / "config.json").read_text())["scalla"]
    assert block["measured"] == {"dataset": options["dataset"], **vars(measured)}
    assert block["num_params"] == sum(p.numel() for p in la.model.parameters())


@pytest.mark.parametrize("name", ["mlp", "regression_one"])
def test_the_code_in_the_card_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    fitted(case).save_pretrained(tmp_path / "points")
    text = (tmp_path / "points" / "README.md").read_text()
    assert "Nothing was measured" in text
    code = text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    names = {"model": case.model(seed=9), "x": points(4)}
    exec(code, names)
    assert names["score"].shape == (4,)
    for attribute in code.split("# ")[1].split("\n")[0].replace(".", "").split(", "):
        assert len(getattr(names["prediction"], attribute)) == 4


def test_files_are_safetensors_and_json(tmp_path: Path) -> None:
    fitted(CASES["mlp"]).save_pretrained(tmp_path)
    for name in ("model.safetensors", "scalla.safetensors"):
        with safe_open(str(tmp_path / name), framework="np") as file:
            assert all(isinstance(file.get_tensor(key), np.ndarray) for key in file.keys())  # noqa: SIM118
    assert json.loads((tmp_path / "config.json").read_text())["scalla"]["num_features"] == 6


# ---------------------------------------------------------------- transformers


def test_a_transformers_network_builds_itself(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, BertForSequenceClassification

    case = CASES["bert"]
    la = fitted(case, "trunk")
    la.save_pretrained(tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == FILES
    found = ScaLLA.from_pretrained(tmp_path)
    assert type(found.model) is BertForSequenceClassification
    assert_same(found, la, case.inputs(5))
    assert "from_pretrained('" + tmp_path.name + "')" in (tmp_path / "README.md").read_text()
    # and transformers itself reads the folder as one of its own
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(theirs(**case.inputs(5)).logits, la.predict(case.inputs(5)).mean)


def test_a_transformers_network_of_ones_own_class(tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification

    class Own(BertForSequenceClassification):
        pass

    case = CASES["bert"]
    model = Own(case.model().config)
    la = fitted(case, model=model)
    la.save_pretrained(tmp_path)
    assert_same(ScaLLA.from_pretrained(tmp_path, Own(model.config)), la, case.inputs(5))
    with pytest.raises(InputError, match=r"\['Own'\]; wanted a class of transformers"):
        ScaLLA.from_pretrained(tmp_path)


def outside(folder: Path, kind: str) -> None:
    """A folder of a transformers network that would be led elsewhere, or to a pickle."""
    weights = folder / "model.safetensors"
    if kind == "adapter":
        adapter = {"base_model_name_or_path": str(folder.parent), "peft_type": "LORA"}
        (folder / "adapter_config.json").write_text(json.dumps(adapter))
    elif kind == "pickle":
        torch.save({}, folder / "pytorch_model.bin")
        weights.unlink()
    elif kind == "short":
        weights.write_bytes(weights.read_bytes()[:-40])
    else:
        index = {
            "parent": {"weight_map": {"classifier.weight": "../model.safetensors"}},
            "absolute": {"weight_map": {"classifier.weight": str(weights)}},
            "other kind": {"weight_map": {"classifier.weight": "pytorch_model.bin"}},
            "no map": [1],
        }[kind]
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("adapter", r"adapter_config\.json, which names a network elsewhere; merge the adapter"),
        ("pickle", "is damaged or cut short"),
        ("short", "is damaged or cut short"),
        ("parent", r"names '\.\./model\.safetensors'; wanted safetensors files of its own folder"),
        ("absolute", "wanted safetensors files of its own folder"),
        ("other kind", r"names 'pytorch_model\.bin'; wanted safetensors files"),
        ("no map", "cannot be read"),
    ],
)
def test_a_folder_leads_nowhere_else(kind: str, message: str, tmp_path: Path) -> None:
    fitted(CASES["bert"]).save_pretrained(tmp_path)
    outside(tmp_path, kind)
    with pytest.raises(FileFormatError, match=message):
        ScaLLA.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["utils.import_utils", "AutoTokenizer", "logging", "os", ""])
def test_a_configuration_cannot_name_anything_but_a_network(name: str, tmp_path: Path) -> None:
    fitted(CASES["mlp"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
    with pytest.raises(InputError, match="wanted a class of transformers"):
        ScaLLA.from_pretrained(tmp_path)


# ---------------------------------------------------------------- the Hub


class StandInHub:
    """What of huggingface_hub is called: HfApi's two methods and snapshot_download, over a local folder."""

    def __init__(self, root: Path) -> None:
        self.root, self.calls = root, []

    def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> None:
        assert exist_ok
        self.calls.append(("create_repo", repo_id, private))
        (self.root / repo_id).mkdir(parents=True, exist_ok=True)

    def upload_folder(self, *, repo_id: str, folder_path: str, **options: Any) -> str:
        self.calls.append(("upload_folder", repo_id, options))
        shutil.copytree(folder_path, self.root / repo_id, dirs_exist_ok=True)
        return f"commit of {repo_id}"

    def snapshot_download(self, repo_id: str, *, allow_patterns: list[str], **options: Any) -> str:
        self.calls.append(("snapshot_download", repo_id, allow_patterns, options))
        return str(self.root / repo_id)


def test_to_the_hub_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    la, stand_in = fitted(CASES["mlp"]), StandInHub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", stand_in.snapshot_download)
    commit = la.push_to_hub(
        "somebody/points", private=True, revision="main", api=stand_in, val_loader=CASES["mlp"].loader(32)
    )
    assert commit == "commit of somebody/points"
    assert sorted(f.name for f in (tmp_path / "somebody/points").iterdir()) == FILES
    assert "on 32 inputs" in (tmp_path / "somebody/points/README.md").read_text().lower()
    found = ScaLLA.from_pretrained("somebody/points", mlp(), revision="v1", token="secret")
    assert_same(found, la, points(4))
    assert stand_in.calls == [
        ("create_repo", "somebody/points", True),
        ("upload_folder", "somebody/points",
         {"commit_message": "Upload ScaLLA", "revision": "main", "create_pr": False}),
        ("snapshot_download", "somebody/points", ["*.json", "*.safetensors"], {"revision": "v1", "token": "secret"}),
    ]  # fmt: skip


def test_the_calls_are_those_of_huggingface_hub() -> None:
    """The stand-in takes nothing that the real functions do not."""
    import inspect

    api = huggingface_hub.HfApi
    assert {"repo_id", "private", "exist_ok"} <= set(inspect.signature(api.create_repo).parameters)
    wanted = {"repo_id", "folder_path", "commit_message", "revision", "create_pr"}
    assert wanted <= set(inspect.signature(api.upload_folder).parameters)
    wanted = {"repo_id", "allow_patterns", "revision", "token", "cache_dir", "local_files_only"}
    assert wanted <= set(inspect.signature(huggingface_hub.snapshot_download).parameters)


def test_nothing_is_uploaded_of_what_cannot_be_written(tmp_path: Path) -> None:
    stand_in = StandInHub(tmp_path)
    with pytest.raises(NotFittedError):
        ScaLLA(mlp()).push_to_hub("somebody/points", api=stand_in)
    with pytest.raises(InputError, match="'no such name!' is neither a folder that exists nor the name"):
        fitted(CASES["mlp"]).push_to_hub("no such name!", api=stand_in)
    assert stand_in.calls == []


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    la = fitted(CASES["mlp"])
    la.save_pretrained(tmp_path)  # a folder needs it not
    assert_same(ScaLLA.from_pretrained(tmp_path, mlp()), la, points(3))
    for call in (lambda: la.push_to_hub("a/b"), lambda: ScaLLA.from_pretrained("a/b", mlp())):
        with pytest.raises(ScallaError, match=r'pip install "scalla\[hub\]"'):
            call()


# ---------------------------------------------------------------- what is refused


def test_wrong_sources(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither a folder that exists nor the name of a repository"):
        ScaLLA.from_pretrained(tmp_path / "absent", mlp())
    with pytest.raises(FileFormatError, match=r"holds no config\.json; wanted what ScaLLA\.save_pretrained"):
        ScaLLA.from_pretrained(tmp_path, mlp())
    fitted(CASES["mlp"]).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="holds the weights of a Sequential, but not its code; give that network"):
        ScaLLA.from_pretrained(tmp_path)
    with pytest.raises(InputError, match="got a model of type str"):
        ScaLLA.from_pretrained(tmp_path, "mlp")
    with pytest.raises(FileFormatError, match=r"was saved for another network: '0\.bias'"):
        ScaLLA.from_pretrained(tmp_path, mlp(width=7))


@pytest.mark.parametrize("name", FILES[1:])
@pytest.mark.parametrize("damage", ["missing", "short", "foreign"])
def test_a_damaged_folder(name: str, damage: str, tmp_path: Path) -> None:
    fitted(CASES["mlp"]).save_pretrained(tmp_path)
    path = tmp_path / name
    if damage == "missing":
        path.unlink()
    elif damage == "short":
        path.write_bytes(path.read_bytes()[:-40])
    else:
        path.write_bytes(b"[]" if name == "config.json" else (tmp_path / "README.md").read_bytes())
    with pytest.raises(FileFormatError):
        ScaLLA.from_pretrained(tmp_path, mlp())


def test_the_posterior_of_other_weights_is_told(tmp_path: Path) -> None:
    fitted(CASES["mlp"]).save_pretrained(tmp_path)
    other = ScaLLA(CASES["mlp"].model(seed=4), num_features=6).fit(CASES["mlp"].loader(), num_steps=1)
    other.save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other/model.safetensors", tmp_path)
    with pytest.warns(UserWarning, match="its uncertainties belong to the other weights"):
        ScaLLA.from_pretrained(tmp_path, mlp())


def test_wrong_targets(tmp_path: Path) -> None:
    la = fitted(CASES["mlp"])
    with pytest.raises(InputError, match="ood without val_loader"):
        la.save_pretrained(tmp_path, ood=points(3))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file; wanted the name of a folder"):
        la.save_pretrained(tmp_path / "file")

    class Stateful(KeywordClassifier):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

        def set_extra_state(self, state: dict[str, int]) -> None: ...

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stateful = fitted(CASES["dict_keywords"], model=Stateful())
    with pytest.raises(InputError, match="what is no tensor"):
        stateful.save_pretrained(tmp_path / "stateful")
