"""Rows of real numbers, and extrapolation in the inputs and in the features."""

import pytest
import torch
from torch import nn

from scalla import context
from scalla.types import InputError

GENERATORS = [context.ColumnShuffle, context.WideGaussian, context.Extrapolation]


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def rows(num=50, shape=(4,), *, dtype=torch.float32):
    return torch.randn(num, *shape, generator=rng(1), dtype=torch.float64).to(dtype)


def classifier(inputs=4, *, dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize(
    ("shape", "dtype"), [((4,), torch.float32), ((1,), torch.float64), ((5, 3), torch.float32), ((4,), torch.float16)]
)
def test_shape_dtype_and_seed(generator, shape, dtype):
    x = rows(shape=shape, dtype=dtype)
    made = generator(x, seed=2).generate(40)
    assert made.shape == (40, *shape)
    assert made.dtype == dtype
    assert bool(torch.isfinite(made).all())
    assert torch.equal(generator(x, seed=2).generate(40), made)
    assert torch.equal(generator(x).generate(40, seed=2), made)
    assert not torch.equal(generator(x, seed=3).generate(40), made)


def test_column_shuffle_keeps_columns_and_breaks_their_dependence():
    column = torch.randn(2000, 1, generator=rng(), dtype=torch.float64)
    x = torch.cat([column, -column], 1)
    made = context.ColumnShuffle(x).generate(2000)
    for i in range(2):
        assert bool(torch.isin(made[:, i], x[:, i]).all())
    assert float(torch.corrcoef(x.T)[0, 1]) == pytest.approx(-1)
    assert abs(float(torch.corrcoef(made.T)[0, 1])) < 0.1
    torch.testing.assert_close(made.std(0), x.std(0), rtol=0.06, atol=0)


def test_wide_gaussian_has_the_moments_it_says():
    x = torch.rand(500, 3, generator=rng(), dtype=torch.float64) * torch.tensor([1.0, 10.0, 0.0]) + 5
    made = context.WideGaussian(x, widths=(3, 3)).generate(20_000)
    torch.testing.assert_close(made.mean(0), x.mean(0), atol=0.3, rtol=0)
    torch.testing.assert_close(made.std(0)[:2], 3 * x.std(0)[:2], rtol=0.03, atol=0)
    assert torch.equal(made[:, 2], torch.full((20_000,), 5.0, dtype=torch.float64))  # a constant column stays
    with pytest.raises(InputError, match="0 < least ≤ most"):
        context.WideGaussian(x, widths=(0, 1))


def test_extrapolation_lies_beyond_the_segment():
    x = torch.tensor([[0.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    made = context.Extrapolation(x).generate(200)
    made = made[~((made == x[0]) | (made == x[1])).all(1)]  # of an input and itself
    assert len(made) > 160
    torch.testing.assert_close(made[:, 1], 2 * made[:, 0])  # on the line
    outside = (made[:, 0] >= 1.5) & (made[:, 0] <= 3.0) | (made[:, 0] <= -0.5) & (made[:, 0] >= -2.0)
    assert bool(outside.all())
    assert bool((made[:, 0] > 0).any())
    assert bool((made[:, 0] < 0).any())
    with pytest.raises(InputError, match="1 < least ≤ most"):
        context.Extrapolation(x, reach=(0.5, 2))


def test_the_other_end_is_the_most_distant_of_a_few():
    x = torch.cat([torch.zeros(50, 2), torch.ones(50, 2)])  # two classes
    extrapolation = context.Extrapolation(x)
    generator = rng()
    a = extrapolation._some(2000, generator)
    b = extrapolation._others(a, generator)
    assert float((a != b).any(1).double().mean()) == pytest.approx(1 - 2**-4, abs=0.03)


@pytest.mark.parametrize("shape", [(4,), (1, 2, 2)])
def test_feature_extrapolation_moves_the_features_towards_their_goal(shape):
    x, model = rows(200, shape), classifier()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    made = context.FeatureExtrapolation(x, model, num_steps=10)
    values = made.generate(100)
    assert values.shape == (100, *shape)
    assert not values.requires_grad
    assert torch.equal(values, context.FeatureExtrapolation(x, model, num_steps=10).generate(100))
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    hidden = model[:3].requires_grad_(False)

    def nearest(inputs):
        return torch.cdist(hidden(inputs), hidden(x)).amin(1).mean()

    # New inputs of the same distribution are nearer to the training data, in features, than those made.
    new = torch.randn(100, *shape, generator=rng(9))
    if len(shape) == 1:
        assert float(nearest(values)) > 1.3 * float(nearest(new))
    else:
        low, high = x.amin((0, 2, 3))[:, None, None], x.amax((0, 2, 3))[:, None, None]
        assert bool(((values >= low) & (values <= high)).all())
    with torch.no_grad():
        torch.testing.assert_close(made._features(x[:5]), hidden(x[:5]))


def test_a_step_of_feature_extrapolation_is_a_descent_of_the_stated_length():
    x, model = rows(64, dtype=torch.float64), classifier(dtype=torch.float64)
    step = 1e-3
    before = context.FeatureExtrapolation(x, model, num_steps=1, step=1e-12).generate(32)
    after = context.FeatureExtrapolation(x, model, num_steps=1, step=step).generate(32)
    spans = x.amax(0) - x.amin(0)
    torch.testing.assert_close(((after - before) / spans).square().mean(1).sqrt(), torch.full((32,), step).double())


def test_feature_extrapolation_of_a_mapping_and_of_other_networks():
    class Pixels(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = classifier(16)

        def forward(self, pixel_values):
            return self.head(pixel_values)

    x = torch.rand(20, 1, 4, 4, generator=rng())
    made = context.FeatureExtrapolation({"pixel_values": x}, Pixels()).generate(3)
    assert list(made) == ["pixel_values"]
    assert made["pixel_values"].shape == (3, 1, 4, 4)
    with pytest.raises(InputError, match="got a mapping with pixel_mask beside 'pixel_values'"):
        context.FeatureExtrapolation({"pixel_values": x, "pixel_mask": x}, Pixels()).generate(3)
    with pytest.raises(InputError, match="got a network of type int"):
        context.FeatureExtrapolation(x, 3)
    with pytest.raises(InputError, match="wanted both to be positive"):
        context.FeatureExtrapolation(x, classifier(16), num_steps=0)
    with pytest.raises(InputError, match="wanted a network x"):
        context.FeatureExtrapolation(x, nn.Identity()).generate(2)
    double = context.FeatureExtrapolation(x.double(), classifier(16)).generate(3)  # a narrower network
    assert double.dtype == torch.float64


def test_other_kinds_are_refused():
    for generator in GENERATORS[:2]:
        with pytest.raises(InputError, match=r"got images.*wanted rows of real numbers"):
            generator(torch.rand(5, 1, 4, 4))
    with pytest.raises(InputError, match=r"got token ids.*wanted images.*or rows"):
        context.Extrapolation(torch.randint(9, (5, 4)))
