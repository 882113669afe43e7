"""Directed targets: instead of J(x) v for random v, all of J(x) V for the m best directions, once for a pool of inputs.

Probes are unbiased but noisy. The kernel of a trained network has few large eigenvalues, so a few directions carry
nearly all of it, and J(x) V in these is a target without noise (Nyström):

    Y = orth(J_L Ω)                  the range of K_LL on landmarks L, from q > m random probes Ω
    V = J_Lᵀ Y,  T = J V             q Jacobian-vector products of every input of the pool
    T (Yᵀ K_LL Y)^{-1/2} R           K_xL Y (Yᵀ K_LL Y)^{-1} Yᵀ K_Lx' between any x, x'; R rotates to its m
                                     principal columns over the pool (Eckart–Young), largest first

Neither V ∈ R^{P×q} nor a Jacobian is ever held: one direction at a time is. With bias every group has landmarks and
directions of its own, and the columns of one group are zero on the inputs of another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scalla.batches import GroupedBatches, inputs_of
from scalla.device import sent
from scalla.functional import batch_size, first_rows, map_tensors
from scalla.jvp import JacobianProduct
from scalla.probes import Probe, draw_probe, mix_seed
from scalla.types import InputError, Inputs

#: inputs that go through one Jacobian-vector product
CHUNK = 256
#: beyond this much memory for the products, say so rather than run out of it
MAX_POOL_BYTES = 16e9


@dataclass(frozen=True, eq=False)
class DirectedTargets:
    """The pool: inputs of every source (training data, contexts), and T of each."""

    inputs: list[Inputs]
    targets: list[Float[Tensor, "N C m"]]

    def batch(self, sizes: Sequence[int], *, seed: int, step: int) -> tuple[list[Inputs], list[Tensor]]:
        """`sizes[i]` rows of source i, its epochs shuffled: a function of seed and step alone."""
        inputs, targets = [], []
        for number, (x, t, size) in enumerate(zip(self.inputs, self.targets, sizes, strict=True)):
            rows = _shuffled_rows(len(t), min(size, len(t)), seed=mix_seed(seed, 106, number), step=step)
            rows = sent(rows, t.device)
            inputs.append(rows_of(x, rows))
            targets.append(t.index_select(0, rows))
        return inputs, targets

    def through(self, function: Callable[[Inputs], Tensor]) -> DirectedTargets:
        """The same pool with function(x) in the place of x, so that no step has to compute it again."""
        inputs: list[Inputs] = []
        for x in self.inputs:
            starts = range(0, batch_size(x), CHUNK)
            inputs.append(torch.cat([function(rows_of(x, slice(i, i + CHUNK))) for i in starts]))
        return DirectedTargets(inputs, self.targets)


def gather_pool(batches: GroupedBatches, pool_size: int) -> list[Inputs]:
    """The first `pool_size` inputs of every source, of one epoch at most."""
    pool = []
    for source in batches.sources:
        epoch, parts, count = source.epoch, [], 0
        while count < pool_size:
            x = inputs_of(source.peek())
            if source.epoch > epoch:
                break
            source.next()
            parts.append(x)
            count += batch_size(x)
        pool.append(_joined(parts, pool_size))
    return pool


def directed_targets(
    product: JacobianProduct,
    pool: Sequence[Inputs],
    num_features: int,
    *,
    bias: bool,
    num_landmarks: int = 400,
    probe: Probe = "rademacher",
    seed: int = 0,
    oversampling: float = 1.25,
    after_direction: Callable[[], object] | None = None,
) -> DirectedTargets:
    """T for every input of the pool, in the scale of the kernel: T Tᵀ ≈ K, zeroed across groups with bias."""
    pool = [product.network.prepare(x) for x in pool]
    groups = [[i] for i in range(len(pool))] if bias else [list(range(len(pool)))]
    found = [
        _nystrom_columns(
            product,
            [pool[i] for i in members],
            num_landmarks=max(1, num_landmarks // len(members)),
            num_columns=round(oversampling * num_features) + 4,
            probe=probe,
            seed=mix_seed(seed, 107, number),
            after_direction=after_direction,
        )
        for number, members in enumerate(groups)
    ]
    maps = _principal(found, num_features)
    targets: list[Tensor] = [torch.empty(0)] * len(pool)
    start = 0
    for members, (parts, _), to_features in zip(groups, found, maps, strict=True):
        kept = to_features.shape[1]
        for i, part in zip(members, parts, strict=True):
            targets[i] = part.new_zeros(*part.shape[:2], num_features)
            targets[i][..., start : start + kept] = part @ to_features.to(part)
        start += kept
    return DirectedTargets(pool, targets)


def _nystrom_columns(
    product: JacobianProduct,
    sources: Sequence[Inputs],
    *,
    num_landmarks: int,
    num_columns: int,
    probe: Probe,
    seed: int,
    after_direction: Callable[[], object] | None,
) -> tuple[list[Float[Tensor, "N C q"]], Float[Tensor, "q r"]]:
    """K_xL Y for every x of every source, and (Yᵀ K_LL Y)^{-1/2}."""
    at_landmarks = [first_rows(x, num_landmarks) for x in sources]
    sizes = [batch_size(x) for x in at_landmarks]
    sketch = []
    for k in range(num_columns):
        direction = draw_probe(product.params, kind=probe, seed=seed, step=k)
        sketch.append(torch.cat([_along(product, x, direction) for x in at_landmarks]).double())
    num_outputs = sketch[0].shape[1]
    y, _ = torch.linalg.qr(torch.stack(sketch, -1).flatten(0, 1))
    cotangents = y.unflatten(0, (-1, num_outputs)).split(sizes)
    dtype = product.network.dtype if product.network.dtype.itemsize >= 4 else torch.float32
    num_inputs = sum(batch_size(x) for x in sources)
    if (size := num_inputs * num_outputs * y.shape[1] * dtype.itemsize) > MAX_POOL_BYTES:
        raise InputError(
            f"the products of {num_inputs} inputs and {num_outputs} outputs with {y.shape[1]} directions take "
            f"{size / 1e9:.0f} GB; give a smaller pool_size, fewer num_features, or targets='probes'"
        )
    columns = [y.new_empty(batch_size(x), num_outputs, y.shape[1], dtype=dtype) for x in sources]
    for k in range(y.shape[1]):
        direction = _pulled_back(product, at_landmarks, [c[..., k] for c in cotangents])
        for of_source, x in zip(columns, sources, strict=True):
            of_source[..., k] = _along(product, x, direction)
        if after_direction is not None:
            after_direction()
    of_landmarks = torch.cat([t[:size].flatten(0, 1) for t, size in zip(columns, sizes, strict=True)]).double()
    return columns, _inverse_root(y.mT @ of_landmarks)


def _along(product: JacobianProduct, x: Inputs, direction: dict[str, Tensor]) -> Float[Tensor, "N C"]:
    starts = range(0, batch_size(x), CHUNK)
    return torch.cat([product(rows_of(x, slice(i, i + CHUNK)), [direction])[..., 0] for i in starts])


def _pulled_back(
    product: JacobianProduct, blocks: Sequence[Inputs], cotangents: Sequence[Float[Tensor, "N C"]]
) -> dict[str, Tensor]:
    """J_Lᵀ u."""
    total: dict[str, Tensor] = {}
    for x, u in zip(blocks, cotangents, strict=True):
        for start in range(0, len(u), CHUNK):
            part = slice(start, start + CHUNK)
            pulled = product.transposed(rows_of(x, part), u[part])
            total = {k: total[k] + g for k, g in pulled.items()} if total else pulled
    return total


def _inverse_root(matrix: Float[Tensor, "q q"]) -> Float[Tensor, "q r"]:
    """U Λ^{-1/2} of the eigenvalues that are not rounding (float32 derivatives carry about seven digits)."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    kept = values > 1e-6 * values[-1]
    if not bool(kept.any()):
        raise InputError(
            "the network's outputs do not depend on the chosen weights at the pool's inputs: the kernel is zero there; "
            "check parameters=..."
        )
    return vectors[:, kept] * values[kept].rsqrt()


