"""Exact Jacobians J(x) = ∂f(x)/∂θ ∈ R^{C×P}, one input at a time.

Differentiating a batch as a whole costs B·C passes of B inputs; input by input it is B·C passes of one.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import grad, jacrev, vmap

from scalla.functional import FrozenNetwork, Params


def exact_jacobians(
    network: FrozenNetwork, params: Params, x: Float[Tensor, "B ..."]
) -> Float[Tensor, "B C P"]:
    """J(x) over `params`, its columns in the order of `params`. Holds B·C·P numbers."""

    def single(x_single: Tensor) -> Params:
        return jacrev(lambda p: network.at(x_single[None])(p)[0])(params)

    with torch.no_grad():
        if _has_convolutions(network.twin) and x.device.type == "cpu":
            # vmap makes a convolution's weight gradient a grouped convolution, which is slow on a CPU.
            return torch.stack([_flatten(single(row), 1) for row in x])
        return _flatten(vmap(single)(x), 2)


def selected_jacobians(
    network: FrozenNetwork, params: Params, x: Float[Tensor, "M ..."], outputs: Int[Tensor, " M"]
) -> Float[Tensor, "M P"]:
    """∂f_{c_m}(x_m)/∂θ, one output an input; differentiable in x."""

    def single(x_single: Tensor, output: Tensor) -> Params:
        return grad(lambda p: network.at(x_single[None])(p)[0].gather(0, output[None])[0])(params)

    return _flatten(vmap(single)(x, outputs), 1)


def _flatten(tree: Params, lead: int) -> Tensor:
    return torch.cat(
        [block.flatten(lead) if block.ndim > lead else block[..., None] for block in tree.values()], -1
    )


def _has_convolutions(module: nn.Module) -> bool:
    return any(isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d) for m in module.modules())
