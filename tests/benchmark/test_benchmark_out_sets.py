import numpy as np
import pytest
import torch
from torch import Tensor

from scalla.benchmark import out_sets
from scalla.benchmark.out_sets import RULES, SIDE, automata, enlarged_digits, glyphs, more_out_sets


@pytest.fixture(scope="module")
def sets() -> dict[str, Tensor]:
    return more_out_sets(40)


def test_images_of_the_right_kind(sets: dict[str, Tensor]) -> None:
    assert list(sets) == ["digits", "photos", "glyphs", "automata", "noise"]
    for name, x in sets.items():
        assert x.shape == (40, 1, SIDE, SIDE), name
        assert x.dtype == torch.float32
        assert 0 <= float(x.min()) < float(x.max()) <= 1
        assert len({image.numpy().tobytes() for image in x}) > 30, name  # they are not all one image


def test_the_same_every_time_and_other_with_another_seed(sets: dict[str, Tensor]) -> None:
    again, other = more_out_sets(40), more_out_sets(40, seed=1)
    for name, x in sets.items():
        assert torch.equal(x, again[name]), name
        if name != "digits":  # a fixed choice of a fixed set
            assert not torch.equal(x, other[name]), name


def test_each_row_of_an_automaton_follows_from_the_one_above() -> None:
    """An elementary rule by its definition: bit 4l + 2c + r of its number."""
    for image in automata(30, torch.Generator().manual_seed(1)).int()[:, 0].tolist():
        fitting = []
        for rule in RULES:
            table = [rule >> k & 1 for k in range(8)]
            steps = [
                [table[4 * row[i - 1] + 2 * row[i] + row[(i + 1) % SIDE]] for i in range(SIDE)] for row in image[:-1]
            ]
            fitting.append(steps == image[1:])
        assert any(fitting)


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    at = np.clip((np.arange(SIDE) + 0.5) * 8 / SIDE - 0.5, 0, 7)  # centres of the pixels, in pixels of the digit
    bilinear = np.maximum(0, 1 - np.abs(at[:, None] - np.arange(8)))
    known = np.einsum("ia,nab,jb->nij", bilinear, load_digits().images / 16, bilinear)
    for image in enlarged_digits(50)[:, 0].numpy():
        assert np.abs(known - image).max((1, 2)).min() < 1e-6


def test_glyphs_are_drawn_in_the_middle_on_black() -> None:
    x = glyphs(30, torch.Generator().manual_seed(0))[:, 0]
    assert bool((x.amax((1, 2)) > 0.5).all())  # none is empty
    border = torch.cat([x[:, 0], x[:, -1], x[:, :, 0], x[:, :, -1]], 1)
    assert float(border.mean()) < 0.1
    mass = x / x.sum((1, 2), keepdim=True)
    across = torch.arange(SIDE).float()
    centre = torch.stack([(mass.sum(1) * across).sum(1), (mass.sum(2) * across).sum(1)])
    assert bool(((centre - 13.5).abs() < 5).all())


def test_noise_is_uniform_and_independent(sets: dict[str, Tensor]) -> None:
    x = sets["noise"].flatten()
    assert float(x.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(x.var()) == pytest.approx(1 / 12, abs=0.002)
    neighbours = torch.corrcoef(torch.stack([x[:-1], x[1:]]))[0, 1]
    assert abs(float(neighbours)) < 0.02


def test_fonts_come_inside_matplotlib() -> None:
    from matplotlib import font_manager

    folder = font_manager.findfont("DejaVu Sans").rpartition("/")[0]
    for font in out_sets.FONTS:
        name = font.partition(":")[0]
        assert font_manager.findfont(name, fallback_to_default=False).startswith(folder), name
