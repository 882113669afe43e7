"""Training inputs of every form, contexts as Datasets, mixtures, the default, and fits with all of them."""

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from cases import CASES, Mappings, Stream, loader, mlp, words
from scalla import ScaLLA, context
from scalla.batches import EndlessBatches
from scalla.context import inputs as inputs_module
from scalla.context.base import CHUNK_VALUES
from scalla.types import InputError


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def images(num=30):
    return torch.rand(num, 1, 6, 6, generator=rng())


# -- training inputs --


def test_every_form_of_the_same_inputs_gives_the_same_context():
    x, y = images(), torch.arange(30)
    expected = context.Strokes(x).generate(9)
    for given in (
        TensorDataset(x, y),
        loader(x, y, 7),
        [(x[:10], y[:10]), (x[10:], y[10:])],
        ConcatDataset([TensorDataset(x[:5], y[:5]), TensorDataset(x[5:], y[5:])]),
        DataLoader(Stream(x, y), batch_size=4),
        Stream(x, y),
    ):
        source = context.read_inputs(given)
        assert source.kind == "images"
        assert torch.equal(source.values, x)
        assert torch.equal(context.Strokes(given).generate(9), expected)
    columns = words(16)
    read = context.read_inputs(Mappings())
    assert read.kind == "tokens"
    assert torch.equal(read.values, columns["input_ids"])
    assert read.columns is not None
    assert list(read.columns) == ["input_ids", "attention_mask"]  # no labels
    assert context.read_inputs(read) is read


def test_reading_leaves_the_global_random_state_alone():
    x = images()
    before = torch.get_rng_state()
    first = context.read_inputs(loader(x, torch.zeros(30), shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.values.flatten(1).sum(1).sort().values, x.flatten(1).sum(1).sort().values)


def test_large_sources_are_sampled(monkeypatch):
    monkeypatch.setattr(inputs_module, "MAX_KEPT", 20)
    x, y = torch.arange(100.0)[:, None], torch.zeros(100)
    assert len(context.read_inputs(x)) == 100  # a tensor is in memory already
    for given in (ConcatDataset([TensorDataset(x, y)]), loader(x, y, 8), DataLoader(Stream(x, y), batch_size=8)):
        kept = context.read_inputs(given).values[:, 0]
        assert len(kept.unique()) == 20
        assert bool((kept.diff() > 0).all())
        assert 25 < float(kept.mean()) < 75
        assert torch.equal(kept, context.read_inputs(given).values[:, 0])


def test_lengths_of_batches_are_padded_by_the_attention_mask():
    short = {"input_ids": torch.full((2, 3), 7), "attention_mask": torch.ones(2, 3, dtype=torch.long)}
    long = {"input_ids": torch.full((1, 5), 8), "attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}
    long["input_ids"][0, -1] = 4  # the padding's id
    read = context.read_inputs([short, long])
    assert read.values.tolist() == [[7, 7, 7, 4, 4], [7, 7, 7, 4, 4], [8, 8, 8, 8, 4]]
    assert read.columns["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]
    with pytest.raises(InputError, match=r"of lengths \[3, 5\] without an attention_mask"):
        context.read_inputs([{"input_ids": short["input_ids"]}, {"input_ids": long["input_ids"]}])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "got training inputs of type int"),
        (torch.rand(5), r"got training inputs of shape \(5,\)"),
        (torch.rand(0, 3), r"\(0, 3\), which is empty"),
        (torch.zeros(4, 5, dtype=torch.bool), "dtype torch.bool"),
        (torch.full((3, 2), torch.nan), "NaN or infinite values in the inputs of the training data"),
        ({"text": torch.rand(4, 3)}, r"tensors under \['text'\]; wanted its inputs under one of 'input_ids'"),
        ({"input_ids": torch.ones(4, 3).long(), "extra": torch.ones(5)}, "got extra of another length"),
        ([(torch.rand(2, 3), 0), (torch.rand(2, 4), 0)], "wanted one shape for all"),
        ([torch.rand(2, 3), {"x": torch.rand(2, 3)}], "wanted tensors or mappings of tensors"),
    ],
)
def test_inputs_that_cannot_be_read(given, message):
    with pytest.raises(InputError, match=message):
        context.read_inputs(given)


def test_the_key_of_a_mapping_can_be_named():
    read = context.read_inputs({"text": torch.rand(4, 3), "labels": torch.ones(4)}, dict_key_x="text")
    made = context.ColumnShuffle(read).generate(6)
    assert list(made) == ["text"]
    assert made["text"].shape == (6, 3)
    with pytest.raises(InputError, match="wanted its inputs under 'x'"):
        context.read_inputs({"text": torch.rand(4, 3)}, dict_key_x="x")


def test_an_image_mapping_keeps_what_goes_with_the_images():
    columns = {"pixel_values": images(), "scale": torch.arange(30.0)}
    made = context.PatchShuffle(columns).generate(12)
    assert made["pixel_values"].shape == (12, 1, 6, 6)
    assert bool(torch.isin(made["scale"], columns["scale"]).all())


# -- as a Dataset --


def test_a_context_is_a_dataset():
    made = context.Textures(images(), size=11, seed=2)
    assert len(made) == 11
    expected = made.generate(11)
    assert torch.equal(torch.stack([made[i] for i in range(11)]), expected)
    assert torch.equal(torch.stack(list(made)), expected)
    assert torch.equal(made[-1], expected[-1])
    for i in (11, -12):
        with pytest.raises(IndexError, match="of a context of 11 inputs"):
            made[i]
    for batch_size in (1, 4, 11):
        assert torch.equal(torch.cat(list(DataLoader(made, batch_size=batch_size))), expected)
    mapping = context.TokenShuffle(Mappings(), size=10)
    columns = mapping.generate(10)
    batches = list(DataLoader(mapping, batch_size=4))
    assert all(torch.equal(torch.cat([b[k] for b in batches]), columns[k]) for k in columns)


