"""What of a fitted ScaLLA goes into a file, and what a file must hold to become one again."""

from __future__ import annotations

import math
import os
import warnings
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from scalla.checkpoint import architecture_of, check_architecture, read_file, weights_digest, write_file
from scalla.features import FeatureMap
from scalla.ggn import GGNSums
from scalla.posterior import Posterior
from scalla.training import HistoryEntry
from scalla.types import FileFormatError

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
    "temperature",
    "dict_key_y",
)


def save_posterior(la: ScaLLA, posterior: Posterior, path: str | os.PathLike[str]) -> None:
    """Surrogate and posterior in one file: no pickle, no training data, not the network itself."""
    features = la.feature_map
    assert la.surrogate is not None  # a posterior has both
    assert features is not None
    tensors = {f"surrogate.{k}": t for k, t in la.surrogate.state_dict().items()}
    tensors |= {
        "posterior.ggn": posterior.ggn,
        "posterior.loss": posterior.loss,
        "sigma_noise": la.sigma_noise.reshape(-1),
    }
    meta = {
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
        "temperature": la.temperature,
        "dict_key_y": la.dict_key_y,
        "feature_scale": features.scale,
        "num_data": posterior.num_data,
        "parameters": sorted(features.params),
        "history": [vars(entry) for entry in la.history],
        "architecture": architecture_of(la.model),
        "weights_sha256": weights_digest(la.model),
    }
    write_file(path, tensors, meta, kind="posterior")


def read_posterior(
    path: str | os.PathLike[str], model: nn.Module, *, custom: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and settings of a saved posterior, checked against the network that it is to serve."""
    tensors, meta = read_file(path, kind="posterior")
    check_architecture(meta["architecture"], model, path)
    if (meta["surrogate"] == "custom") != custom:
        raise FileFormatError(
            f"{path} was saved with a surrogate of kind {meta['surrogate']!r}; "
            + ("load it without surrogate=..." if custom else "give that module: ScaLLA.load(path, model, surrogate)")
        )
    m, levels = meta["num_features"], meta["num_outputs"] if meta["likelihood"] == "regression" else 1
    for name, shape in (("posterior.ggn", (levels, m, m)), ("posterior.loss", (levels,))):
        found = tuple(tensors[name].shape) if name in tensors else "missing"
        if found != shape:
            raise FileFormatError(f"{path} is not whole: {name} is {found}, wanted {shape}")
    if "sigma_noise" not in tensors or not math.isfinite(meta["feature_scale"]):
        raise FileFormatError(f"{path} is not whole: it lacks the noise or the scale of the features")
    if meta["weights_sha256"] != weights_digest(model):
        warnings.warn(
            f"the weights of this network are not those that {path} was fitted to (same architecture, other values); "
            "its uncertainties belong to the other weights",
            UserWarning,
            stacklevel=3,
        )
    return tensors, meta


def restore(la: ScaLLA, tensors: dict[str, Tensor], meta: dict[str, Any], path: object) -> None:
    """Give a ScaLLA that is not fitted yet the surrogate and the posterior that `read_posterior` found."""
    chosen = set(meta["parameters"])
    params = {k: p.detach() for k, p in la.model.named_parameters() if k in chosen}
    features = FeatureMap(
        la.model, params, num_outputs=meta["num_outputs"], num_features=la.num_features, dict_key_y=la.dict_key_y
    )
    if meta["head"] is not None:
        la.surrogate = features.rebuild(la.surrogate_kind, meta["head"], la.surrogate_options)
    assert la.surrogate is not None
    features.install(la.surrogate)
    features.scale = meta["feature_scale"]
    load_tensors(la.surrogate, tensors, path)
    la.surrogate.eval()
    la.feature_map = features
    la.history = [HistoryEntry(**entry) for entry in meta["history"]]
    la.sigma_noise = tensors["sigma_noise"]
    device = features.plain.device
    sums = GGNSums(tensors["posterior.ggn"].to(device), tensors["posterior.loss"].to(device), meta["num_data"])
    la.posterior = la._posterior_of(features, sums)


def load_tensors(surrogate: nn.Module, tensors: dict[str, Tensor], path: object) -> None:
    stored = {k.removeprefix("surrogate."): t for k, t in tensors.items() if k.startswith("surrogate.")}
    try:
        surrogate.load_state_dict(stored)
    except RuntimeError as error:
        raise FileFormatError(f"{path} does not fit this surrogate: {str(error).splitlines()[-1].strip()}") from error
