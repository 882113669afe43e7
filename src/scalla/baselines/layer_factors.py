"""Jacobians of networks made of linear and convolutional layers, in the factors that the chain rule gives.

A layer with weights W ∈ R^{o×i} and inputs a_t at T positions (one for a linear layer) has outputs W a_t, and

    ∂f_c/∂W = Σ_t δ_ct a_tᵀ,   ∂f_c/∂bias = Σ_t δ_ct,   δ_ct = ∂f_c/∂(W a_t).

C backward passes of the whole batch give every δ, and products with J need not form the large blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from scalla.functional import FrozenNetwork, Params


@dataclass(frozen=True, eq=False)
class LayerFactors:
    """δ and a of one layer; with selected outputs, C is 1."""

    weight: str
    #: None without one
    bias: str | None
    left: Float[Tensor, "B C o T"]
    right: Float[Tensor, "B i T"]

    def weight_block(self) -> Float[Tensor, "B C o*i"]:
        """Σ_t δ_ct a_tᵀ."""
        return torch.einsum("bcot,bit->bcoi", self.left, self.right).flatten(2)

    def bias_block(self) -> Float[Tensor, "B C o"]:
        """Σ_t δ_ct."""
        return self.left.sum(-1)

    def detach(self) -> LayerFactors:
        return replace(self, left=self.left.detach(), right=self.right.detach())

    def double(self) -> LayerFactors:
        return replace(self, left=self.left.double(), right=self.right.double())


def layer_factors(
    network: FrozenNetwork,
    params: Params,
    x: Float[Tensor, "B ..."],
    *,
    outputs: Int[Tensor, " B"] | None = None,
) -> list[LayerFactors] | None:
    """The factors of every layer that has weights, in the order of the network; None where they are not all there is.

    That is where `params` are not exactly the weights of linear layers on (B, i) inputs and of plain convolutions,
    each run once. `outputs`: the one output wanted of each input. Differentiable in x where x asks for gradients.
    """
    layers = _layers_of(network, params)
    if layers is None:
        return None
    ran: list[_Ran] = []
    differentiable = x.requires_grad and torch.is_grad_enabled()
    with torch.enable_grad(), _recording(layers, ran):
        weights = {name: p.detach().requires_grad_(not differentiable) for name, p in params.items()}
        logits = network.at(x)(weights)
        if not _is_all(ran, layers):
            return None
        inner = [step.output for step in ran]
        chosen = logits if outputs is None else logits.gather(1, outputs[:, None])
        slopes = [
            torch.autograd.grad(column.sum(), inner, retain_graph=True, create_graph=differentiable)
            for column in chosen.unbind(1)
        ]
        found = [
            LayerFactors(
                _name(step.name, "weight"),
                _name(step.name, "bias") if layers[step.name].bias is not None else None,
                torch.stack([grads[k].flatten(2) if grads[k].ndim > 2 else grads[k][..., None] for grads in slopes], 1),
                _unfolded(layers[step.name], step.inputs),
            )
            for k, step in enumerate(ran)
        ]
        if differentiable:
            return found
        total = torch.autograd.grad(chosen.sum(), [*weights.values()])
    # Weights that are used outside their layer as well would be missed above.
    if not _sums_agree(found, dict(zip(weights, total, strict=True))):
        return None
    return [f.detach() for f in found]


def kernel_between(first: Sequence[LayerFactors], second: Sequence[LayerFactors]) -> Float[Tensor, "B C M D"]:
    """J(x) J(z)ᵀ, layer by layer: of a linear layer (a·a' + 1)(δ·δ'), without a block."""
    total: Tensor | None = None
    for f, g in zip(first, second, strict=True):
        if f.right.shape[-1] == 1:
            inputs = torch.einsum("bi,mi->bm", f.right[..., 0], g.right[..., 0]) + (f.bias is not None)
            slopes = torch.einsum("bco,mdo->bcmd", f.left[..., 0], g.left[..., 0])
            found = slopes * inputs[:, None, :, None]
        else:
            found = torch.einsum("bcp,mdp->bcmd", f.weight_block(), g.weight_block())
            if f.bias is not None:
                found = found + torch.einsum("bco,mdo->bcmd", f.bias_block(), g.bias_block())
        total = found if total is None else total + found
    assert total is not None
    return total


def kernel_within(factors: Sequence[LayerFactors]) -> Float[Tensor, "B C C"]:
    """J(x) J(x)ᵀ of each input by itself."""
    total: Tensor | None = None
    for f in factors:
        if f.right.shape[-1] == 1:
            inputs = f.right[..., 0].square().sum(-1) + (f.bias is not None)
            found = torch.einsum("bco,bdo->bcd", f.left[..., 0], f.left[..., 0]) * inputs[:, None, None]
        else:
            block = f.weight_block()
            found = block @ block.mT
            if f.bias is not None:
                found = found + f.bias_block() @ f.bias_block().mT
        total = found if total is None else total + found
    assert total is not None
    return total


def products_with(factors: Sequence[LayerFactors], directions: Params) -> Float[Tensor, "B C K"]:
    """J(x) V for K directions, given as (p, K) by the name of the weights."""
    total: Tensor | None = None
    for f in factors:
        columns = directions[f.weight]
        if f.right.shape[-1] == 1:
            inputs = f.right[..., 0] @ columns.unflatten(0, (f.left.shape[2], -1)).transpose(0, 1).flatten(1)
            found = f.left[..., 0] @ inputs.unflatten(1, (f.left.shape[2], -1))
        else:
            found = f.weight_block() @ columns
        if f.bias is not None:
            found = found + f.bias_block() @ directions[f.bias]
        total = found if total is None else total + found
    assert total is not None
    return total


def _layers_of(network: FrozenNetwork, params: Params) -> dict[str, nn.Linear | nn.Conv2d] | None:
    """The layers that hold `params`, by name, if they hold nothing else and are of the two kinds."""
    holders = dict.fromkeys(name.rpartition(".")[0] for name in params)
    layers: dict[str, nn.Linear | nn.Conv2d] = {}
    names: set[str] = set()
    for name in holders:
        layer = network.twin.get_submodule(name)
        if type(layer) is not nn.Linear and (
            type(layer) is not nn.Conv2d or layer.groups != 1 or layer.padding_mode != "zeros"
        ):
            return None
        layers[name] = layer
        names |= {_name(name, part) for part, p in layer.named_parameters() if p is not None}
    return layers if names == set(params) else None


@dataclass(frozen=True, eq=False)
class _Ran:
    """One run of a layer, and the versions of its tensors: a later change in place would show there."""

    name: str
    inputs: Tensor
    output: Tensor
    versions: tuple[int, int]


@contextlib.contextmanager
def _recording(layers: dict[str, nn.Linear | nn.Conv2d], ran: list[_Ran]) -> Iterator[None]:
    def note(name: str, inputs: Tensor, output: Tensor) -> None:
        ran.append(_Ran(name, inputs, output, (inputs._version, output._version)))

    hooks = [
        layer.register_forward_hook(lambda _, args, output, name=name: note(name, args[0], output))
        for name, layer in layers.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _is_all(ran: Sequence[_Ran], layers: dict[str, nn.Linear | nn.Conv2d]) -> bool:
    """Every layer ran once, on inputs of its plain shape, and nothing was changed in place afterwards."""
    return sorted(step.name for step in ran) == sorted(layers) and all(
        step.inputs.ndim == (2 if isinstance(layers[step.name], nn.Linear) else 4)
        and step.versions == (step.inputs._version, step.output._version)
        for step in ran
    )


@torch.no_grad()
def _sums_agree(found: Sequence[LayerFactors], total: Params) -> bool:
    """Σ_b Σ_c of the blocks against the gradient of the sum of all outputs."""
    for f in found:
        summed = torch.einsum("bot,bit->oi", f.left.sum(1), f.right).reshape(total[f.weight].shape)
        pairs = [(summed, total[f.weight])]
        if f.bias is not None:
            pairs.append((f.left.sum((0, 1, 3)), total[f.bias]))
        scale = torch.einsum("bcot,bit->", f.left.abs(), f.right.abs())
        tolerance = 100 * torch.finfo(scale.dtype).eps
        if any(float((a - b).abs().sum()) > tolerance * float(scale + b.abs().sum()) for a, b in pairs):
            return False
    return True


def _unfolded(layer: nn.Linear | nn.Conv2d, inputs: Tensor) -> Float[Tensor, "B i T"]:
    """What each position of a convolution sees; of a linear layer its inputs, at one position."""
    if isinstance(layer, nn.Linear):
        return inputs[..., None]
    if isinstance(layer.padding, str):
        across = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        before = [a // 2 if layer.padding == "same" else 0 for a in across]
        after = [a - b if layer.padding == "same" else 0 for a, b in zip(across, before, strict=True)]
        inputs = F.pad(inputs, (before[1], after[1], before[0], after[0]))
        return F.unfold(inputs, layer.kernel_size, dilation=layer.dilation, stride=layer.stride)
    return F.unfold(inputs, layer.kernel_size, dilation=layer.dilation, padding=layer.padding, stride=layer.stride)


def _name(layer: str, part: str) -> str:
    return f"{layer}.{part}" if layer else part
