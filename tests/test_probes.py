"""Random directions: their moments, the variance of one probe's estimate, and what alone decides a draw."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cases import normal
from scalla.probes import PROBES, Probe, draw_probe, mix_seed
from scalla.types import InputError

DRAWS = 20_000
LIKE = {"weight": torch.zeros(2, 3, dtype=torch.float64), "bias": torch.zeros(3, dtype=torch.float64)}


def flat(probe: dict[str, Tensor]) -> Tensor:
    return torch.cat([v.flatten() for v in probe.values()])


def many(kind: Probe, count: int = DRAWS) -> Tensor:
    """(count, P) draws, one for each step."""
    return torch.stack([flat(draw_probe(LIKE, kind=kind, seed=3, step=step)) for step in range(count)])


@pytest.fixture(scope="module")
def draws() -> dict[str, Tensor]:
    return {kind: many(kind) for kind in PROBES}


@pytest.mark.parametrize("kind", PROBES)
def test_zero_mean_and_unit_covariance_over_the_steps(kind: Probe, draws: dict[str, Tensor]) -> None:
    v = draws[kind]
    error = 5 / DRAWS**0.5
    torch.testing.assert_close(v.mean(0), torch.zeros(9, dtype=torch.float64), rtol=0, atol=error)
    # Var(v_i²) = 2 of a Gaussian: its diagonal is less certain by √2.
    torch.testing.assert_close(v.mT @ v / DRAWS, torch.eye(9, dtype=torch.float64), rtol=0, atol=error * 2**0.5)


@pytest.mark.parametrize("kind", PROBES)
def test_entries_of_one_long_probe_are_uncorrelated(kind: Probe) -> None:
    v = flat(draw_probe({"weight": torch.zeros(300_000)}, kind=kind, seed=0, step=0)).double()
    assert abs(float(v.mean())) < 5 / 300_000**0.5
    assert abs(float(v.square().mean()) - 1) < 5 * (2 / 300_000) ** 0.5
    for lag in (1, 2, 7, 8, 56, 64):  # bits of a byte, bytes of a word
        assert abs(float((v[lag:] * v[:-lag]).mean())) < 5 / 300_000**0.5


def test_rademacher_entries_are_signs(draws: dict[str, Tensor]) -> None:
    assert torch.equal(draws["rademacher"].abs(), torch.ones(DRAWS, 9, dtype=torch.float64))


@pytest.mark.parametrize("kind", PROBES)
def test_variance_of_one_probes_estimate_is_the_closed_form(kind: Probe, draws: dict[str, Tensor]) -> None:
    """Σ_ij Var[(Jv)_i (Jv)_j] = (tr M)² + ‖M‖² for M = JJᵀ, less 2‖diag(JᵀJ)‖² for signs."""
    jacobian = normal(6, 9, dtype=torch.float64) * torch.linspace(0.2, 3, 9, dtype=torch.float64)
    m = jacobian @ jacobian.mT
    expected = m.trace() ** 2 + m.square().sum()
    if kind == "rademacher":
        expected = expected - 2 * (jacobian.mT @ jacobian).diagonal().square().sum()
    z = draws[kind] @ jacobian.mT
    estimates = z[:, :, None] * z[:, None, :]
    torch.testing.assert_close(estimates.mean(0), m, rtol=0, atol=5 * float(expected / DRAWS) ** 0.5)
    # The spread of a squared Gaussian has heavy tails: 5 % at 20,000 draws is about three standard errors.
    torch.testing.assert_close(estimates.var(0).sum(), expected, rtol=0.05, atol=0)


@pytest.mark.parametrize("kind", PROBES)
def test_seed_step_and_index_alone_decide_the_draw(kind: Probe) -> None:
    first = flat(draw_probe(LIKE, kind=kind, seed=1, step=5, index=2))
    torch.rand(7)  # whatever else is drawn
    for other in ((1, 4, 2), (2, 5, 2), (1, 5, 0), (5, 1, 2)):
        seed, step, index = other
        assert not torch.equal(first, flat(draw_probe(LIKE, kind=kind, seed=seed, step=step, index=index)))
    assert torch.equal(first, flat(draw_probe(LIKE, kind=kind, seed=1, step=5, index=2)))


@pytest.mark.parametrize("kind", PROBES)
def test_drawing_leaves_the_global_random_state_alone(kind: Probe) -> None:
    before = torch.get_rng_state()
    draw_probe(LIKE, kind=kind, seed=1, step=5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", PROBES)
def test_the_dtype_of_the_weights_and_the_default_dtype_do_not_change_the_draw(kind: Probe) -> None:
    wanted = flat(draw_probe(LIKE, kind=kind, seed=1, step=5))
    single = draw_probe({k: v.float() for k, v in LIKE.items()}, kind=kind, seed=1, step=5)
    assert {v.dtype for v in single.values()} == {torch.float32}
    assert torch.equal(flat(single).double(), wanted)
    torch.set_default_dtype(torch.float64)
    try:
        again = flat(draw_probe(LIKE, kind=kind, seed=1, step=5))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(again, wanted)


@pytest.mark.parametrize("kind", PROBES)
def test_a_default_device_does_not_change_the_draw(kind: Probe) -> None:
    wanted = flat(draw_probe(LIKE, kind=kind, seed=1, step=5))
    with torch.device("meta"):  # stands for a GPU: nothing may be drawn there
        found = draw_probe(LIKE, kind=kind, seed=1, step=5)
    assert torch.equal(flat(found), wanted)


def test_shapes_follow_the_weights_also_of_none_and_one_entry() -> None:
    like = {"none": torch.zeros(0, 3), "scalar": torch.zeros(()), "one": torch.zeros(1), "odd": torch.zeros(57)}
    for kind in PROBES:
        assert {k: v.shape for k, v in draw_probe(like, kind=kind, seed=0, step=0).items()} == {
            k: v.shape for k, v in like.items()
        }


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InputError, match="got probe='sobol'; choose one of rademacher, gaussian"):
        draw_probe(LIKE, kind="sobol", seed=0, step=0)  # type: ignore[arg-type]


def test_mixed_seeds_depend_on_order_and_do_not_collide() -> None:
    seeds = {mix_seed(a, b, c) for a in range(20) for b in range(20) for c in range(20)}
    assert len(seeds) == 8000
    assert all(0 <= s < 2**63 for s in seeds)
    assert mix_seed(1, 2) != mix_seed(2, 1)
    assert mix_seed(-1) != mix_seed(1)  # negative seeds are seeds, too
    # Neighbouring seeds differ in about half of their bits.
    flipped = [bin(mix_seed(0, step) ^ mix_seed(0, step + 1)).count("1") for step in range(200)]
    assert 26 < sum(flipped) / 200 < 37