def test_sizes():
    assert len(context.Textures(images(30))) == 30
    assert len(context.ColumnShuffle(torch.rand(20_000, 2))) == 10_000
    for build in (lambda: context.Textures(images(), size=0), lambda: context.default(images(), size=0)):
        with pytest.raises(InputError, match="got size=0"):
            build()
    with pytest.raises(InputError, match="got num=0"):
        context.Textures(images()).generate(0)


def test_many_are_made_in_chunks_that_differ():
    x = torch.rand(5, 3, 64, 64)
    chunk = CHUNK_VALUES // x[0].numel()
    made = context.PhaseScramble(x[:1]).generate(2 * chunk + 3)
    assert len(made) == 2 * chunk + 3
    assert len(made.flatten(1).unique(dim=0)) == len(made)


# -- mixtures --


def test_a_sum_is_a_mixture_in_equal_shares():
    x = torch.rand(50, 3)
    near, far = context.ColumnShuffle(x), context.WideGaussian(x + 1000)
    mixed = near + far
    made = mixed.generate(101)
    assert made.shape == (101, 3)
    kinds = made[:, 0] > 500
    assert int(kinds.sum()) == 50
    assert 30 < int(kinds[:60].sum() + (~kinds[60:]).sum()) < 75  # in random order
    assert torch.equal(made, (near + far).generate(101))
    assert not torch.equal(made, mixed.generate(101, seed=1))
    assert (mixed + near).parts == (near, far, near)
    assert repr(near + near) == "ColumnShuffle(seed=0, size=None) + ColumnShuffle(seed=0, size=None)"
    assert len(mixed) == 50
    assert len(context.Mixture((near, far), size=7)) == 7
    # The same part twice gives other inputs each time, and a share may be none.
    assert len((near + near).generate(40).unique(dim=0)) == 40
    assert (near + far).generate(1).shape == (1, 3)


def test_what_cannot_be_mixed():
    rows = context.ColumnShuffle(torch.rand(5, 3))
    with pytest.raises(InputError, match="got a context \\+ Tensor; only contexts can be added"):
        rows + torch.rand(4, 3)
    for other in (context.ColumnShuffle(torch.rand(5, 4)), context.Textures(images())):
        with pytest.raises(InputError, match=r"ColumnShuffle \(3,\), .*wanted contexts of inputs of one shape"):
            rows + other
    with pytest.raises(InputError, match="ColumnShuffle \\(3,\\), ColumnShuffle"):
        rows + context.ColumnShuffle({"x": torch.rand(5, 3)})
    with pytest.raises(InputError, match="got no contexts"):
        context.Mixture(())


@pytest.mark.parametrize("given", [images(), torch.rand(20, 4), words(20)])
def test_default_suits_the_kind(given):
    made = context.default(given, seed=3, size=13)
    assert len(made) == 13
    assert len(made.parts) > 1
    first, again = made.generate(13), context.default(given, seed=3).generate(13)
    if isinstance(given, dict):
        assert all(torch.equal(first[k], again[k]) for k in given)
        assert first["input_ids"].shape == (13, 4)
    else:
        assert torch.equal(first, again)
        assert first.shape == (13, *given.shape[1:])
        assert first.dtype == given.dtype


def test_default_of_images_can_be_tiny():
    assert context.default(torch.rand(3, 2, 2, 3)).generate(20).shape == (20, 2, 2, 3)


# -- in a fit --


def fitted(model, train, made, **options):
    la = ScaLLA(model, "classification", num_features=4, seed=1)
    return la.fit(train, context=made, bias=True, num_steps=6, **options)


def test_fit_with_images():
    x = images()
    train = loader(x, torch.arange(30) % 3)
    model = CASES["cnn_batchnorm"].model()
    la = fitted(model, train, context.default(train))
    assert bool(torch.isfinite(la.ood_score(x[:4])).all())
    again = fitted(model, train, context.default(train))
    assert torch.equal(la.features(x[:4]), again.features(x[:4]))
    other = fitted(model, train, context.default(train, seed=5))
    assert not torch.equal(la.features(x[:4]), other.features(x[:4]))
    # A list makes a group of each.
    groups = fitted(model, train, [context.Strokes(x), context.FeatureExtrapolation(x, model)], context_batch_size=3)
    assert bool(torch.isfinite(groups.ood_score(x[:4])).all())


def test_fit_with_rows():
    x = torch.randn(30, 2, generator=rng())
    train = loader(x, torch.arange(30) % 3)
    la = fitted(mlp(), train, context.default(train))
    assert bool(torch.isfinite(la.ood_score(x)).all())


def test_fit_with_token_mappings():
    train = DataLoader(Mappings(), batch_size=5)
    model = CASES["dict_keywords"].model()
    la = fitted(model, train, context.default(train), context_batch_size=3)
    assert bool(torch.isfinite(la.ood_score(words(4))).all())
    # One mapping whole, and contexts in a list, do as well.
    assert bool(torch.isfinite(fitted(model, train, words(7)).ood_score(words(4))).all())
    groups = [context.TokenShuffle(train), context.TokenReplace(train)]
    assert bool(torch.isfinite(fitted(model, train, groups).ood_score(words(4))).all())


def test_batches_of_a_context_go_on_from_any_place():
    made = EndlessBatches(DataLoader(context.Strokes(images(), size=9), batch_size=2, shuffle=True), seed=0)
    seen = [made.next() for _ in range(12)]
    made.move_to(0, 3)
    assert torch.equal(made.next(), seen[3])
