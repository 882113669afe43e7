"""Directed targets against dense kernels: exact at full rank, near the best rank m, disjoint with bias."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cases
import oracles
from scalla import ScaLLA
from scalla.batches import EndlessBatches, GroupedBatches
from scalla.functional import FrozenNetwork
from scalla.jvp import JacobianProduct
from scalla.targets import DirectedTargets, directed_targets, gather_pool
from scalla.types import InputError


def network(width: int = 5) -> nn.Module:
    torch.manual_seed(2)
    return cases.mlp(width=width).double()


def product_of(model: nn.Module, x: Any) -> JacobianProduct:
    frozen = FrozenNetwork(model)
    return JacobianProduct(frozen, {k: p.detach() for k, p in frozen.twin.named_parameters()}, x)


def two_sources(num: int) -> list[Tensor]:
    return [cases.normal(num, 2, dtype=torch.float64), 2 + cases.normal(num, 2, seed=6, dtype=torch.float64)]


def kernel_of(model: nn.Module, x: Tensor) -> Tensor:
    j = oracles.dense_jacobian(model, x).flatten(0, 1)
    return j @ j.T


def gram_of(found: DirectedTargets) -> Tensor:
    t = torch.cat(found.targets).flatten(0, 1)
    return t @ t.T


def test_exact_where_m_is_the_rank() -> None:
    model, pool = network(), two_sources(4)  # 24 rows, 33 parameters
    found = directed_targets(product_of(model, pool[0]), pool, 24, bias=False, num_landmarks=8)
    wanted = kernel_of(model, torch.cat(pool))
    # eigenvalues below 1e-6 of the largest count as rounding
    torch.testing.assert_close(gram_of(found), wanted, atol=2e-5 * float(wanted.max()), rtol=0)


def test_near_the_best_of_rank_m_away_from_the_landmarks() -> None:
    model, pool, m = network(20), two_sources(40), 12
    found = directed_targets(product_of(model, pool[0]), pool, m, bias=False, num_landmarks=30)
    assert [tuple(t.shape) for t in found.targets] == [(40, 3, m)] * 2
    kernel = kernel_of(model, torch.cat(pool))
    error, floor = float((gram_of(found) - kernel).norm() / kernel.norm()), oracles.rank_floor(kernel, m)
    assert floor < error < 1.5 * floor < 0.1


def test_columns_are_principal_and_the_largest_come_first() -> None:
    model, pool = network(20), two_sources(20)
    t = torch.cat(directed_targets(product_of(model, pool[0]), pool, 8, bias=False, num_landmarks=20).targets)
    gram = t.flatten(0, 1).T @ t.flatten(0, 1)
    sizes = gram.diagonal()
    assert (sizes[:-1] >= sizes[1:]).all()
    assert (gram - torch.diag(sizes)).abs().max() < 1e-9 * sizes[0]


def test_biased_targets_are_the_kernel_without_its_cross_blocks() -> None:
    model, pool = network(), two_sources(4)
    found = directed_targets(product_of(model, pool[0]), pool, 24, bias=True, num_landmarks=4)
    wanted = torch.block_diag(*[kernel_of(model, x) for x in pool])
    torch.testing.assert_close(gram_of(found), wanted, atol=2e-5 * float(wanted.max()), rtol=0)


def test_biased_groups_share_the_columns_by_their_size() -> None:
    model = network(20)
    small, large = cases.normal(20, 2, dtype=torch.float64) / 10, 5 * cases.normal(20, 2, dtype=torch.float64)
    found = directed_targets(product_of(model, small), [small, large], 6, bias=True, num_landmarks=20)
    used = [t.flatten(0, 1).any(0) for t in found.targets]
    assert not (used[0] & used[1]).any()
    assert used[0].sum() < used[1].sum()
    assert int((used[0] | used[1]).sum()) == 6
    kernel = torch.block_diag(kernel_of(model, small), kernel_of(model, large))
    assert float((gram_of(found) - kernel).norm() / kernel.norm()) < 1.2 * oracles.rank_floor(kernel, 6)


def test_transposed_product_against_the_dense_jacobian() -> None:
    model, x = network(), two_sources(3)[0]
    u = cases.normal(3, 3, seed=8, dtype=torch.float64)
    pulled = product_of(model, x).transposed(x, u)
    wanted = torch.einsum("bcp,bc->p", oracles.dense_jacobian(model, x), u)
    torch.testing.assert_close(torch.cat([g.flatten() for g in pulled.values()]), wanted)


def test_a_network_that_is_constant_is_refused() -> None:
    model, pool = network(), two_sources(4)
    frozen = FrozenNetwork(model)
    product = JacobianProduct(frozen, {"0.weight": frozen.twin.get_parameter("0.weight").detach()}, pool[0])
    with torch.no_grad():
        model[2].weight.zero_()
    with pytest.raises(InputError, match="the kernel is zero there"):
        directed_targets(product, pool, 2, bias=False)


def test_a_pool_that_does_not_fit_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scalla.targets.MAX_POOL_BYTES", 8 * 3 * 14 * 8 - 1)  # inputs, outputs, directions, bytes
    model, pool = network(), two_sources(4)
    with pytest.raises(InputError, match=r"products of 8 inputs and 3 outputs with 14 directions .* smaller pool_size"):
        directed_targets(product_of(model, pool[0]), pool, 8, bias=False)


# -- the pool --


def sources_of(*loaders: Any) -> GroupedBatches:
    return GroupedBatches(EndlessBatches(loaders[0], seed=0), [EndlessBatches(x, seed=1) for x in loaders[1:]])


def test_pool_is_the_first_inputs_and_no_input_twice() -> None:
    x = torch.arange(20.0).view(10, 2)
    batches = sources_of([(x[:4], 0), (x[4:8], 0), (x[8:], 0)], list((-x).split(3)))
    pool = gather_pool(batches, 6)
    assert torch.equal(pool[0], x[:6])
    assert torch.equal(pool[1], -x[:6])
    pool = gather_pool(sources_of([(x[:4], 0), (x[4:8], 0), (x[8:], 0)]), 50)
    assert torch.equal(pool[0], x)


def test_pool_of_mappings_and_of_tuples() -> None:
    x = cases.words(6)
    halves = [{k: v[i : i + 3] for k, v in x.items()} for i in (0, 3)]
    (pool,) = gather_pool(sources_of(halves), 5)
    assert all(torch.equal(pool[k], v[:5]) for k, v in x.items())
    columns = tuple(x.values())
    (pool,) = gather_pool(sources_of([(columns, torch.zeros(6))]), 5)
    assert all(torch.equal(a, b[:5]) for a, b in zip(pool, columns, strict=True))


def test_batches_of_several_lengths_are_refused() -> None:
    with pytest.raises(InputError, match=r"do not join .*pad all to one length"):
        gather_pool(sources_of([(torch.zeros(2, 3), 0), (torch.zeros(2, 4), 0)]), 4)


def test_batches_of_the_pool() -> None:
    x = torch.arange(10.0)[:, None]
    pool = DirectedTargets([x, -x], [x[:, :, None], -x[:, :, None]])
    steps = [pool.batch([3, 4], seed=5, step=s) for s in range(6)]
    for inputs, targets in steps:
        assert [len(part) for part in inputs] == [3, 4]
        for part, t in zip(inputs, targets, strict=True):  # each input comes with its own target
            assert torch.equal(part, t[:, :, 0])
    epoch = torch.cat([steps[s][0][0] for s in range(3)]).flatten()
    assert len(epoch.unique()) == 9
    assert not torch.equal(epoch, torch.cat([steps[s][0][0] for s in range(3, 6)]).flatten())
    assert torch.equal(pool.batch([3, 4], seed=5, step=4)[0][1], steps[4][0][1])
    assert len(pool.batch([30, 4], seed=5, step=0)[0][0]) == 10


# -- in a fit --


def loader() -> list[tuple[Tensor, Tensor]]:
    x, y = cases.normal(64, 2, dtype=torch.float64), torch.arange(64) % 3
    return list(zip(x.split(16), y.split(16), strict=True))


def fitted(surrogate: str = "mirror", **options: Any) -> ScaLLA:
    la = ScaLLA(network(16), num_features=20, seed=3, surrogate=surrogate)
    return la.fit(loader(), **{"num_steps": 150, "lr": 3e-3, "targets": "directed", **options})


def test_closer_to_the_kernel_than_probes_in_the_same_steps() -> None:
    held_out = cases.normal(50, 2, seed=11, dtype=torch.float64)
    directed, probes = fitted().kernel_error(held_out), fitted(targets="probes").kernel_error(held_out)
    assert directed.error < 0.6 * probes.error


def test_trunk_trains_on_the_pools_penultimate_features(monkeypatch: pytest.MonkeyPatch) -> None:
    # What it gives without the pool's features kept: the same to rounding.
    kept = fitted("trunk", num_steps=20)
    monkeypatch.setattr("scalla.fitting.Trunk", nn.Identity)
    computed = fitted("trunk", num_steps=20)
    x = cases.normal(5, 2, seed=11, dtype=torch.float64)
    torch.testing.assert_close(kept.features(x), computed.features(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bias", [False, True])
def test_stopped_and_resumed_is_bit_identical(bias: bool, tmp_path: Path) -> None:
    options = {"num_steps": 30, "context": two_sources(32)[1], "bias": bias, "pool_size": 40}
    whole = fitted(**options)

    class Stopped(Exception):
        pass

    def stop(entry: Any) -> None:
        if entry.step == 17:
            raise Stopped

    with pytest.raises(Stopped):
        fitted(**options, checkpoint_dir=tmp_path, checkpoint_every=0.0, callback=stop)
    again = fitted(**options, checkpoint_dir=tmp_path, resume=True)
    x = cases.normal(5, 2, seed=11, dtype=torch.float64)
    assert torch.equal(again.features(x), whole.features(x))
    assert torch.equal(again.posterior_precision, whole.posterior_precision)


def test_mappings_and_float32() -> None:
    case = cases.CASES["dict_keywords"]
    la = ScaLLA(case.model(), num_features=6).fit(case.loader(), num_steps=5, targets="directed", pool_size=12)
    assert la.features(cases.words(3)).shape == (3, 3, 6)


def test_options_are_checked() -> None:
    with pytest.raises(InputError, match=r"got targets='nystrom'; choose 'probes' or 'directed'"):
        fitted(targets="nystrom")
    with pytest.raises(InputError, match="got pool_size=0; wanted a whole number of at least 1"):
        fitted(pool_size=0)