def _principal(
    found: Sequence[tuple[Sequence[Float[Tensor, "N C q"]], Float[Tensor, "q r"]]], num_features: int
) -> list[Float[Tensor, "q k"]]:
    """For every group the map to its principal columns, of which the largest `num_features` of all are kept.

    Sources weigh as the batches of a fit do: each the same, however large its pool.
    """
    spectra = []
    for parts, inverse_root in found:
        gram = torch.stack([_gram(t) / len(t) for t in parts]).sum(0)
        values, vectors = torch.linalg.eigh(inverse_root.mT @ gram @ inverse_root)
        spectra.append((values, inverse_root @ vectors))
    values = torch.cat([v for v, _ in spectra]).sort(descending=True).values
    least = values[min(num_features, len(values)) - 1]
    return [(vectors[:, v >= least]).flip(1) for v, vectors in spectra]


def _gram(t: Float[Tensor, "N C q"]) -> Float[Tensor, "q q"]:
    parts = [part.flatten(0, 1).double() for part in t.split(CHUNK)]
    return torch.stack([part.mT @ part for part in parts]).sum(0)


def rows_of(x: Inputs, rows: slice | Int[Tensor, " B"]) -> Inputs:
    size = batch_size(x)
    return map_tensors(x, lambda t: t[rows] if t.ndim and len(t) == size else t)


def _shuffled_rows(num: int, size: int, *, seed: int, step: int) -> Int[Tensor, " B"]:
    per_epoch = num // size
    epoch, index = divmod(step, per_epoch)
    generator = torch.Generator("cpu").manual_seed(mix_seed(seed, epoch))
    return torch.randperm(num, generator=generator, device="cpu")[index * size : (index + 1) * size]


def _joined(batches: Sequence[Inputs], count: int) -> Inputs:
    """The first `count` rows of all these batches as one."""
    first = batches[0]
    try:
        if isinstance(first, Tensor):
            return torch.cat([b for b in batches if isinstance(b, Tensor)])[:count]
        if isinstance(first, Mapping):
            return {k: torch.cat([b[k] for b in batches])[:count] for k in first}  # type: ignore[index, call-overload]
        return tuple(torch.cat([b[i] for b in batches])[:count] for i in range(len(first)))  # type: ignore[index]
    except (RuntimeError, TypeError, KeyError, IndexError) as error:
        raise InputError(
            f"targets='directed' keeps a pool of inputs, and the batches of one source do not join ({error}); wanted "
            "tensors of one shape in all batches (pad all to one length), or targets='probes'"
        ) from error
