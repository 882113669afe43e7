"""A saved posterior: what comes back, what is in the file, and what is refused before anything is believed."""

from __future__ import annotations

import ast
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import scalla
from cases import CASES, loader, mlp, normal
from scalla import FileFormatError, InputError, ScaLLA, checkpoint
from scalla.checkpoint import SCHEMA_VERSION, read_file, write_file
from scalla.saving import SETTINGS

SOURCES = sorted(Path(scalla.__file__).parent.rglob("*.py"))


def network(**options: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp(**options)


class Own(nn.Module):
    """A surrogate of one's own: (B, 2) → (B, 3, 4)."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 12))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).unflatten(-1, (3, 4))


def fitted(model: nn.Module | None = None, **options: Any) -> ScaLLA:
    model = network() if model is None else model
    dtype = next(model.parameters()).dtype
    x, y = normal(20, 2, dtype=dtype), torch.arange(20) % 3
    if options.get("likelihood") == "regression":
        y = normal(20, 3, seed=7, dtype=dtype)
    return ScaLLA(model, **{"num_features": 4, **options}).fit(loader(x, y), num_steps=3)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "posterior.safetensors"
    fitted().save(path)
    return path


# ---------------------------------------------------------------- what comes back


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("surrogate", ["mirror", "trunk", "own"])
def test_all_that_was_fitted_comes_back_to_the_bit(surrogate: str, dtype: torch.dtype, tmp_path: Path) -> None:
    given: Any = Own().to(dtype) if surrogate == "own" else surrogate
    la = fitted(network().to(dtype), surrogate=given, prior_precision=0.3, temperature=2.0, prior_mean=0.1, seed=5)
    la.update(loader(normal(5, 2, seed=8, dtype=dtype), torch.zeros(5, dtype=torch.long)))
    la.save(tmp_path / "file")
    loaded = ScaLLA.load(tmp_path / "file", network().to(dtype), Own().to(dtype) if surrogate == "own" else None)
    x = normal(6, 2, seed=11, dtype=dtype)
    assert torch.equal(loaded(x), la(x))
    assert torch.equal(loaded.features(x), la.features(x))
    assert torch.equal(loaded.functional_samples(x, 7), la.functional_samples(x, 7))
    assert torch.equal(loaded.log_marginal_likelihood(), la.log_marginal_likelihood())
    assert (loaded.n_data, loaded.n_params, loaded.temperature, loaded.seed) == (25, la.n_params, 2.0, 5)
    assert [vars(entry) for entry in loaded.history] == [vars(entry) for entry in la.history]


def test_what_is_loaded_goes_on(saved: Path, tmp_path: Path) -> None:
    """Tuned, updated, saved again and fitted anew, as what was saved."""
    la, more = ScaLLA.load(saved, network()), loader(normal(5, 2, seed=8), torch.zeros(5, dtype=torch.long))
    original = fitted()
    for each in (la, original):
        each.update(more).optimize_prior_precision()
    x = normal(6, 2, seed=11)
    assert torch.equal(la(x), original(x))
    la.save(tmp_path / "again")
    assert torch.equal(ScaLLA.load(tmp_path / "again", network())(x), la(x))
    anew = [each.fit(loader(normal(20, 2), torch.arange(20) % 3), num_steps=2)(x) for each in (la, original)]
    assert torch.equal(*anew)


def test_a_subset_of_the_weights_stays_that_subset(tmp_path: Path) -> None:
    la = fitted(parameters="last_layer")
    la.save(tmp_path / "file")
    loaded = ScaLLA.load(tmp_path / "file", network())
    assert loaded.n_params == la.n_params == 18
    assert torch.equal(loaded.scatter, la.scatter)


def test_a_file_that_cannot_be_written_leaves_the_last_good_one(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(tensors: Any, path: Any, **options: Any) -> None:
        Path(path).write_bytes(b"the first half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        fitted(seed=4).save(saved)
    assert saved.read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]


def test_it_is_not_written_over_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="is a folder; wanted the name of a file"):
        fitted().save(tmp_path)


# ---------------------------------------------------------------- what is in the file


def test_the_file_holds_surrogate_and_sums_and_no_data(saved: Path) -> None:
    with safe_open(str(saved), framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        meta = json.loads(file.metadata()["scalla"])
    assert {name for name in tensors if not name.startswith("surrogate.")} == {"posterior.ggn", "posterior.loss"}
    assert set(meta) == {*SETTINGS, "schema", "kind", "architecture", "weights_sha256"}
    assert (meta["schema"], meta["kind"], meta["num_data"]) == (SCHEMA_VERSION, "posterior", 20)
    inputs = {float(v) for v in normal(20, 2).flatten()}
    assert not inputs & {float(v) for t in tensors.values() for v in t.flatten()}
    weights = {
        float(v) for p in network().parameters() for v in p.detach().flatten()
    }  # nor the network: mirror starts anew
    assert not weights & {float(v) for name, t in tensors.items() if "posterior" in name for v in t.flatten()}


def test_no_source_names_a_door_for_foreign_code() -> None:
    """No pickle in any of its forms, no eval, no remote code; `torch.load` with weights_only=True at most."""
    found = [
        f"{path.name}:{node.lineno}: {what}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for what in doors_of(node)
    ]
    assert len(SOURCES) > 50
    assert not found


PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
CALLS = {"eval", "exec", "compile", "__import__", "torch.save", "torch.jit.load"}
OPTIONS = {
    ("trust_remote_code", "True"),
    ("allow_pickle", "True"),
    ("weights_only", "False"),
    ("use_safetensors", "False"),
}


def doors_of(node: ast.AST) -> list[str]:
    """What this piece of source opens; the error that a refused pickle raises may be named."""
    if isinstance(node, ast.Import):
        names = {alias.name.split(".")[0] for alias in node.names}
        return [f"import {name}" for name in names & (PICKLES - {"pickle"})]
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PICKLES:
        return [f"from {node.module}"] if node.level == 0 else []
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle":
        return [] if node.attr == "UnpicklingError" else [f"pickle.{node.attr}"]
    if not isinstance(node, ast.Call):
        return []
    name, given = ast.unparse(node.func), {(k.arg or "**", ast.unparse(k.value)) for k in node.keywords}
    refused = [name] if name in CALLS else []
    if name == "torch.load" and ("weights_only", "True") not in given:
        refused.append("torch.load without weights_only=True")
    return refused + [f"{k}={v}" for k, v in sorted(given & OPTIONS)]


@pytest.mark.parametrize(
    "text",
    [
        "eval(x)",
        "torch.load(p)",
        "torch.load(p, weights_only=False)",
        "torch.save(x, p)",
        "np.load(p, allow_pickle=True)",
        "pickle.loads(b)",
        "import dill",
        "from pickle import load",
        "f(trust_remote_code=True)",
    ],
)
def test_a_door_is_found(text: str) -> None:
    assert [what for node in ast.walk(ast.parse(text)) for what in doors_of(node)]


def test_nothing_is_pickled_while_it_is_written_read_or_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was pickled")

    for module, names in (
        (pickle, ("dump", "dumps", "load", "loads", "Pickler", "Unpickler")),
        (torch, ("save", "load")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    data = loader(normal(20, 2), torch.arange(20) % 3)
    la = ScaLLA(network(), num_features=4)
    with pytest.raises(RuntimeError, match="in the midst"):
        la.fit(data, num_steps=5, checkpoint_dir=tmp_path, checkpoint_every=0, callback=fail_at(3))
    assert (tmp_path / "fit.safetensors").is_file()
    la.fit(data, num_steps=5, checkpoint_dir=tmp_path, checkpoint_every=0, resume=True)
    la.save(tmp_path / "file")
    assert torch.equal(ScaLLA.load(tmp_path / "file", network())(normal(4, 2)), la(normal(4, 2)))


def fail_at(step: int) -> Callable[[Any], None]:
    def callback(entry: Any) -> None:
        if entry.step >= step:
            raise RuntimeError("in the midst")

    return callback


# ---------------------------------------------------------------- what is refused


def foreign(path: Path, kind: str) -> None:
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("a line of text, longer than eight bytes")
    elif kind == "pickle":
        path.write_bytes(pickle.dumps({"weights": [1.0, 2.0]}))
    elif kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data.pkl", "x" * 100)
    elif kind == "torch":
        torch.save({"a": torch.zeros(3)}, path)
    elif kind == "safetensors":
        save_file({"a": torch.zeros(3)}, str(path))
    elif kind == "huge header":
        path.write_bytes((2**62).to_bytes(8, "little") + b"{}")
    elif kind == "folder":
        path.mkdir()


@pytest.mark.parametrize(
    "kind", ["absent", "empty", "text", "pickle", "zip", "torch", "safetensors", "huge header", "folder"]
)
def test_what_is_not_ours_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    foreign(path, kind)
    message = "wanted one that save|not a safetensors file|not one that scalla wrote"
    with pytest.raises(FileFormatError, match=message):
        ScaLLA.load(path, network())


def test_files_for_something_else_are_refused(saved: Path, tmp_path: Path) -> None:
    tensors, meta = read_file(saved, "posterior")
    write_file(tmp_path / "other", tensors, {**meta, "kind": "fit checkpoint"}, kind="fit checkpoint")
    with pytest.raises(FileFormatError, match="holds a 'fit checkpoint'; wanted a 'posterior'"):
        ScaLLA.load(tmp_path / "other", network())


@pytest.mark.parametrize("schema", [0, SCHEMA_VERSION + 1, "1", None])
def test_another_schema_is_refused(schema: Any, saved: Path) -> None:
    tensors, meta = read_file(saved, "posterior")
    write_file(saved, tensors, {**meta, "schema": schema}, kind="posterior")
    with pytest.raises(FileFormatError, match=f"schema version {schema!r}, this scalla reads version {SCHEMA_VERSION}"):
        ScaLLA.load(saved, network())


def test_a_changed_content_does_not_fit_its_checksum(saved: Path) -> None:
    """One digit of the settings, and one bit of the last tensor."""
    whole = saved.read_bytes()
    for changed in (
        whole.replace(b'num_data\\": 20', b'num_data\\": 21'),
        whole[:-1] + bytes([whole[-1] ^ 1]),
    ):
        assert changed != whole
        saved.unlink()
        saved.write_bytes(changed)
        with pytest.raises(FileFormatError, match="its checksum does not fit its content"):
            ScaLLA.load(saved, network())


def forged(path: Path, *, meta: dict[str, Any] | None = None, tensors: dict[str, Tensor | None] | None = None) -> None:
    """The file with other settings or tensors and a checksum that fits; None takes away."""
    found, settings = read_file(path, "posterior")
    kept = {k: v for k, v in {**found, **(tensors or {})}.items() if v is not None}
    changed = {k: v for k, v in {**settings, **(meta or {})}.items() if v is not Ellipsis}
    path.unlink()
    write_file(path, kept, changed, kind="posterior")


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_are_missing_or_of_another_type_are_refused(name: str, saved: Path) -> None:
    whole = saved.read_bytes()
    for value in (..., [{}], "nan", True):
        if (name, value) in (("enable_backprop", True), ("dict_key_y", "nan")):
            continue
        forged(saved, meta={name: value})
        with pytest.raises(FileFormatError):
            ScaLLA.load(saved, network())
        saved.write_bytes(whole)


@pytest.mark.parametrize(
    "meta",
    [
        {"num_features": 5},
        {"num_features": -4},
        {"num_features": 10**12},
        {"num_outputs": 4},
        {"num_outputs": 10**12},
        {"num_data": -1},
        {"feature_scale": 0.0},
        {"feature_scale": float("nan")},
        {"feature_scale": 10**400},
        {"prior_mean": float("nan")},
        {"prior_mean": 10**400},
        {"prior_precision": 0.0},
        {"prior_precision": float("inf")},
        {"temperature": -1.0},
        {"sigma_noise": []},
        {"sigma_noise": [1.0, 2.0]},
        {"likelihood": "regression"},
        {"likelihood": "poisson"},
        {"probe": "cauchy"},
        {"surrogate": "trunk"},
        {"surrogate": "../../surrogate"},
        {"surrogate_options": {"hidden": 10**9}},
        {"surrogate_options": {"unknown": 1}},
        {"head": "3"},
        {"head": "../../head"},
        {"head": "__class__"},
        {"head": None},
        {"parameters": []},
        {"parameters": ["/absolute"]},
        {"parameters": [3]},
        {"history": [3]},
        {"history": [{"step": 1}]},
        {"architecture": {}},
        {"architecture": 3},
    ],
    ids=str,
)
def test_settings_that_cannot_be_are_refused(meta: dict[str, Any], saved: Path) -> None:
    forged(saved, meta=meta)
    with pytest.raises(FileFormatError):
        ScaLLA.load(saved, network())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"posterior.ggn": None}, "posterior.ggn is missing"),
        ({"posterior.loss": None}, "posterior.loss is missing"),
        ({"posterior.ggn": torch.zeros(1, 5, 5, dtype=torch.float64)}, r"shape \(1, 5, 5\), wanted .* \(1, 4, 4\)"),
        ({"posterior.ggn": torch.zeros(1, 4, 4)}, "posterior.ggn is torch.float32"),
        ({"posterior.ggn": torch.full((1, 4, 4), float("nan"), dtype=torch.float64)}, "holds NaN or infinite"),
        ({"posterior.loss": torch.full((1,), float("inf"), dtype=torch.float64)}, "holds NaN or infinite"),
        ({"surrogate.extra": torch.zeros(3)}, "'extra' is .* in the file and missing here"),
    ],
    ids=str,
)
def test_tensors_of_another_shape_or_type_are_refused(tensors: Any, message: str, saved: Path) -> None:
    forged(saved, tensors=tensors)
    with pytest.raises(FileFormatError, match=message):
        ScaLLA.load(saved, network())


@pytest.mark.parametrize("change", ["shape", "dtype", "missing"])
def test_every_weight_of_the_surrogate_must_fit(change: str, saved: Path) -> None:
    tensors, _ = read_file(saved, "posterior")
    name = sorted(k for k in tensors if k.startswith("surrogate."))[0]
    other = {"shape": torch.zeros(7, 7), "dtype": tensors[name].half(), "missing": None}[change]
    forged(saved, tensors={name: other})
    with pytest.raises(FileFormatError, match=r"does not fit this surrogate|not of the sizes"):
        ScaLLA.load(saved, network())


def test_another_network_is_refused_and_other_weights_are_told(saved: Path) -> None:
    with pytest.raises(FileFormatError, match=r"saved for another network: '0\.bias' is \[5\] in the file and \[7\]"):
        ScaLLA.load(saved, network(width=7))
    with pytest.raises(FileFormatError, match=r"'1' is Tanh in the file and ReLU in the network given"):
        ScaLLA.load(saved, nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 3)))
    with pytest.warns(UserWarning, match="same architecture, other values"):
        ScaLLA.load(saved, CASES["mlp"].model(seed=9))
    with pytest.raises(InputError, match="got a model of type str"):
        ScaLLA.load(saved, "mlp")  # type: ignore[arg-type]


def test_a_surrogate_of_ones_own_must_be_given_and_no_other(saved: Path, tmp_path: Path) -> None:
    fitted(surrogate=Own()).save(tmp_path / "own")
    with pytest.raises(FileFormatError, match=r"kind 'custom'; give that module: ScaLLA\.load\(path, model, surrogate"):
        ScaLLA.load(tmp_path / "own", network())
    with pytest.raises(FileFormatError, match=r"kind 'mirror'; load it without surrogate="):
        ScaLLA.load(saved, network(), Own())
    with pytest.raises(InputError, match="got a surrogate of type str"):
        ScaLLA.load(saved, network(), "mirror")  # type: ignore[arg-type]
    given = Own(width=6)
    before = {k: v.clone() for k, v in given.state_dict().items()}
    with pytest.raises(FileFormatError, match=r"'layers\.0\.bias' is .* in the file"):
        ScaLLA.load(tmp_path / "own", network(), given)
    assert all(torch.equal(given.state_dict()[k], v) for k, v in before.items())
