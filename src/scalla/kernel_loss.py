"""The matching loss ‖G Gᵀ − Z Zᵀ‖²_F, from m×m matrices instead of BC×BC ones.

    ‖GGᵀ − ZZᵀ‖² = ‖GᵀG‖² − 2‖GᵀZ‖² + ‖ZᵀZ‖²                     (exact, for any G and Z)

Bias: with a group label for every input and K zeroed across groups, ‖GᵀG‖² stays over all inputs and the
other two terms become sums over groups. GᵀG, GᵀZ and ZᵀZ are sums over inputs, so adding them up over
processes gives the loss of the global batch, pairs across processes included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

#: one block of inputs with one group label: features, probed targets, group
Block = tuple[Float[Tensor, "B C m"], Float[Tensor, "B C S"], int]


@dataclass(frozen=True)
class GramSums:
    """What the loss needs to know of a batch: no larger than m×m, whatever B and C are."""

    features: Float[Tensor, "m m"]  # GᵀG over all inputs
    cross: dict[int, Float[Tensor, "m S"]]  # GᵀZ of each group
    targets: dict[int, Float[Tensor, "S S"]]  # ZᵀZ of each group
    num_rows: int  # BC over all inputs


def gram_sums(blocks: Sequence[Block]) -> GramSums:
    """GᵀG, GᵀZ and ZᵀZ of a batch; Z is scaled by 1/√S, so that ZZᵀ averages over probes."""
    flat = [(g.flatten(0, 1), z.flatten(0, 1) / z.shape[-1] ** 0.5, group) for g, z, group in blocks]
    cross: dict[int, Tensor] = {}
    targets: dict[int, Tensor] = {}
    for g, z, group in flat:
        cross[group] = cross[group] + g.mT @ z if group in cross else g.mT @ z
        targets[group] = targets[group] + z.mT @ z if group in targets else z.mT @ z
    features = torch.stack([g.mT @ g for g, _, _ in flat]).sum(0) if len(flat) > 1 else flat[0][0].mT @ flat[0][0]
    return GramSums(features, cross, targets, sum(len(g) for g, _, _ in flat))


def matching_loss(sums: GramSums) -> Float[Tensor, ""]:
    """Mean of (Q − K)² over all pairs (i, a), (j, b), K zeroed across groups."""
    total = sums.features.square().sum()
    for cross in sums.cross.values():
        total = total - 2 * cross.square().sum()
    for targets in sums.targets.values():
        total = total + targets.square().sum()
    return total / sums.num_rows**2


def reduce_sums(sums: GramSums, add_over_processes: Callable[[Tensor], Tensor]) -> GramSums:
    """The sums of the global batch; its gradient flows through this process's own part, which is exact
    once the parameters' gradients are added over processes. One message, in float64 for the number of rows."""
    groups = sorted(sums.cross)
    local = [sums.features, *(sums.cross[g] for g in groups), *(sums.targets[g] for g in groups)]
    num_rows = sums.features.new_tensor([sums.num_rows], dtype=torch.float64)
    total = add_over_processes(torch.cat([*(t.detach().double().flatten() for t in local), num_rows]))
    *parts, num_rows = total.split([*(t.numel() for t in local), 1])
    features, *others = [part.view_as(t).to(t) + (t - t.detach()) for t, part in zip(local, parts, strict=True)]
    return GramSums(
        features,
        dict(zip(groups, others[: len(groups)], strict=True)),
        dict(zip(groups, others[len(groups) :], strict=True)),
        int(num_rows),
    )
