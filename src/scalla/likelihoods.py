"""What the labels say: −log p(y | f), its Hessian in f through a factor, and the checks on y."""

from __future__ import annotations

import torch
from jaxtyping import Float, Num, Shaped
from torch import Tensor
from torch.nn import functional as F

from scalla.types import InputError, Likelihood


def check_labels(likelihood: Likelihood, outputs: Float[Tensor, "B C"], y: object) -> Num[Tensor, "B ..."]:
    """Labels in the shape and type that the likelihood wants, on the outputs' device."""
    num_inputs, num_outputs = outputs.shape
    if not isinstance(y, Tensor):
        try:
            y = torch.as_tensor(y)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"got labels of type {type(y).__name__}; wanted a tensor") from error
    y = y.to(outputs.device, non_blocking=True)
    if likelihood == "regression":
        return _check_targets(y, num_inputs, num_outputs).to(outputs.dtype)
    return _check_classes(y, num_inputs, num_outputs)


def _check_targets(y: Shaped[Tensor, ...], num_inputs: int, num_outputs: int) -> Tensor:
    if num_outputs == 1 and y.shape == (num_inputs,):
        y = y[:, None]
    if y.shape != (num_inputs, num_outputs):
        raise InputError(
            f"got regression targets of shape {tuple(y.shape)}; wanted {(num_inputs, num_outputs)}, one column for "
            "each of the network's outputs"
        )
    if y.is_complex() or y.dtype == torch.bool:
        raise InputError(f"got regression targets of type {y.dtype}; wanted real numbers")
    if not bool(torch.isfinite(y).all()):
        raise InputError("got NaN or infinite regression targets; remove or impute them before the fit")
    return y


def _check_classes(y: Shaped[Tensor, ...], num_inputs: int, num_outputs: int) -> Tensor:
    num_classes = max(num_outputs, 2)
    if y.shape == (num_inputs, 1):
        y = y[:, 0]
    if y.shape != (num_inputs,):
        raise InputError(
            f"got class labels of shape {tuple(y.shape)}; wanted ({num_inputs},), one integer for each input. "
            "Turn one-hot labels into integers by y.argmax(-1)"
        )
    if y.is_floating_point():
        # One logit is trained with float labels in PyTorch (BCEWithLogitsLoss): whole numbers are accepted there.
        if num_outputs != 1 or not bool(((y == 0) | (y == 1)).all()):
            raise InputError(f"got class labels of type {y.dtype}; wanted integers: use y.long()")
    elif y.is_complex():
        raise InputError(f"got class labels of type {y.dtype}; wanted integers")
    y = y.long()
    if len(y) and (int(y.min()) < 0 or int(y.max()) >= num_classes):
        raise InputError(
            f"got class labels from {int(y.min())} to {int(y.max())}; wanted 0 to {num_classes - 1}, as the network "
            f"has {num_outputs} outputs"
        )
    return y


def loss_sums(likelihood: Likelihood, outputs: Float[Tensor, "B C"], y: Num[Tensor, "B ..."]) -> Float[Tensor, " R"]:
    """Classification: Σ −log p(y|f), one number. Regression: Σ (y − f)² of each output."""
    outputs = outputs.double()
    if likelihood == "regression":
        return (y.double() - outputs).square().sum(0)
    if outputs.shape[-1] == 1:
        return F.binary_cross_entropy_with_logits(outputs[:, 0], y.double(), reduction="sum")[None]
    return F.cross_entropy(outputs, y, reduction="sum")[None]


def hessian_factor(
    likelihood: Likelihood, outputs: Float[Tensor, "B C"], features: Float[Tensor, "B C m"]
) -> Float[Tensor, "R K m"]:
    """A with AᵀA = Σ_b gᵀ Λ g, one for each noise level R (regression leaves 1/σ² out).

    Classification: Λ = diag(p) − ppᵀ gives gᵀΛg = Σ_c p_c (g_c − ḡ)(g_c − ḡ)ᵀ with ḡ = Σ_c p_c g_c, which is
    positive semi-definite however it is rounded. One logit: Λ = p(1 − p).
    """
    features = features.double()
    if likelihood == "regression":
        return features.transpose(0, 1)
    outputs = outputs.double()
    if outputs.shape[-1] == 1:
        weight = torch.sigmoid(outputs) * torch.sigmoid(-outputs)
        return (weight.sqrt()[..., None] * features).flatten(0, 1)[None]
    probs = torch.softmax(outputs, -1)
    centred = features - torch.einsum("bc,bcm->bm", probs, features)[:, None]
    return (probs.sqrt()[..., None] * centred).flatten(0, 1)[None]
