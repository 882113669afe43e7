"""A residual for a fitted ScaLLA: densities from the training data, four numbers from held-out data."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from scalla.batches import EndlessBatches, context_loaders, inputs_of, labels_of
from scalla.context import Context, default
from scalla.density import MAX_COVARIANCE_NUMBERS, ClassGaussians, ClassMoments
from scalla.functional import FrozenNetwork
from scalla.ggn import check_inputs
from scalla.hidden import check_layers, hidden_of, mark, usual_layers
from scalla.likelihoods import check_labels
from scalla.probes import mix_seed
from scalla.residual import MAX_NUMBERS, NUM_DRAWS, UNFAMILIAR, Outcome, Residual, at_least_single, calibrated
from scalla.types import InputError, Loader

if TYPE_CHECKING:
    from scalla.predicting import LinearizedPredictive

#: held-out inputs, and inputs of the context, that v(x) is calibrated on at most
MAX_INPUTS = 10_000
#: inputs that are made of the training inputs where no context is given
NUM_GENERATED = 2000


@torch.no_grad()
def fitted_residual(
    la: LinearizedPredictive,
    train_loader: Loader,
    val_loader: Loader,
    *,
    context: Any,
    context_weight: float,
    layers: Sequence[str] | None,
    ridge: float,
    dict_key_y: str,
    progress_bar: bool,
) -> Residual:
    """`la` itself stays as it is."""
    if not context_weight >= 0 or not ridge > 0:
        raise InputError(f"got context_weight={context_weight}, ridge={ridge}; wanted ≥ 0, and > 0")
    generated = isinstance(context, str)
    if generated and context != "generated":
        raise InputError(f"got context={context!r}; wanted 'generated', None, or a loader, dataset or tensor")
    if la.likelihood == "regression" and not (generated or context is None):
        raise InputError("got a context for a regression: unfamiliar inputs have no uniform labels there; leave it out")
    network = FrozenNetwork(la.model, dict_key_y=dict_key_y)
    train = EndlessBatches(train_loader, seed=la.seed)
    first = inputs_of(train.peek())
    names = usual_layers(network, first) if layers is None else check_layers(network, layers)
    mark(network, names)
    densities = _densities(la, network, names, train, ridge, dict_key_y, progress_bar)
    held_out, hidden = _outcomes(la, network, names, val_loader, "val_loader", dict_key_y)
    scale = held_out.mean.new_ones(held_out.mean.shape[-1])
    if la.likelihood == "regression":
        assert held_out.labels is not None
        scale = (held_out.labels - held_out.mean).square().mean(0).clamp_min(torch.finfo(scale.dtype).tiny)
    residual = Residual(names, densities, scale)
    logs = residual.log_distances(hidden)
    residual.centre.copy_(logs.median(0).values)
    above = logs.quantile(0.99, dim=0) - residual.centre
    residual.width.copy_(torch.where(above > 0, above, torch.ones_like(above)))
    held_out = replace(held_out, z=residual.unfamiliarity(hidden))
    outside = None
    if generated and la.likelihood == "classification":
        context = _generated(train_loader, la.seed)
    if context is not None and la.likelihood == "classification":
        parts = [
            _outcomes(la, network, names, loader, "context", None)
            for loader in context_loaders(context, context_batch_size=256)
        ]
        outside = Outcome(
            torch.cat([o.mean for o, _ in parts]),
            torch.cat([o.spread for o, _ in parts], -2),
            torch.cat([residual.unfamiliarity(h) for _, h in parts]),
            None,
        ).beyond(UNFAMILIAR)
        if outside is None:
            warnings.warn(
                "to these layers every input of the context is as familiar as held-out data; v(x) follows the held-out "
                "data alone. Name other layers, or give a context that differs more",
                stacklevel=3,
            )
    tempered = la.likelihood == "classification"
    residual.shape.copy_(
        calibrated(la.likelihood, held_out, outside, weight=context_weight, scale=scale, tempered=tempered)
    )
    return residual


def _generated(train_loader: Loader, seed: int) -> Context:
    try:
        return default(train_loader, seed=mix_seed(seed, 107), size=NUM_GENERATED)
    except InputError as error:
        raise InputError(
            f"no context could be made of these training inputs ({error}); give inputs that are not of their kind as "
            "context=..., or context=None"
        ) from error


def _densities(
    la: LinearizedPredictive,
    network: FrozenNetwork,
    names: Sequence[str],
    train: EndlessBatches,
    ridge: float,
    dict_key_y: str,
    progress_bar: bool,
) -> list[ClassGaussians]:
    num_classes = 1 if la.likelihood == "regression" else max(la.n_outputs, 2)
    moments: dict[str, ClassMoments] = {}
    like = torch.empty(0)
    for batch in tqdm(train.one_epoch(), disable=not progress_bar, desc="densities", unit="batch"):
        x = inputs_of(batch)
        check_inputs(x, "train_loader")
        hidden = hidden_of(network, names, x)
        like = hidden[names[0]]
        y = torch.zeros(len(like), dtype=torch.long, device=like.device)
        if la.likelihood == "classification":
            y = check_labels("classification", like.new_empty(len(like), la.n_outputs), labels_of(batch, dict_key_y))
        for name in names:
            h = hidden[name]
            if name not in moments:
                shared = num_classes * h.shape[1] ** 2 > MAX_COVARIANCE_NUMBERS
                moments[name] = ClassMoments(num_classes, h, shared=shared)
            moments[name].add(h, y)
    found = []
    for name in names:
        num_dims, shared = len(moments[name].origin), len(moments[name].squares) == 1
        gaussians = ClassGaussians(num_classes, num_dims, shared=shared, like=at_least_single(like))
        moments[name].write(gaussians, ridge=ridge)
        found.append(gaussians)
    return found


def _outcomes(
    la: LinearizedPredictive,
    network: FrozenNetwork,
    names: Sequence[str],
    loader: Loader,
    what: str,
    dict_key_y: str | None,
) -> tuple[Outcome, dict[str, Tensor]]:
    """Means, spreads and labels (z is still to come), and what the layers are given; no more inputs than needed."""
    most = min(MAX_INPUTS, max(500, MAX_NUMBERS // (NUM_DRAWS * la.n_outputs)))
    noise = la._draw(la.num_features, NUM_DRAWS, None)
    means, spreads, labels, hidden, count = [], [], [], [], 0
    for batch in EndlessBatches(loader, seed=la.seed, name=what).one_epoch():
        if count >= most:
            break
        x = inputs_of(batch)
        check_inputs(x, what)
        outputs, features = la._outputs_and_features(x)
        factor = (features.double() @ la._posterior.factor).to(at_least_single(outputs))
        outputs = at_least_single(outputs)
        means.append(outputs)
        if la.likelihood == "regression":
            spreads.append(factor.square().sum(-1) + la._posterior.sigma_noise.square().to(outputs))
        else:
            spreads.append(outputs + torch.einsum("bcm,ms->sbc", factor, noise.to(factor)))
        if dict_key_y is not None:
            labels.append(check_labels(la.likelihood, outputs, labels_of(batch, dict_key_y)))
        hidden.append(hidden_of(network, names, x))
        count += len(outputs)
    spread = torch.cat(spreads, -2)  # the dimension of inputs, of variances (B, C) and of samples (S, B, C)
    outcome = Outcome(torch.cat(means), spread, torch.empty(0), torch.cat(labels) if labels else None)
    return outcome, {name: torch.cat([h[name] for h in hidden]) for name in names}
