"""Exact Jacobians J(x) = ∂f(x)/∂θ ∈ R^{C×P}, one input at a time.

Differentiating a batch as a whole costs B·C passes of B inputs; input by input it is B·C passes of one.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import grad, jacrev, vmap

from scalla.baselines.layer_factors import LayerFactors, layer_factors
from scalla.functional import FrozenNetwork, Params


@torch.no_grad()
def exact_jacobians(
    network: FrozenNetwork, params: Params, x: Float[Tensor, "B ..."], *, out: Tensor | None = None
) -> Float[Tensor, "B C P"]:
    """J(x) over `params`, its columns in the order of `params`: B·C·P numbers.

    `out`: memory of shape (≥ B, C, P) to use; fresh memory of that size costs as much as the derivatives.
    """

    def single(x_single: Tensor) -> Params:
        return jacrev(lambda p: network.at(x_single[None])(p)[0])(params)

    if out is None:
        num_outputs, num_params = network(x[:1]).shape[-1], sum(p.numel() for p in params.values())
        out = next(iter(params.values())).new_empty(len(x), num_outputs, num_params)
    out = out[: len(x)]
    if _has_convolutions(network.twin) and x.device.type == "cpu":
        # vmap makes a convolution's weight gradient a grouped convolution, which is slow on a CPU.
        for row, x_single in zip(out, x, strict=True):
            _write(row, single(x_single))
    else:
        _write(out, vmap(single)(x))
    return out


def selected_jacobians(
    network: FrozenNetwork, params: Params, x: Float[Tensor, "M ..."], outputs: Int[Tensor, " M"]
) -> Float[Tensor, "M P"]:
    """∂f_{c_m}(x_m)/∂θ, one output an input; differentiable in x."""

    def single(x_single: Tensor, output: Tensor) -> Params:
        return grad(lambda p: network.at(x_single[None])(p)[0].gather(0, output[None])[0])(params)

    blocks = vmap(single)(x, outputs).values()
    return torch.cat([block.reshape(len(x), -1) for block in blocks], -1)


def factored_jacobians(
    network: FrozenNetwork, params: Params, x: Float[Tensor, "B ..."], *, out: Tensor | None = None
) -> list[LayerFactors]:
    """J(x) by the factors of its layers, or where it has none as one dense factor (with `out` as its memory)."""
    return layer_factors(network, params, x) or [_as_factor(exact_jacobians(network, params, x, out=out))]


def factored_selection(
    network: FrozenNetwork, params: Params, x: Float[Tensor, "M ..."], outputs: Int[Tensor, " M"]
) -> list[LayerFactors]:
    """∂f_{c_m}(x_m)/∂θ likewise, differentiable in x where x asks for gradients."""
    # Without gradients in x the factors are checked, which one input is enough for.
    found = layer_factors(network, params, x[:1].detach()) and layer_factors(network, params, x, outputs=outputs)
    return found or [_as_factor(selected_jacobians(network, params, x, outputs)[:, None])]


def _as_factor(jacobians: Float[Tensor, "B C P"]) -> LayerFactors:
    """δ = J and a = 1."""
    return LayerFactors("", None, jacobians[..., None], jacobians.new_ones(len(jacobians), 1, 1))


def _write(out: Float[Tensor, "*B C P"], tree: Params) -> None:
    start = 0
    for block in tree.values():
        flat = block.reshape(*out.shape[:-1], -1)
        out[..., start : start + flat.shape[-1]] = flat
        start += flat.shape[-1]


def _has_convolutions(module: nn.Module) -> bool:
    return any(isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d) for m in module.modules())
