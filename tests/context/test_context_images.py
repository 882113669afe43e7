"""Generators of images: shape, dtype, range, seed, and what each one promises."""

import numpy as np
import pytest
import torch
from torch import nn

from scalla import context
from scalla.context.augment import OPERATIONS, choose_at_least_two
from scalla.context.fields import blob_masks, noise_fields
from scalla.context.mixing import half_planes, rectangles
from scalla.context.patches import permute_patches
from scalla.context.strokes import curves, strokes
from scalla.context.textures import blobs, gratings
from scalla.types import InputError

GENERATORS = [
    context.PatchShuffle,
    context.StrongAugment,
    context.ImageMix,
    context.PhaseScramble,
    context.Textures,
    context.Strokes,
    context.Extrapolation,
]


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def images(num=30, shape=(1, 12, 10), *, dtype=torch.float32, low=0.0, high=1.0):
    x = low + (high - low) * torch.rand(num, *shape, generator=rng(), dtype=torch.float64)
    x[:, :, 0, :] = low  # a background
    return x.to(dtype)


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 12, 10), torch.float32),
        ((3, 9, 13), torch.float64),
        ((1, 28, 28), torch.float16),
        ((2, 7, 7), torch.bfloat16),
    ],
)
def test_shape_dtype_and_range_are_those_of_the_training_images(generator, shape, dtype):
    x = images(shape=shape, dtype=dtype, low=-2.0, high=1.5)
    made = generator(x).generate(25)
    assert made.shape == (25, *shape)
    assert made.dtype == dtype
    assert bool(torch.isfinite(made).all())
    low, high = x.amin((0, 2, 3))[:, None, None], x.amax((0, 2, 3))[:, None, None]
    assert bool((made >= low).all())
    assert bool((made <= high).all())
    # They are not one image, nor flat.
    assert float(made.double().std(0).amax()) > 0.1
    assert not generator(x).generate(5).requires_grad


@pytest.mark.parametrize("generator", GENERATORS)
def test_the_seed_decides(generator):
    x = images()
    global_state = torch.get_rng_state()
    first = generator(x, seed=3)
    made = first.generate(40)
    assert torch.equal(torch.get_rng_state(), global_state)
    torch.manual_seed(99)
    assert torch.equal(generator(x, seed=3).generate(40), made)
    assert torch.equal(generator(x).generate(40, seed=3), made)
    assert torch.equal(first.generate(40), made)
    assert not torch.equal(generator(x, seed=4).generate(40), made)
    assert torch.equal(x, images())


@pytest.mark.parametrize("generator", GENERATORS)
def test_one_image_and_one_pixel_channels_do(generator):
    assert generator(images(1)).generate(3).shape == (3, 1, 12, 10)
    flat = torch.full((4, 1, 6, 6), 0.5)
    assert torch.equal(generator(flat).generate(3), flat[:3])  # a range of one value


def test_patch_shuffle_keeps_the_pixels_of_one_training_image():
    x = torch.arange(6 * 3 * 13 * 11, dtype=torch.float64).view(6, 3, 13, 11)  # no value twice
    made = context.PatchShuffle(x, sizes=(2, 3, 5)).generate(60)
    source = (made[:, 0, 0, 0] / x[0].numel()).floor().long()
    assert set(source.tolist()) == set(range(6))
    torch.testing.assert_close(made.flatten(2).sort(2).values, x[source].flatten(2))
    assert bool((made != x[source]).flatten(1).any(1).all())
    # Channels move together.
    torch.testing.assert_close(made[:, 1] - made[:, 0], torch.full_like(made[:, 0], 13 * 11))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_patches_move_as_wholes_and_never_stay_all(size):
    x = torch.arange(2 * 8 * 11, dtype=torch.float64).view(1, 2, 8, 11).repeat(50, 1, 1, 1)
    made = permute_patches(x, size, rng())
    rows, columns = 8 // size, 11 // size
    patches = {
        tuple(x[0, :, r * size : (r + 1) * size, c * size : (c + 1) * size].flatten().tolist())
        for r in range(rows)
        for c in range(columns)
    }
    for image in made:
        found = {
            tuple(image[:, r * size : (r + 1) * size, c * size : (c + 1) * size].flatten().tolist())
            for r in range(rows)
            for c in range(columns)
        }
        assert found == patches
    if rows * columns > 1:
        assert bool((made != x).flatten(1).any(1).all())
    assert torch.equal(made[:, :, rows * size :], x[:, :, rows * size :])
    assert torch.equal(made[..., columns * size :], x[..., columns * size :])


