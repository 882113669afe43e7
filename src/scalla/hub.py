"""A fitted ScaLLA as a repository of the Hugging Face Hub, or as a folder of the same files.

config.json         what it is; of a transformers network its own configuration beside that
model.safetensors   the network's weights (those of a transformers network as it writes them)
scalla.safetensors  surrogate and posterior, as `ScaLLA.save` writes them
README.md           the model card, with what was measured on held-out data

No pickle is written or read, and no code of a repository is run. A folder needs no further package; reading from
the Hub and writing to it need `pip install "scalla[hub]"`.
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from torch import Tensor, nn

from scalla.calibration import measure
from scalla.checkpoint import architecture_of, check_architecture, read_file, replacing, write_file
from scalla.model_card import model_card
from scalla.saving import settings_of
from scalla.types import FileFormatError, InputError, Loader, ScallaError

if TYPE_CHECKING:
    from scalla.method import ScaLLA

CONFIG, NETWORK, POSTERIOR, CARD = "config.json", "model.safetensors", "scalla.safetensors", "README.md"
#: what transformers looks for beside them: weights in several files, and an adapter of peft
INDEX, ADAPTER = "model.safetensors.index.json", "adapter_config.json"
#: what is fetched of a repository
PATTERNS = ("*.json", "*.safetensors")
REPO_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
#: settings that config.json repeats
SHOWN = (
    "likelihood", "num_outputs", "num_features", "surrogate", "prior_precision", "sigma_noise", "temperature",
    "num_data",
)  # fmt: skip


def save_pretrained(
    la: ScaLLA,
    folder: str | os.PathLike[str],
    *,
    val_loader: Loader | None = None,
    ood: Any = None,
    dataset: str = "held-out data",
    ood_dataset: str = "out-of-distribution data",
    license: str | None = None,
    repo_id: str | None = None,
) -> None:
    """Write network, surrogate, posterior and a model card into `folder`; files of these names are written anew.

    Args:
        la: a fitted ScaLLA.
        folder: made if it is not there.
        val_loader: held-out data (x, y), on which the calibration in the model card is measured.
        ood: inputs of another kind (a loader, dataset or tensor), for the AUROC of the scores.
        dataset: what the held-out data are called in the card.
        ood_dataset: what the other inputs are called there.
        license: of the weights, as the Hub spells it ("mit").
        repo_id: "owner/name" on the Hub, for the card's example; the folder's name without one.
    """
    folder, posterior = Path(folder), la._posterior
    if ood is not None and val_loader is None:
        raise InputError("got ood without val_loader; the scores are compared with those of held-out data")
    if folder.is_file():
        raise InputError(f"{folder} is a file; wanted the name of a folder to write into")
    measured = None if val_loader is None else measure(la, val_loader, ood)
    settings = settings_of(la, posterior)
    block = {name: settings[name] for name in SHOWN} | {"network": type(la.model).__name__}
    block |= {"num_params": posterior.num_params, "version": _version()}
    block["measured"] = None if measured is None else {"dataset": dataset, **asdict(measured)}
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {}
    if transformers := _is_transformers(la.model):
        la.model.save_pretrained(folder)  # type: ignore[operator]
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    else:
        _write_network(la.model, folder / NETWORK)
    _write_text(folder / CONFIG, json.dumps(config | {"scalla": block}, indent=2, sort_keys=True) + "\n")
    la.save(folder / POSTERIOR)
    card = model_card(
        block,
        measured,
        source=repo_id or folder.resolve().name,
        dataset=dataset,
        ood_dataset=ood_dataset,
        license=license,
        builds_itself=transformers,
    )
    _write_text(folder / CARD, card)


def push_to_hub(
    la: ScaLLA,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Upload ScaLLA",
    token: str | bool | None = None,
    api: Any = None,
    **options: Any,
) -> Any:
    """Make the repository if it is not there, and commit what `save_pretrained(**options)` writes to it.

    `api` is a huggingface_hub.HfApi, by default one with `token`. Returns its CommitInfo.
    """
    _check_repo_id(repo_id)
    api = api if api is not None else _huggingface_hub().HfApi(token=token)
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(la, folder, repo_id=repo_id, **options)
        api.create_repo(repo_id, private=private, exist_ok=True)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
        )


def fetched(source: str | os.PathLike[str], **options: Any) -> Path:
    """The folder itself, or a repository's files in the cache of huggingface_hub (`options`: revision, token, …)."""
    folder = Path(source)
    if not folder.is_dir():
        _check_repo_id(str(source))
        folder = Path(_huggingface_hub().snapshot_download(str(source), allow_patterns=list(PATTERNS), **options))
    for name in (CONFIG, POSTERIOR):
        if not (folder / name).is_file():
            raise FileFormatError(f"{source} holds no {name}; wanted what ScaLLA.save_pretrained or push_to_hub wrote")
    return folder


