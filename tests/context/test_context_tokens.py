"""Token ids: what moves, what stays."""

import pytest
import torch

from scalla import context
from scalla.types import InputError

CLS, SEP, PAD = 1, 2, 0


def sentences(num=40, length=9):
    """[CLS] words [SEP] padding, of several lengths."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(10, 1000, (num, length), generator=rng)
    used = torch.randint(5, length + 1, (num,), generator=rng)
    place = torch.arange(length)
    ids[:, 0] = CLS
    ids[torch.arange(num), used - 1] = SEP
    mask = (place < used[:, None]).long()
    ids[mask == 0] = PAD
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.arange(num)[:, None].repeat(1, length)}


@pytest.mark.parametrize("generator", [context.TokenShuffle, context.TokenReplace])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_shape_dtype_seed_and_form(generator, dtype):
    x = sentences()
    x["input_ids"] = x["input_ids"].to(dtype)
    made = generator(x | {"labels": torch.zeros(40)}, seed=5).generate(30)
    assert list(made) == ["input_ids", "attention_mask", "token_type_ids"]
    assert made["input_ids"].shape == (30, 9)
    assert made["input_ids"].dtype == dtype
    again = generator(x).generate(30, seed=5)
    assert all(torch.equal(made[k], again[k]) for k in made)
    assert not torch.equal(generator(x, seed=6).generate(30)["input_ids"], made["input_ids"])
    bare = generator(x["input_ids"], keep=(PAD,)).generate(30)
    assert isinstance(bare, torch.Tensor)
    assert bare.shape == (30, 9)


def test_shuffle_keeps_the_multiset_of_the_tokens_that_may_move():
    x = sentences()
    made = context.TokenShuffle(x, keep=(CLS, SEP)).generate(200)
    source = made["token_type_ids"][:, 0]  # which training input it was
    ids, mask = x["input_ids"][source], x["attention_mask"][source]
    assert torch.equal(made["attention_mask"], mask)
    fixed = (mask == 0) | (ids == CLS) | (ids == SEP)
    assert torch.equal(made["input_ids"][fixed], ids[fixed])
    assert torch.equal(made["input_ids"].sort(1).values, ids.sort(1).values)
    moved = (made["input_ids"] != ids).double()[~fixed]
    assert float(moved.mean()) > 0.5
    # Every order of three tokens comes up about as often.
    few = context.TokenShuffle(torch.tensor([[7, 8, 9]])).generate(6000)
    counts = few.unique(dim=0, return_counts=True)[1]
    assert len(counts) == 6
    assert 850 < int(counts.min()) <= int(counts.max()) < 1150


def test_shuffle_without_keep_moves_the_ends_too():
    x = sentences()
    made = context.TokenShuffle(x).generate(200)
    source = made["token_type_ids"][:, 0]
    assert torch.equal(made["input_ids"] == PAD, x["input_ids"][source] == PAD)
    assert bool((made["input_ids"][:, 0] != CLS).any())


def test_replace_draws_from_the_ids_in_use():
    x = sentences()
    made = context.TokenReplace(x, keep=(CLS, SEP), shares=(1.0, 1.0)).generate(300)
    source = made["token_type_ids"][:, 0]
    ids, mask = x["input_ids"][source], x["attention_mask"][source]
    fixed = (mask == 0) | (ids == CLS) | (ids == SEP)
    assert torch.equal(made["input_ids"][fixed], ids[fixed])
    free = x["input_ids"]
    vocabulary = free[(x["attention_mask"] == 1) & (free != CLS) & (free != SEP)].unique()
    new = made["input_ids"][~fixed]
    assert bool(torch.isin(new, vocabulary).all())
    assert float((new != ids[~fixed]).double().mean()) > 0.97
    half = context.TokenReplace(x, keep=(CLS, SEP), shares=(0.5, 0.5)).generate(300)
    source = half["token_type_ids"][:, 0]
    ids, mask = x["input_ids"][source], x["attention_mask"][source]
    fixed = (mask == 0) | (ids == CLS) | (ids == SEP)
    assert float((half["input_ids"] != ids).double()[~fixed].mean()) == pytest.approx(0.5, abs=0.06)


def test_errors():
    with pytest.raises(InputError, match=r"every token is masked or in keep=\[3\]"):
        context.TokenShuffle(torch.full((4, 5), 3), keep=(3,))
    with pytest.raises(InputError, match="0 < least ≤ most ≤ 1"):
        context.TokenReplace(sentences(), shares=(0.5, 1.5))
    with pytest.raises(InputError, match=r"TokenShuffle got images.*wanted token ids"):
        context.TokenShuffle(torch.rand(4, 1, 5, 5))


def test_a_mask_of_pairs_says_nothing_about_single_tokens():
    ids = torch.arange(12).view(2, 6)
    made = context.TokenShuffle({"input_ids": ids, "attention_mask": torch.ones(2, 6, 6)}).generate(9)
    assert made["attention_mask"].shape == (9, 6, 6)
    assert bool((made["input_ids"] != ids[:1]).any())