def test_patch_sizes_follow_the_image_and_wrong_ones_are_refused():
    assert context.PatchShuffle(images(shape=(1, 28, 28))).sizes == (4, 7, 14)
    assert context.PatchShuffle(images(shape=(1, 3, 2))).sizes == (1,)
    for sizes in ((), (0,), (6,)):
        with pytest.raises(InputError, match=r"wanted patches of 1 to 5 pixels"):
            context.PatchShuffle(images(), sizes=sizes)
    with pytest.raises(InputError, match="wanted at least 2×2"):
        context.PatchShuffle(torch.rand(3, 1, 1, 8))


@pytest.mark.parametrize("shape", [(1, 12, 10), (3, 9, 13)])
def test_phase_scramble_keeps_the_amplitude_spectrum(shape):
    x = images(1, shape, dtype=torch.float64)
    scrambled = context.PhaseScramble(x)._draw_values(20, rng()).numpy()  # before clamping
    amplitude = np.abs(np.fft.fft2(x[0].numpy()))
    np.testing.assert_allclose(np.abs(np.fft.fft2(scrambled)), np.broadcast_to(amplitude, scrambled.shape), atol=1e-10)
    np.testing.assert_allclose(scrambled.mean((2, 3)), np.broadcast_to(x[0].numpy().mean((1, 2)), (20, shape[0])))
    # In float32 to 1e-4 of the largest amplitude, as in float64 to 1e-10; the image itself is another.
    single = context.PhaseScramble(x.float())._draw_values(20, rng()).numpy()
    assert float(np.abs(np.abs(np.fft.fft2(single)) - amplitude).max()) < 1e-4 * float(amplitude.max())
    assert float(np.abs(scrambled - x.numpy()).mean((1, 2, 3)).min()) > 0.1
    # The channels keep their relative phases: the cross-spectra stay.
    if shape[0] > 1:
        spectra, original = np.fft.fft2(scrambled), np.fft.fft2(x[0].numpy())
        cross = original[0] * original[1].conj()
        np.testing.assert_allclose(spectra[:, 0] * spectra[:, 1].conj(), np.broadcast_to(cross, (20, 9, 13)), atol=1e-9)


def test_image_mix_is_made_of_two_images():
    x = torch.stack([torch.full((1, 8, 8), v, dtype=torch.float64) for v in (0.0, 1.0)])
    made = context.ImageMix(x).generate(400)
    flat = made.flatten(1)
    constant = (flat == flat[:, :1]).all(1)
    mixed_up = constant & (flat[:, 0] > 0) & (flat[:, 0] < 1)
    overlaid = constant & ~mixed_up
    pieced = ~constant
    assert bool(((flat == 0) | (flat == 1))[pieced].all())
    assert bool(((flat[mixed_up] >= 0.3) & (flat[mixed_up] <= 0.7)).all())
    assert 0.15 < float(mixed_up.double().mean()) < 0.35
    assert 0.15 < float(overlaid.double().mean()) < 0.35
    assert 0.4 < float(pieced.double().mean()) < 0.6


def test_masks_cut_where_they_say():
    planes = half_planes(200, 15, 20, rng())[:, 0].double()
    assert bool(((planes == 0) | (planes == 1)).all())
    assert 0.2 < float(planes.mean((1, 2)).min()) < 0.35
    assert 0.65 < float(planes.mean((1, 2)).max()) < 0.8
    inside = rectangles(200, 20, 40, rng(), sides=(0.4, 0.7))[:, 0]
    heights, widths = inside.any(2).sum(1), inside.any(1).sum(1)
    assert torch.equal(heights * widths, inside.sum((1, 2)))  # rectangles indeed
    assert 7 <= int(heights.min()) <= int(heights.max()) <= 15
    assert 15 <= int(widths.min()) <= int(widths.max()) <= 29


def test_strong_augment_applies_at_least_two_operations():
    chosen = choose_at_least_two(4000, len(OPERATIONS), rng())
    assert int(chosen.sum(1).min()) == 2
    # P = 2/5 + 3/5 · 1/2 for each
    torch.testing.assert_close(chosen.double().mean(0), torch.full((5,), 0.7, dtype=torch.float64), atol=0.03, rtol=0)


