"""How good is g(x) g(x')ᵀ ≈ K_NTK(x, x')? Measured exactly on a few hundred inputs, or from probes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from scalla.functional import FrozenNetwork, Params, batch_size, map_tensors
from scalla.jvp import jacobian
from scalla.kernel_loss import Block
from scalla.types import Inputs


@dataclass(frozen=True)
class KernelError:
    """‖GGᵀ − K‖_F / ‖K‖_F, and the least that any kernel of rank m can have on the same inputs."""

    error: float
    floor: float

    def __str__(self) -> str:
        return f"kernel error {self.error:.3f} (rank floor {self.floor:.3f})"


def exact_kernel(
    network: FrozenNetwork,
    params: Params,
    x: Inputs,
    *,
    max_jacobian_bytes: float = 4e9,
    chunk_size: int = 8,
) -> Float[Tensor, "BC BC"]:
    """K = J Jᵀ in float64, Jacobians in chunks of inputs; chunks are recomputed where all do not fit."""
    size = batch_size(x)
    rows = [slice(i, min(i + chunk_size, size)) for i in range(0, size, chunk_size)]

    def flat_jacobian(part: slice) -> list[Tensor]:
        inputs = map_tensors(x, lambda t: t[part] if t.ndim and len(t) == size else t)
        return [j.flatten(0, 1).flatten(1) for j in jacobian(network, params, inputs).values()]

    first = flat_jacobian(rows[0])
    bytes_per_row = sum(j[0].numel() * j.element_size() for j in first)
    per_input = len(first[0]) // (rows[0].stop - rows[0].start)
    keep = bytes_per_row * per_input * size <= max_jacobian_bytes
    cache = {0: first} | ({i: flat_jacobian(part) for i, part in enumerate(rows) if i} if keep else {})
    total = per_input * size
    kernel = torch.empty(total, total, dtype=torch.float64, device=first[0].device)
    for i, a in enumerate(rows):
        left = cache[i] if i in cache else flat_jacobian(a)
        for k, b in enumerate(rows[: i + 1]):
            right = left if k == i else cache[k] if k in cache else flat_jacobian(b)
            block = torch.stack([p.double() @ q.double().mT for p, q in zip(left, right, strict=True)]).sum(0)
            at_a = slice(a.start * per_input, a.stop * per_input)
            at_b = slice(b.start * per_input, b.stop * per_input)
            kernel[at_a, at_b], kernel[at_b, at_a] = block, block.mT
    return kernel


def without_cross_groups(kernel: Float[Tensor, "BC BC"], group_sizes: Sequence[int]) -> Float[Tensor, "BC BC"]:
    """The biased target: K with the blocks between groups zeroed; `group_sizes` in rows (inputs times C)."""
    groups = torch.repeat_interleave(torch.arange(len(group_sizes)), torch.tensor(list(group_sizes))).to(kernel.device)
    return kernel * (groups[:, None] == groups[None, :])


def kernel_error(features: Float[Tensor, "B C m"], kernel: Float[Tensor, "BC BC"]) -> KernelError:
    """Relative Frobenius error of GGᵀ, beside √(Σ_{i>m} λ_i²) / ‖K‖_F (Eckart–Young)."""
    g = features.double().flatten(0, 1)
    norm = kernel.norm()
    eigenvalues = torch.linalg.eigvalsh(kernel).flip(0)
    floor = eigenvalues[g.shape[-1] :].square().sum().sqrt() / norm
    return KernelError(float((g @ g.mT - kernel).norm() / norm), float(floor))


class KernelScore:
    """An unbiased estimate of ‖GGᵀ − K‖²/‖K‖² on held-out inputs from S probes: no Jacobian is formed.

    With independent probes z_s, E⟨GGᵀ, z zᵀ⟩ = ⟨GGᵀ, K⟩ and E (z_sᵀ z_t)² = ‖K‖² for s ≠ t. So unlike the
    training loss it has no floor, and costs S Jacobian-vector products once and one surrogate pass a time.
    """

    def __init__(self, targets: Sequence[Float[Tensor, "B C S"]]) -> None:
        """`targets`: J(x) v_s on the held-out inputs of each group (one group, or one for each when biased)."""
        self.targets = [z.double().flatten(0, 1) for z in targets]
        self.norm_sq = sum(_off_diagonal_mean_square(z.mT @ z) for z in self.targets)

    def relative_error(self, features: Sequence[Float[Tensor, "B C m"]]) -> float:
        """√ of the estimate; an estimate below zero, which noise may give, counts as zero."""
        flat = [g.double().flatten(0, 1) for g in features]
        own = sum(g.mT @ g for g in flat).square().sum()  # type: ignore[union-attr]
        cross = sum((g.mT @ z).square().sum() / z.shape[-1] for g, z in zip(flat, self.targets, strict=True))
        return float(((own - 2 * cross + self.norm_sq) / self.norm_sq).clamp_min(0).sqrt())


def _off_diagonal_mean_square(gram: Float[Tensor, "S S"]) -> Tensor:
    num_probes = len(gram)
    return (gram.square().sum() - gram.diagonal().square().sum()) / (num_probes * (num_probes - 1))


def blocks_of(features: Sequence[Tensor], targets: Sequence[Tensor], *, bias: bool) -> list[Block]:
    """Features and targets of each source with its group: one for all, or one for each when biased."""
    return [(g, z, i if bias else 0) for i, (g, z) in enumerate(zip(features, targets, strict=True))]
