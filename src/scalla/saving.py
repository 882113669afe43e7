"""What of a fitted ScaLLA goes into a file or a state dict, and what must be found again to become one."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from scalla.checkpoint import architecture_of, check_architecture, read_file, weights_digest, write_file
from scalla.features import FeatureMap
from scalla.functional import Head, output_features
from scalla.ggn import GGNSums, empty_sums
from scalla.hidden import mark
from scalla.posterior import Posterior
from scalla.residual import at_least_single, blank, described
from scalla.training import HistoryEntry
from scalla.types import FileFormatError, InputError

if TYPE_CHECKING:
    from scalla.method import ScaLLA

#: settings that are stored under the constructor's own names
CONSTRUCTOR_KEYS = (
    "likelihood",
    "num_features",
    "surrogate_options",
    "probe",
    "seed",
    "prior_mean",
    "prior_precision",
    "sigma_noise",
    "temperature",
    "dict_key_y",
    "enable_backprop",
)

#: everything that a file says beside its tensors, with the type of each in JSON
SETTINGS: dict[str, type | tuple[type, ...]] = {
    "likelihood": str,
    "num_features": int,
    "num_outputs": int,
    "surrogate": str,
    "surrogate_options": dict,
    "head": (str, type(None)),
    "probe": str,
    "seed": int,
    "prior_mean": (int, float),
    "prior_precision": (int, float),
    "sigma_noise": (int, float, list),
    "temperature": (int, float),
    "dict_key_y": str,
    "enable_backprop": bool,
    "feature_scale": (int, float),
    "num_data": int,
    "parameters": list,
    "history": list,
    "residual": (dict, type(None)),
}


def settings_of(la: ScaLLA, posterior: Posterior) -> dict[str, Any]:
    """What the tensors do not say, in JSON."""
    features = la.feature_map
    assert features is not None  # a posterior has both
    return {
        "likelihood": la.likelihood,
        "num_features": la.num_features,
        "num_outputs": posterior.num_outputs,
        "surrogate": la.surrogate_kind,
        "surrogate_options": la.surrogate_options,
        "head": features.head,
        "probe": la.probe,
        "seed": la.seed,
        "prior_mean": la.prior_mean,
        "prior_precision": float(la.prior_precision),
        "sigma_noise": la.sigma_noise.tolist(),
        "temperature": la.temperature,
        "dict_key_y": la.dict_key_y,
        "enable_backprop": la.enable_backprop,
        "feature_scale": features.scale,
        "num_data": posterior.num_data,
        "parameters": sorted(features.params),
        "history": [vars(entry) for entry in la.history],
        "residual": described(la.residual),
    }


def save_posterior(la: ScaLLA, posterior: Posterior, path: str | os.PathLike[str]) -> None:
    """Surrogate and posterior in one file: no pickle, no training data, not the network itself."""
    assert la.surrogate is not None  # a posterior has both
    tensors = {f"surrogate.{k}": t for k, t in la.surrogate.state_dict().items()}
    if la.residual is not None:
        tensors |= {f"residual.{k}": t for k, t in la.residual.state_dict().items()}
    tensors |= {"posterior.ggn": posterior.ggn, "posterior.loss": posterior.loss}
    identity = {"architecture": architecture_of(la.model), "weights_sha256": weights_digest(la.model)}
    write_file(path, tensors, {**settings_of(la, posterior), **identity}, kind="posterior")


def read_posterior(
    path: str | os.PathLike[str], model: nn.Module, *, custom: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and settings of a saved posterior, checked against the network that it is to serve."""
    tensors, meta = read_file(path, kind="posterior")
    check_architecture(meta.get("architecture"), model, path)
    for name, kind in SETTINGS.items():
        value = meta.get(name)
        if name not in meta or not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise FileFormatError(f"{path} is not whole: its {name} is {meta.get(name, 'missing')!r}")
    if (meta["surrogate"] == "custom") != custom:
        raise FileFormatError(
            f"{path} was saved with a surrogate of kind {meta['surrogate']!r}; "
            + ("load it without surrogate=..." if custom else "give that module: ScaLLA.load(path, model, surrogate)")
        )
    if not 0 < meta["feature_scale"] < math.inf or not abs(meta["prior_mean"]) < math.inf or meta["num_data"] < 0:
        raise FileFormatError(f"{path} is not whole: its feature_scale, prior_mean or num_data makes no sense")
    _check_posterior(tensors, meta, path)
    _check_residual(tensors, meta, model, path)
    if not custom:
        _check_sizes(tensors, meta, model, path)
    known = {name for name, _ in model.named_parameters()}
    if not meta["parameters"] or not all(isinstance(p, str) and p in known for p in meta["parameters"]):
        raise FileFormatError(f"{path} is not whole: the weights of its kernel are not those of this network")
    if meta.get("weights_sha256") != weights_digest(model):
        warnings.warn(
            f"the weights of this network are not those that {path} was fitted to (same architecture, other values); "
            "its uncertainties belong to the other weights",
            UserWarning,
            stacklevel=3,
        )
    return tensors, meta