def read_network(folder: Path, model: nn.Module | None) -> nn.Module:
    """The network with the folder's weights: a copy of `model`, or what config.json describes (transformers)."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if not isinstance(config, dict) or not isinstance(config.get("scalla"), dict):
            raise ValueError('it has no entry "scalla"')
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{folder / CONFIG} cannot be read: {error}") from error
    if model is not None and not isinstance(model, nn.Module):
        raise InputError(f"got a model of type {type(model).__name__}; wanted a torch.nn.Module")
    if "architectures" in config:
        found = _transformers_class(config, model)
        _check_weights_are_here(folder)
        try:
            return found.from_pretrained(folder, use_safetensors=True)  # never its pickles
        except (SafetensorError, OSError) as error:
            raise FileFormatError(f"the network in {folder} is damaged or cut short: {error}") from error
    if model is None:
        raise InputError(
            f"{folder} holds the weights of a {config['scalla'].get('network')}, but not its code; give that network, "
            "with any weights: ScaLLA.from_pretrained(source, model)"
        )
    tensors, meta = read_file(folder / NETWORK, kind="network")
    check_architecture(meta.get("architecture"), model, folder / NETWORK)
    network = copy.deepcopy(model)
    for name, t in network.state_dict(keep_vars=True).items():
        t.data = t.data.to(tensors[name].dtype)  # load_state_dict keeps the dtype of what it writes to
    network.load_state_dict(tensors)
    return network


def _check_weights_are_here(folder: Path) -> None:
    """transformers follows an adapter to its base network and an index to any path: neither may leave the folder."""
    if (folder / ADAPTER).exists():
        raise FileFormatError(
            f"{folder} holds an {ADAPTER}, which names a network elsewhere; merge the adapter into its network "
            "(merge_and_unload of peft) before save_pretrained"
        )
    index = folder / INDEX
    if not index.is_file():
        return
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise FileFormatError(f"{index} cannot be read: {error!r}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise FileFormatError(f"{index} names {name!r}; wanted safetensors files of its own folder")


def _write_network(model: nn.Module, path: Path) -> None:
    state: Mapping[str, Any] = model.state_dict()
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others:
        raise InputError(
            f"the network's state dict holds what is no tensor ({', '.join(others)}); only tensors are saved"
        )
    write_file(path, state, {"architecture": architecture_of(model)}, kind="network")


def _write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _is_transformers(model: nn.Module) -> bool:
    """Whether it is a network that transformers itself can write and build again."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def _transformers_class(config: Mapping[str, Any], model: nn.Module | None) -> Any:
    """That of the model given, or the one of this name in transformers; never code of the repository."""
    try:
        import transformers
    except ImportError as error:
        raise ScallaError(
            "this repository's network needs the package transformers: pip install transformers"
        ) from error
    if model is not None:
        found: Any = type(model)
    else:
        name = config["architectures"][0] if config["architectures"] else None
        found = getattr(transformers, str(name), None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise InputError(
            f"the network of this repository is {config['architectures']}; wanted a class of transformers. Give one of "
            "your own as an instance: ScaLLA.from_pretrained(source, model)"
        )
    return found


def _check_repo_id(repo_id: str) -> None:
    if not REPO_ID.fullmatch(repo_id):
        raise InputError(f"{repo_id!r} is neither a folder that exists nor the name of a repository, 'owner/name'")


def _huggingface_hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ScallaError(
            'the Hugging Face Hub needs the package huggingface_hub: pip install "scalla[hub]" (a folder needs it not)'
        ) from error
    return huggingface_hub


def _version() -> str:
    from scalla import __version__

    return __version__