def test_strong_augment_without_operations_is_the_image():
    augment = context.StrongAugment(images(dtype=torch.float64))
    none = torch.zeros(6, dtype=torch.bool)
    x = augment._some(6, rng())
    grid = augment._grid(6, none, none, none, rng()).double()
    same = nn.functional.grid_sample(x, grid, padding_mode="border", align_corners=False)
    torch.testing.assert_close(same, x, atol=1e-5, rtol=0)
    all_of_them = ~none
    turned = augment._grid(6, all_of_them, none, none, rng())
    radius = turned.square().sum(-1)
    torch.testing.assert_close(radius, grid.float().square().sum(-1), atol=1e-5, rtol=0)  # a rotation
    inverted = augment._inverted(x, rng())
    low, high = augment._range
    there = inverted != x
    torch.testing.assert_close(inverted[there], (low + high - x)[there])
    assert bool(there.flatten(1).any(1).all())


def test_noise_fields_have_the_spectrum_they_say():
    exponents = torch.tensor([0.5, 1.5, 2.5]).repeat_interleave(300)
    fields = noise_fields(exponents, 32, 32, rng()).double()
    np.testing.assert_allclose(fields.mean((1, 2)), 0, atol=1e-6)
    np.testing.assert_allclose(fields.square().mean((1, 2)), 1, rtol=1e-5)
    power = np.abs(np.fft.fft2(fields.numpy()))[:, 0] ** 2
    frequency = np.arange(2, 12)
    for i, exponent in enumerate((0.5, 1.5, 2.5)):
        mean_power = power[300 * i : 300 * (i + 1)][:, frequency].mean(0)
        slope = np.polyfit(np.log(frequency), np.log(mean_power), 1)[0]
        assert slope == pytest.approx(-2 * exponent, abs=0.2)


def test_patterns_lie_between_zero_and_one():
    for shade in (gratings(60, 20, 24, rng()), blobs(60, 20, 24, rng()), strokes(60, 20, 24, rng())):
        assert shade.shape == (60, 20, 24)
        assert float(shade.min()) >= 0
        assert float(shade.max()) <= 1
    masks = blob_masks(60, 20, 24, rng())
    covered = masks.mean((1, 2))
    assert 0.25 < float(covered.min()) < float(covered.max()) < 0.75
    assert float(((masks == 0) | (masks == 1)).double().mean()) > 0.6


def test_strokes_are_lines_on_the_paper_of_the_training_images():
    x = images(40, (1, 28, 28))
    x[:, :, [0, 0, -1, -1], [0, -1, 0, -1]] = 0.25
    made = context.Strokes(x).generate(300)
    on_paper = (made == 0.25).flatten(1).double().mean(1)
    assert float(on_paper.mean()) > 0.5
    assert float(on_paper.max()) < 1.0  # something is drawn on every one
    assert float(made.flatten(1).amax(1).min()) >= 0.25 + 0.49 * (x.max() - 0.25)
    points, lengths = curves(200, rng())
    steps = points.diff(dim=2).norm(dim=-1)
    torch.testing.assert_close(steps, (lengths / 48)[..., None].expand_as(steps), rtol=1e-3, atol=1e-5)


def test_a_straight_stroke_has_the_shade_of_its_distance():
    """Σ_i w_i exp(−‖p − c_i‖²/2σ²) over equally spaced points is exp(−d²/2σ²), to 1e-3, far from the ends."""
    spread, length, count = 0.02, 1.4, 48
    along = np.arange(count) * length / count
    for d in (0.0, 0.01, 0.03):
        total = np.exp(-0.5 * ((along - 0.7123) ** 2 + d**2) / spread**2).sum()
        weight = length / (count * np.sqrt(2 * np.pi) * spread)
        assert weight * total == pytest.approx(np.exp(-0.5 * d**2 / spread**2), rel=0.03)


def test_other_kinds_are_refused():
    for generator in GENERATORS[:-1]:
        with pytest.raises(InputError, match=rf"{generator.__name__} got rows of real numbers.*wanted images"):
            generator(torch.rand(5, 4))
        with pytest.raises(InputError, match="got token ids"):
            generator(torch.randint(9, (5, 4)))
    with pytest.raises(InputError, match=r"scale them as your network takes them, images.float\(\) / 255"):
        context.Textures(torch.zeros(5, 1, 8, 8, dtype=torch.uint8))