def _check_posterior(tensors: Mapping[str, Tensor], meta: Mapping[str, Any], path: object) -> None:
    m, levels = meta["num_features"], meta["num_outputs"] if meta["likelihood"] == "regression" else 1
    for name, shape in (("posterior.ggn", (levels, m, m)), ("posterior.loss", (levels,))):
        t = tensors.get(name)
        if t is None or tuple(t.shape) != shape or t.dtype != torch.float64:
            found = "missing" if t is None else f"{t.dtype} of shape {tuple(t.shape)}"
            raise FileFormatError(f"{path} is not whole: {name} is {found}, wanted {torch.float64} of shape {shape}")
        if not bool(torch.isfinite(t).all()):
            raise FileFormatError(f"{path} is not whole: {name} holds NaN or infinite numbers")


def _check_residual(tensors: Mapping[str, Tensor], meta: Mapping[str, Any], model: nn.Module, path: object) -> None:
    """Before anything of these sizes is made: they are those of the tensors, and the layers are the network's."""
    if meta["residual"] is None:
        return
    layers, sizes = meta["residual"].get("layers"), meta["residual"].get("sizes")
    found = [
        [*tensors[f"residual.densities.{i}.means"].shape, len(tensors[f"residual.densities.{i}.log_dets"])]
        for i in range(len(sizes) if isinstance(sizes, list) else 0)
        if {f"residual.densities.{i}.means", f"residual.densities.{i}.log_dets"} <= set(tensors)
    ]
    known = {name for name, _ in model.named_modules()}
    if not isinstance(layers, list) or not layers or sizes != found or len(layers) != len(found):
        raise FileFormatError(f"{path} is not whole: its residual is not of the sizes that the file gives")
    if not all(isinstance(name, str) and name in known for name in layers):
        raise FileFormatError(f"{path} is not whole: the layers of its residual are not those of this network")


def _check_sizes(tensors: Mapping[str, Tensor], meta: Mapping[str, Any], model: nn.Module, path: object) -> None:
    """The surrogate that the settings describe is one that fits the network and the tensors, before it is built."""
    try:
        head = model.get_submodule(str(meta["head"]))
    except AttributeError as error:
        raise FileFormatError(f"{path} is not whole: the network has no layer {meta['head']!r}") from error
    hidden = meta["surrogate_options"].get("hidden")
    width = next(iter(tensors["surrogate.expand.weight"].shape), 0) if "surrogate.expand.weight" in tensors else 0
    if (
        not isinstance(head, Head)
        or output_features(head) != meta["num_outputs"]
        or not (hidden is None or hidden == width)
    ):
        raise FileFormatError(f"{path} is not whole: its surrogate is not of the sizes that the file gives")


def restore(la: ScaLLA, meta: Mapping[str, Any], sums: GGNSums | None = None) -> None:
    """Make `la` the fitted ScaLLA of these settings; its surrogate's weights are still to be set.

    Without `sums` the posterior is that of no data, likewise still to be set.
    """
    chosen = set(meta["parameters"])
    params = {k: p.detach() for k, p in la.model.named_parameters() if k in chosen}
    features = FeatureMap(
        la.model, params, num_outputs=meta["num_outputs"], num_features=la.num_features, dict_key_y=meta["dict_key_y"]
    )
    if meta["head"] is not None:
        la.surrogate = features.rebuild(la.surrogate_kind, meta["head"], meta["surrogate_options"])
    assert la.surrogate is not None
    features.install(la.surrogate)
    features.set_training(False)
    features.scale = float(meta["feature_scale"])
    la.posterior, la.feature_map = None, features
    for name in CONSTRUCTOR_KEYS:
        setattr(la, name, meta[name])
    la.parameters_filter = sorted(chosen)
    la.history = [HistoryEntry(**entry) for entry in meta["history"]]
    device = features.plain.device
    if sums is None:
        empty = empty_sums(la.likelihood, features.num_outputs, features.num_features, device)
        sums = GGNSums(empty.ggn, empty.loss, meta["num_data"])
    la.posterior = la._posterior_of(features, GGNSums(sums.ggn.to(device), sums.loss.to(device), sums.num_data))
    la.residual = None
    if meta["residual"] is not None:
        scale = at_least_single(torch.empty(meta["num_outputs"], dtype=features.plain.dtype, device=device))
        la.residual = blank(meta["residual"], scale)
        mark(features.network, la.residual.layers)


def load_tensors(module: nn.Module, prefix: str, tensors: Mapping[str, Tensor], path: object) -> None:
    """The surrogate's or the residual's tensors from a file; refused before anything is changed if one does not fit."""
    stored = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
    wanted = {k: (tuple(t.shape), t.dtype) for k, t in module.state_dict().items()}
    found = {k: (tuple(t.shape), t.dtype) for k, t in stored.items()}
    for name in sorted(set(wanted) | set(found)):
        if wanted.get(name) != found.get(name):
            raise FileFormatError(
                f"{path} does not fit this {prefix.rstrip('.')}: {name!r} is {found.get(name, 'missing')} in the file "
                f"and {wanted.get(name, 'missing')} here. Give network and surrogate in the dtype they were "
                "saved in, and convert them afterwards"
            )
    module.load_state_dict(stored)


def check_same_kind(la: ScaLLA, meta: Mapping[str, Any]) -> None:
    """A state dict goes into a ScaLLA that was built alike."""
    for name, mine in (
        ("likelihood", la.likelihood),
        ("num_features", la.num_features),
        ("surrogate", la.surrogate_kind),
    ):
        if meta[name] != mine:
            raise InputError(f"got the state of a ScaLLA with {name}={meta[name]!r}; this one has {mine!r}")
