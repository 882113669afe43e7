import hashlib
import sys

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes, load_digits, load_iris, load_sample_image

from scalla.data import digits, photo_patches, regression_table, toy_1d
from scalla.data.digits import LEAST_CONTRAST
from scalla.data.tabular import TABLES
from scalla.types import InputError


def test_digits_are_those_of_scikit_learn_each_once() -> None:
    data = digits()
    parts = (data.train, data.val, data.test)
    assert [len(p) for p in parts] == [1197, 200, 400]
    assert [p.split for p in parts] == ["train", "val", "test"]
    for part in parts:
        assert part.images.shape[1:] == (1, 8, 8)
        assert part.images.dtype == torch.float32
        assert part.labels.dtype == torch.int64
    images, labels = load_digits(return_X_y=True)
    ours = torch.cat([torch.cat([p.images.flatten(1) * 16, p.labels[:, None].float()], 1) for p in parts])
    theirs = np.concatenate([images, labels[:, None]], 1)
    assert sorted(map(tuple, ours.tolist())) == sorted(map(tuple, theirs.tolist()))


def test_the_split_of_the_digits_is_fixed() -> None:
    assert digits().test.labels[:12].tolist() == digits(seed=0).test.labels[:12].tolist()
    assert not torch.equal(digits(seed=1).test.labels, digits(seed=0).test.labels)
    labels = digits().train.labels.numpy().astype(np.uint8).tobytes()
    assert hashlib.sha256(labels).hexdigest()[:16] == "4d2b88f0c6d7726a"


@pytest.mark.parametrize("size", [8, 28])
@pytest.mark.parametrize("which", ["context", "ood"])
def test_patches(which: str, size: int) -> None:
    patches = photo_patches(which, 200, seed=3, size=size)
    assert patches.shape == (200, 1, size, size)
    assert patches.dtype == torch.float32
    assert patches.amin((1, 2, 3)).eq(0).all()
    assert patches.amax((1, 2, 3)).sub(1).abs().max() < 1e-6
    assert torch.equal(patches, photo_patches(which, 200, seed=3, size=size))
    assert not torch.equal(patches, photo_patches(which, 200, seed=4, size=size))
    assert len(patches.flatten(1).unique(dim=0)) > 190


def test_a_patch_is_a_stretched_piece_of_the_photograph() -> None:
    grey = torch.from_numpy(load_sample_image("flower.jpg") @ [0.299, 0.587, 0.114] / 255).float()
    quarter = torch.nn.functional.avg_pool2d(grey[None, None], 4)[0, 0]
    windows = quarter.unfold(0, 40, 1).unfold(1, 40, 1).reshape(-1, 1600)
    low, high = windows.amin(1, keepdim=True), windows.amax(1, keepdim=True)
    stretched = (windows - low) / (high - low).clamp_min(LEAST_CONTRAST)
    patches = photo_patches("ood", 12, seed=0, size=40).flatten(1)
    distance = torch.stack([(stretched - patch).abs().amax(1).min() for patch in patches])
    # Patches of 40 exist at the scales 1, 2 and 4: some of the twelve are from 4, and exactly so.
    assert 1 <= int((distance < 1e-4).sum()) < 12


def test_context_and_ood_come_from_different_photographs() -> None:
    assert not torch.equal(photo_patches("context", 50), photo_patches("ood", 50))


def test_patches_errors() -> None:
    with pytest.raises(InputError, match="got which='cat'; wanted 'context'"):
        photo_patches("cat", 1)
    with pytest.raises(InputError, match="got num=0"):
        photo_patches("ood", 0)
    for size in (1, 214):
        with pytest.raises(InputError, match=f"got size={size}; wanted 2 to 213"):
            photo_patches("ood", 1, size=size)
    assert photo_patches("ood", 2, size=213).shape == (2, 1, 213, 213)


