import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import brier_score_loss, log_loss
from torchmetrics.functional.classification import multiclass_calibration_error

from scalla import metrics
from scalla.types import InputError


def random_case(seed: int, num: int = 200, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num, classes, generator=generator, dtype=torch.float64)
    labels = torch.distributions.Categorical(logits=logits).probs.multinomial(1, generator=generator)[:, 0]
    return logits.softmax(-1), labels


PROBS = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4], [0.5, 0.25, 0.25]])
LABELS = torch.tensor([0, 1, 0, 2])


def test_values_by_hand() -> None:
    assert metrics.accuracy(PROBS, LABELS) == 0.5
    assert metrics.nll(PROBS, LABELS) == pytest.approx(-np.log([0.7, 0.8, 0.3, 0.25]).mean(), abs=1e-7)
    rows = [0.09 + 0.04 + 0.01, 0.01 + 0.04 + 0.01, 0.49 + 0.09 + 0.16, 0.25 + 0.0625 + 0.5625]
    assert metrics.brier(PROBS, LABELS) == pytest.approx(np.mean(rows), abs=1e-7)
    # Confidences 0.7, 0.8 right, 0.4, 0.5 wrong: each alone in its bin of width 0.1.
    assert metrics.ece(PROBS, LABELS, 10) == pytest.approx((0.3 + 0.2 + 0.4 + 0.5) / 4, abs=1e-7)
    assert metrics.reliability(PROBS, LABELS, 10).mce == pytest.approx(0.5, abs=1e-7)


