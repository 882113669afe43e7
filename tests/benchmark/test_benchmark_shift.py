import pytest
import torch
from tiny_images import tiny_images

from scalla.benchmark.shift import NOISE_STDS, ROTATIONS, SHIFTS, noisy, rotated


@pytest.fixture
def images() -> torch.Tensor:
    return tiny_images().test[0]


@pytest.mark.parametrize(("degrees", "quarters"), [(0.0, 0), (90.0, 1), (180.0, 2), (360.0, 0)])
def test_quarter_turns_are_exact(images: torch.Tensor, degrees: float, quarters: int) -> None:
    torch.testing.assert_close(rotated(images, degrees), torch.rot90(images, quarters, (2, 3)), atol=1e-5, rtol=0)


def test_a_small_turn_moves_a_point_as_it_should() -> None:
    x = torch.zeros(1, 1, 29, 29)
    x[0, 0, 14, 24] = 1  # 10 to the right of the middle
    turned = rotated(x, 30.0)[0, 0]
    at = (turned * torch.arange(29.0)).sum() / turned.sum(), (turned.mT * torch.arange(29.0)).sum() / turned.sum()
    assert float(at[0]) == pytest.approx(14 + 10 * 3**0.5 / 2, abs=0.3)
    assert float(at[1]) == pytest.approx(14 - 5, abs=0.3)  # anticlockwise, as torch.rot90 turns


def test_corners_are_black_after_a_turn() -> None:
    turned = rotated(torch.ones(1, 1, 28, 28), 45.0)
    assert float(turned[0, 0, 0, 0]) == 0
    assert float(turned[0, 0, 14, 14]) == pytest.approx(1)


def test_noise_has_its_standard_deviation_and_stays_in_range() -> None:
    grey = torch.full((50, 1, 28, 28), 0.5)
    for std in (0.05, 0.1):
        assert float((noisy(grey, std) - grey).std()) == pytest.approx(std, rel=0.02)
    strong = noisy(grey, 0.5)
    assert 0 == float(strong.min()) < float(strong.max()) == 1
    assert torch.equal(noisy(grey, 0.1), noisy(grey, 0.1))


@pytest.mark.parametrize("kind", list(SHIFTS))
def test_severity_grows(images: torch.Tensor, kind: str) -> None:
    severities, shift = SHIFTS[kind]
    moved = [float((shift(images, s) - images).square().mean()) for s in severities]
    assert list(severities) == sorted(severities)
    assert moved[0] > 0
    if kind == "noise":
        assert moved == sorted(moved)
    assert all(float(shift(images, s).min()) >= 0 and float(shift(images, s).max()) <= 1 for s in severities)


def test_severities_are_those_of_the_page() -> None:
    assert ROTATIONS == (15.0, 30.0, 45.0, 60.0, 90.0)
    assert NOISE_STDS == (0.05, 0.1, 0.2, 0.3, 0.5)