@pytest.mark.parametrize("name", list(TABLES))
def test_tables_are_standardised_on_their_training_rows(name: str) -> None:
    table = regression_table(name, dtype=torch.float64)
    for values in (table.train.x, table.train.y):
        torch.testing.assert_close(values.mean(0), torch.zeros(values.shape[1], dtype=torch.float64))
        torch.testing.assert_close(values.std(0, correction=0), torch.ones(values.shape[1], dtype=torch.float64))
    assert table.train.x.shape[1] == len(table.feature_names) == len(table.x_mean)
    assert table.train.y.shape[1] == len(table.target_names) == len(table.y_mean)
    assert regression_table(name).train.x.dtype == torch.float32
    again, other = regression_table(name, dtype=torch.float64), regression_table(name, seed=1)
    assert torch.equal(again.test.y, table.test.y)
    assert not torch.equal(other.test.x, regression_table(name).test.x)


def test_tables_hold_the_rows_of_scikit_learn() -> None:
    table = regression_table("diabetes", dtype=torch.float64)
    assert (len(table.train), len(table.val), len(table.test)) == (310, 44, 88)
    parts = (table.train, table.val, table.test)
    x = torch.cat([p.x for p in parts]) * table.x_std + table.x_mean
    y = torch.cat([p.y for p in parts]) * table.y_std + table.y_mean
    features, target = load_diabetes(return_X_y=True)
    ours, theirs = np.concatenate([x, y], 1), np.concatenate([features, target[:, None]], 1)
    direction = np.random.default_rng(0).standard_normal(11)  # tells all rows apart
    ours, theirs = ours[np.argsort(ours @ direction)], theirs[np.argsort(theirs @ direction)]
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)
    inputs, value = table.train.dataset()[0]
    assert inputs.shape == (10,)
    assert value.shape == (1,)


def test_a_column_as_the_target() -> None:
    table = regression_table("iris_petal_width", dtype=torch.float64, val_share=0.0, test_share=0.0)
    assert len(table.val) == len(table.test) == 0
    assert "petal width (cm)" not in table.feature_names
    y = (table.train.y * table.y_std + table.y_mean)[:, 0]
    np.testing.assert_allclose(np.sort(y), np.sort(load_iris().data[:, 3]), atol=1e-12)


def test_table_errors() -> None:
    with pytest.raises(InputError, match="got name='boston'; wanted one of diabetes, linnerud"):
        regression_table("boston")
    with pytest.raises(InputError, match="which leave 0 of 20 rows to train on"):
        regression_table("linnerud", val_share=0.5, test_share=0.5)
    with pytest.raises(InputError, match="wanted shares ≥ 0"):
        regression_table(val_share=-0.1)


def test_toy() -> None:
    toy = toy_1d(seed=5, num=2000, noise_std=0.2, dtype=torch.float64)
    assert toy.x.shape == toy.y.shape == (2000, 1)
    assert toy.x_grid.shape == toy.f_grid.shape == (301, 1)
    assert (toy.x.abs().min() >= 1, toy.x.abs().max() <= 3) == (True, True)
    assert toy.gap == (-1.0, 1.0)
    assert 800 < int((toy.x > 0).sum()) < 1200
    residual = toy.y - torch.sin(2 * toy.x) - toy.x / 3
    assert float(residual.std()) == pytest.approx(0.2, rel=0.06)  # standard error 1.6 %
    assert float(toy.f_grid[150]) == pytest.approx(0, abs=1e-12)
    assert torch.equal(toy.y, toy_1d(seed=5, num=2000, noise_std=0.2, dtype=torch.float64).y)
    assert toy_1d().x.dtype == torch.float32
    assert len(toy.dataset()) == 2000
    with pytest.raises(InputError, match="got num=0"):
        toy_1d(num=0)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match="pip install pillow"):
        photo_patches("ood", 1)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    for function in (digits, regression_table):
        with pytest.raises(ImportError, match=r"pip install \"scalla\[sklearn\]\""):
            function()