@pytest.mark.parametrize("seed", range(5))
def test_against_scikit_learn_and_torchmetrics(seed: int) -> None:
    probs, labels = random_case(seed)
    classes = list(range(5))
    assert metrics.accuracy(probs, labels) == pytest.approx(float((probs.argmax(1) == labels).double().mean()))
    assert metrics.nll(probs, labels) == pytest.approx(log_loss(labels, probs, labels=classes), abs=1e-12)
    sklearn_brier = brier_score_loss(labels.numpy(), probs.numpy(), labels=classes, scale_by_half=False)
    assert metrics.brier(probs, labels) == pytest.approx(sklearn_brier, abs=1e-12)
    for num_bins in (1, 10, 15):
        theirs = multiclass_calibration_error(probs, labels, 5, n_bins=num_bins, norm="l1")
        assert metrics.ece(probs, labels, num_bins) == pytest.approx(float(theirs), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_bins", [5, 10, 15])
def test_bins_are_open_below_and_closed_above(dtype: torch.dtype, num_bins: int) -> None:
    # p = k/num_bins belongs to bin k−1, in whatever precision it is written.
    top = torch.arange(num_bins // 2 + 1, num_bins + 1, dtype=dtype) / num_bins
    probs = torch.stack([top, 1 - top], 1)
    table = metrics.reliability(probs, torch.zeros(len(top)), num_bins)
    expected = torch.zeros(num_bins, dtype=torch.int64)
    expected[num_bins // 2 :] = 1
    assert table.count.tolist() == expected.tolist()


def test_reliability_table() -> None:
    table = metrics.reliability(PROBS, LABELS, 2)
    assert table.edges.tolist() == [0.0, 0.5, 1.0]
    assert table.count.tolist() == [2, 2]
    torch.testing.assert_close(table.confidence, torch.tensor([0.45, 0.75], dtype=torch.float64))
    assert table.accuracy.tolist() == [0.0, 1.0]
    empty = metrics.reliability(PROBS, LABELS, 100)
    assert empty.confidence.isnan().sum() == 96
    assert empty.ece == pytest.approx(0.35, abs=1e-7)


def test_nll_is_finite_at_probability_zero() -> None:
    certain = torch.tensor([[1.0, 0.0]])
    assert metrics.nll(certain, torch.tensor([1])) == pytest.approx(87.3365, abs=1e-3)
    assert metrics.nll(certain.double(), torch.tensor([1])) == pytest.approx(708.396, abs=1e-3)
    assert metrics.nll(certain.half(), torch.tensor([1])) == pytest.approx(87.3365, abs=1e-3)
    small = torch.tensor([[1.0, 1e-30]])
    assert metrics.nll(small, torch.tensor([1])) == pytest.approx(30 * np.log(10), rel=1e-6)


def test_one_column_is_the_probability_of_class_one() -> None:
    p = torch.tensor([0.9, 0.2, 0.6, 0.5], dtype=torch.float64)
    labels = torch.tensor([1, 0, 0, 0])
    two = torch.stack([1 - p, p], 1)
    for name in ("accuracy", "nll", "ece", "brier"):
        metric = getattr(metrics, name)
        assert metric(p[:, None], labels) == metric(two, labels)
    assert metrics.accuracy(p[:, None], labels) == 0.75  # 0.5 is class 0, the first of equals
    assert metrics.accuracy(p[:, None], labels[:, None].float()) == 0.75


def test_numpy_lists_and_half_precision() -> None:
    expected = metrics.nll(PROBS.double(), LABELS)
    assert metrics.nll(PROBS.double().numpy(), LABELS.numpy()) == expected
    read_only = PROBS.double().numpy()[::-1]
    read_only.flags.writeable = False
    assert metrics.nll(read_only, LABELS.numpy()[::-1]) == pytest.approx(expected, abs=1e-12)
    assert metrics.nll(PROBS.double().tolist(), LABELS.tolist()) == expected
    assert metrics.nll(PROBS.bfloat16(), LABELS) == pytest.approx(expected, rel=1e-2)
    assert metrics.nll(PROBS.clone().requires_grad_(), LABELS) == pytest.approx(expected, rel=1e-6)


def test_rejection_by_hand() -> None:
    curve = metrics.accuracy_rejection_curve(PROBS, LABELS, torch.tensor([0.1, 0.2, 0.4, 0.3]))
    assert curve.rejected.tolist() == [0.0, 0.25, 0.5, 0.75]
    torch.testing.assert_close(curve.accuracy, torch.tensor([0.5, 2 / 3, 1.0, 1.0], dtype=torch.float64))
    assert curve.area == pytest.approx((0.5 + 2 / 3 + 2) / 4)
    constant = metrics.accuracy_rejection_curve(PROBS, LABELS, torch.zeros(4))
    assert constant.accuracy.tolist() == [0.5] * 4  # all tied: no information, no dependence on the order


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 30))
def test_properties(seed: int, num: int) -> None:
    probs, labels = random_case(seed, num, 4)
    order = torch.randperm(num, generator=torch.Generator().manual_seed(seed))
    assert 0 <= metrics.ece(probs, labels) <= 1
    assert 0 <= metrics.brier(probs, labels) <= 2
    assert metrics.brier(probs, labels) == pytest.approx(metrics.brier(probs[order], labels[order]))
    uncertainty = (1 - probs.amax(1)).round(decimals=1)
    curve = metrics.accuracy_rejection_curve(probs, labels, uncertainty)
    other = metrics.accuracy_rejection_curve(probs[order], labels[order], uncertainty[order])
    torch.testing.assert_close(curve.accuracy, other.accuracy)
    assert float(curve.accuracy[0]) == pytest.approx(metrics.accuracy(probs, labels))


@pytest.mark.parametrize(
    ("probs", "labels", "message"),
    [
        (torch.zeros(0, 3), torch.zeros(0), r"got probs of shape \(0, 3\), which is empty"),
        (torch.tensor([[float("nan"), 1.0]]), [0], "got 1 NaN among the 2 values of probs"),
        (torch.tensor([[float("inf"), 0.0]]), [0], "got 1 infinite among"),
        (torch.tensor([[2.0, -1.0]]), [0], r"wanted probabilities in \[0, 1\].*softmax"),
        (torch.tensor([[0.5, 0.4]]), [0], "row 0 sums to 0.9; wanted rows that sum to 1"),
        (torch.tensor([0.5, 0.5]), [0, 1], r"got probs of shape \(2,\); wanted \(B, C\)"),
        (PROBS, LABELS[:3], r"got labels of shape \(3,\) for probs of 4 inputs; wanted \(4,\)"),
        (PROBS, torch.eye(4, 3), r"one-hot, pass labels.argmax"),
        (PROBS, [0, 1, 3, -1], r"got label 3 at index 2 \(2 such labels\) for 3 classes; .* 0 to 2"),
        (PROBS, [0, 1, 0.5, 2], r"got label 0.5 at index 2"),
        (PROBS, ["a", "b", "c", "d"], "wanted real numbers"),
        (PROBS.to(torch.complex64), LABELS, "wanted real numbers"),
        ([[0.5, 0.5], [1.0]], [0, 1], "not rectangular"),
        ([torch.ones(1), torch.ones(1)], [0, 1], "torch.cat or torch.stack"),
    ],
)
def test_errors_say_what_came_and_what_to_do(probs: object, labels: object, message: str) -> None:
    for metric in (metrics.accuracy, metrics.nll, metrics.ece, metrics.brier):
        with pytest.raises(InputError, match=message):
            metric(probs, labels)


def test_errors_of_the_arguments() -> None:
    with pytest.raises(InputError, match="got num_bins=0; wanted at least 1"):
        metrics.ece(PROBS, LABELS, 0)
    with pytest.raises(InputError, match=r"got uncertainty of shape \(3,\) for 4 inputs"):
        metrics.accuracy_rejection_curve(PROBS, LABELS, torch.zeros(3))
    with pytest.raises(InputError, match="NaN among the 4 values of uncertainty"):
        metrics.accuracy_rejection_curve(PROBS, LABELS, torch.full((4,), float("nan")))
