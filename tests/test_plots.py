"""What is drawn, read back from the artists and compared with numbers computed another way."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.metrics import roc_curve
from torch import Tensor

from cases import loader, mlp, normal
from oracles import JacobianFeatures
from scalla import InputError, Prediction, ScaLLA, plots
from scalla.training import HistoryEntry

PROBS = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.95, 0.05], [0.35, 0.65], [0.45, 0.55]], dtype=torch.float64)
LABELS = torch.tensor([0, 1, 0, 1, 1])


def prediction(num: int = 12, seed: int = 0, likelihood: Any = "classification", outputs: int = 3) -> Prediction:
    noise = torch.tensor([0.25], dtype=torch.float64) if likelihood == "regression" else None
    mean = normal(num, outputs, seed=seed, dtype=torch.float64)
    factor = normal(num, outputs, 4, seed=seed + 1, dtype=torch.float64)
    return Prediction(mean, factor, likelihood, noise_var=noise)


def axes(figure: Figure) -> Axes:
    return figure.axes[0]


def xy(line: Any) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(line.get_xdata()), np.asarray(line.get_ydata())


def series(figure: Figure) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """What the legend names, by its words."""
    return {str(line.get_label()): xy(line) for line in axes(figure).lines if not str(line.get_label()).startswith("_")}


def legend_words(figure: Figure) -> list[str]:
    box = axes(figure).get_legend()
    return [] if box is None else [text.get_text() for text in box.get_texts()]


# ---------------------------------------------------------------- classification


def test_reliability_draws_accuracy_against_confidence_of_each_bin() -> None:
    # Confidences 0.9, 0.8, 0.95, 0.65, 0.55 in five bins: (0.4, 0.6], (0.6, 0.8] and (0.8, 1].
    figure = plots.reliability(PROBS, LABELS, num_bins=5)
    (label, (confidence, accuracy)), *others = series(figure).items()
    assert not others
    np.testing.assert_allclose(confidence, [0.55, (0.65 + 0.8) / 2, (0.9 + 0.95) / 2])
    np.testing.assert_allclose(accuracy, [1, 0.5, 1])
    # ECE: (1·|1 − 0.55| + 2·|0.5 − 0.725| + 2·|1 − 0.925|) / 5 = 0.21
    assert label == "ECE 0.210"
    sizes = axes(figure).collections[0].get_sizes()
    np.testing.assert_allclose(np.diff(sizes) / 260, [1 / 5, 0])  # areas grow with the shares 1/5, 2/5, 2/5


def test_reliability_of_several_methods_by_name() -> None:
    halves = torch.full((5, 2), 0.5, dtype=torch.float64)
    figure = plots.reliability({"MAP": PROBS, "coin": halves}, LABELS)
    assert [words.split(",")[0] for words in legend_words(figure)] == ["MAP", "coin"]
    np.testing.assert_allclose(series(figure)["coin, ECE 0.100"], [[0.5], [0.4]])  # the first of equals counts: 2 of 5


def test_risk_coverage_is_the_error_among_the_surest() -> None:
    figure = plots.risk_coverage(PROBS, LABELS)
    ((_, (coverage, risk)),) = series(figure).items()
    # By confidence: 0.95 right, 0.9 right, 0.8 wrong, 0.65 right, 0.55 right.
    np.testing.assert_allclose(coverage[::-1], np.arange(1, 6) / 5)
    np.testing.assert_allclose(risk[::-1], [0, 0, 1 / 3, 1 / 4, 1 / 5], atol=1e-12)


def test_risk_coverage_takes_another_uncertainty_for_each_method() -> None:
    worst_first = torch.tensor([1.0, 0.0, 2.0, 3.0, 4.0])  # the one wrong input is kept longest
    figure = plots.risk_coverage({"a": PROBS, "b": PROBS}, LABELS, {"a": worst_first, "b": -worst_first})
    (_, first), (_, second) = series(figure).values()
    assert first[-1] == 1.0
    assert second[-1] == 0.0
    with pytest.raises(InputError, match="got uncertainty for a, but not for b"):
        plots.risk_coverage({"a": PROBS, "b": PROBS}, LABELS, {"a": worst_first})


def test_predictions_and_a_single_logit_are_taken_as_probabilities() -> None:
    found = prediction(5)
    labels = torch.tensor([0, 1, 2, 0, 1])
    for draw in (plots.reliability, plots.risk_coverage):
        ((_, a),), ((_, b),) = (series(draw(p, labels)).items() for p in (found, found.probs))
        np.testing.assert_array_equal(a, b)
    single = prediction(5, outputs=1)
    two = torch.cat([1 - single.probs, single.probs], 1)
    ((_, a),), ((_, b),) = (series(plots.risk_coverage(p, LABELS)).items() for p in (single, two))
    np.testing.assert_allclose(a, b)


# ---------------------------------------------------------------- out of distribution


def test_roc_is_that_of_scikit_learn() -> None:
    inside, outside = normal(40, seed=1, dtype=torch.float64), normal(30, seed=2, dtype=torch.float64) + 1
    ((label, (fpr, tpr)),) = series(plots.roc(inside, outside)).items()
    truth = np.r_[np.zeros(40), np.ones(30)]
    expected_fpr, expected_tpr, _ = roc_curve(truth, np.r_[inside, outside], drop_intermediate=False)
    np.testing.assert_allclose(fpr, expected_fpr)
    np.testing.assert_allclose(tpr, expected_tpr)
    share_above = float((outside[:, None] > inside).double().mean())
    assert label == f"AUROC {share_above:.3f}"


def test_roc_of_methods_and_of_data_sets() -> None:
    low, high = [0.0, 1.0], [2.0, 3.0]
    methods = plots.roc({"good": low, "bad": high}, {"good": high, "bad": low})
    assert legend_words(methods) == ["good, AUROC 1.000", "bad, AUROC 0.000"]
    sets = plots.roc(low, {"far": high, "same": low})
    assert legend_words(sets) == ["far, AUROC 1.000", "same, AUROC 0.500"]
    with pytest.raises(InputError, match="got scores_in for a, but not for b"):
        plots.roc({"a": low}, {"b": high})


@pytest.mark.parametrize("score", ["gaussian_entropy", "predictive_entropy", "variance"])
def test_scores_are_read_from_predictions(score: str) -> None:
    inside, outside = prediction(20), prediction(15, seed=5)
    values = {
        "gaussian_entropy": lambda p: p.gaussian_entropy, "predictive_entropy": lambda p: p.entropy,
        "variance": lambda p: p.var.sum(-1),
    }[score]  # fmt: skip
    found, expected = plots.roc(inside, outside, score=score), plots.roc(values(inside), values(outside))
    ((_, a),), ((_, b),) = series(found).items(), series(expected).items()
    np.testing.assert_array_equal(a, b)
    assert axes(plots.score_histograms(inside, outside, score=score)).get_xlabel() == score.replace("_", " ")


def test_histograms_hold_the_shares_on_common_bins() -> None:
    inside, outside = [0.0, 0.1, 0.9, 1.0], {"near": [0.9, 1.0], "far": [2.0]}
    figure = plots.score_histograms(inside, outside, num_bins=4)
    drawn = {str(p.get_label()): p.get_data() for p in axes(figure).patches if p.get_label()}
    assert list(drawn) == legend_words(figure) == ["in distribution", "near", "far"]
    for shares in drawn.values():
        np.testing.assert_allclose(shares.edges, [0, 0.5, 1, 1.5, 2])
        assert shares.values.sum() == 1
    np.testing.assert_allclose(drawn["in distribution"].values, [0.5, 0.25, 0.25, 0])  # 1.0 begins the third bin
    np.testing.assert_allclose(drawn["far"].values, [0, 0, 0, 1])
    assert axes(figure).get_ylim()[1] > 1
    with pytest.raises(InputError, match="infinite among the 1 values of out of distribution"):
        plots.score_histograms([0.0], [float("inf")])


# ---------------------------------------------------------------- regression


def band_of(figure: Figure, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper edge of a band, from its polygon."""
    vertices = axes(figure).collections[index].get_paths()[0].vertices
    places = np.unique(vertices[:, 0])
    edges = [[f(vertices[vertices[:, 0] == p, 1]) for p in places] for f in (np.min, np.max)]
    return np.array(edges[0]), np.array(edges[1])


def test_the_band_is_the_mean_and_so_many_deviations() -> None:
    x = torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64)
    mean, var = torch.tensor([[30.0], [10.0], [20.0]]).double(), torch.tensor([[9.0], [1.0], [4.0]]).double()
    figure = plots.regression_band(x, (mean, var), data=([1.5], [12.0]), truth=[1.0, 2.0, 3.0], num_std=2)
    np.testing.assert_array_equal(series(figure)["mean"], [[1, 2, 3], [10, 20, 30]])
    np.testing.assert_array_equal(series(figure)["truth"], [[1, 2, 3], [2, 3, 1]])
    low, high = band_of(figure, 0)
    np.testing.assert_allclose(low, [8, 16, 24])
    np.testing.assert_allclose(high, [12, 24, 36])
    np.testing.assert_array_equal(np.asarray(axes(figure).collections[1].get_offsets()), [[1.5, 12.0]])
    assert "mean ± 2 sd" in legend_words(figure)


def test_the_paler_band_is_that_of_an_observation() -> None:
    found = prediction(7, likelihood="regression", outputs=2)
    x = torch.linspace(-1, 1, 7, dtype=torch.float64)
    figure = plots.regression_band(x[:, None], found, output=1, num_std=1.5)
    for index, variance in ((0, found.cov[:, 1, 1]), (1, found.cov[:, 1, 1] + 0.25)):
        low, high = band_of(figure, index)
        np.testing.assert_allclose(high - low, 3 * variance.sqrt())
        np.testing.assert_allclose((high + low) / 2, found.mean[:, 1])
    assert legend_words(figure) == ["function ± 1.5 sd", "observation ± 1.5 sd", "mean"]


# ---------------------------------------------------------------- two dimensions


def corners(x: Tensor) -> Prediction:
    """Class 1 where x₁ > 0.5; the variance grows with x₂."""
    mean = torch.stack([torch.zeros(len(x)), x[:, 0] - 0.5], 1).double()
    factor = torch.eye(2).double() * x[:, 1].double().exp()[:, None, None]
    return Prediction(mean, factor, "classification")


def test_the_map_shades_the_score_and_draws_the_border() -> None:
    points = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    figure = plots.decision_map(corners, points, [0, 1], score="variance", resolution=9, margin=0.25)
    ax = axes(figure)
    np.testing.assert_allclose([*ax.get_xlim(), *ax.get_ylim()], [-0.25, 1.25, -0.5, 2.5])
    mesh = ax.collections[0]
    up = np.linspace(-0.5, 2.5, 9)
    np.testing.assert_allclose(
        np.asarray(mesh.get_array()).reshape(9, 9), np.tile(2 * np.exp(2 * up)[:, None], 9), 1e-6
    )
    border = np.concatenate([path.vertices for path in ax.collections[1].get_paths()])
    np.testing.assert_allclose(border[:, 0], 0.5, atol=1e-6)
    dots = {str(c.get_label()): np.asarray(c.get_offsets()) for c in ax.collections if c.get_label() in ("0", "1")}
    np.testing.assert_array_equal(dots["0"], [[0, 0]])
    np.testing.assert_array_equal(dots["1"], [[1, 2]])


def test_each_pair_of_three_classes_has_its_border() -> None:
    def three(x: Tensor) -> Prediction:  # class 0 left of 0, class 1 below the diagonal on the right, class 2 above it
        mean = torch.stack(
            [-x[:, 0], torch.where(x[:, 0] > 0, -x[:, 1], -9.0), torch.where(x[:, 0] > 0, x[:, 1], -9.0)], 1
        )
        return Prediction(mean.double(), torch.zeros(len(x), 3, 1, dtype=torch.float64), "classification")

    figure = plots.decision_map(three, [[-1.0, -1.0], [1.0, 1.0]], resolution=41, margin=0.0)
    borders = [np.concatenate([p.vertices for p in c.get_paths()]) for c in axes(figure).collections[1:4]]
    step = 2 / 40
    assert all(np.abs(line[:, 0]).max() <= step for line in borders[:1])  # that of class 0 is x₁ = 0
    for line in borders[1:]:
        right = line[line[:, 0] > 2 * step]
        np.testing.assert_allclose(right[:, 1], 0, atol=1e-6)  # and between the others x₂ = 0
        assert len(right) > 10


def test_a_fitted_method_goes_straight_in() -> None:
    torch.manual_seed(0)
    model = mlp().double()
    x = normal(20, 2, dtype=torch.float64)
    la = ScaLLA(model, surrogate=JacobianFeatures(model), num_features=33)
    la.fit(loader(x, torch.randint(3, (20,))), num_steps=0)
    figure = plots.decision_map(la.predict, x, resolution=4, margin=0.0, dtype=torch.float64)
    corner = torch.stack([x[:, 0].amin(), x[:, 1].amin()])[None]
    shade = np.asarray(axes(figure).collections[0].get_array()).flatten()
    # linspace meets the range in float32
    assert shade[0] == pytest.approx(float(la.predict(corner).entropy), rel=1e-5)
    regression = plots.regression_band(x[:, 0], (la.predict(x).mean, la.predict(x).var))
    assert len(xy(axes(regression).lines[0])[0]) == 20


# ---------------------------------------------------------------- kernel


def history(*scores: float | None) -> list[HistoryEntry]:
    return [HistoryEntry(100 * (i + 1), 1.0, 1e-3, 0.1, score) for i, score in enumerate(scores)]


def test_kernel_error_against_steps() -> None:
    figure = plots.kernel_error_curve(
        {"mirror": history(None, 0.5, 0.25), "trunk": ([1, 2, 3], [0.4, 0.0, 0.3])}, floor=0.1
    )
    drawn = series(figure)
    np.testing.assert_array_equal(drawn["mirror, 0.250 in the end"], [[200, 300], [0.5, 0.25]])
    np.testing.assert_array_equal(drawn["trunk, 0.300 in the end"], [[1, 3], [0.4, 0.3]])  # no logarithm of 0
    np.testing.assert_array_equal(drawn["floor of the rank, 0.100"][1], [0.1, 0.1])
    assert axes(figure).get_yscale() == "log"


# ---------------------------------------------------------------- all of them

DRAWN = {
    "reliability": lambda **o: plots.reliability(PROBS, LABELS, **o),
    "risk_coverage": lambda **o: plots.risk_coverage(PROBS, LABELS, **o),
    "roc": lambda **o: plots.roc([0.0, 1.0], [0.5, 2.0], **o),
    "score_histograms": lambda **o: plots.score_histograms([0.0, 1.0], [0.5, 2.0], **o),
    "regression_band": lambda **o: plots.regression_band([0.0, 1.0], ([0.0, 1.0], [1.0, 1.0]), **o),
    "decision_map": lambda **o: plots.decision_map(corners, PROBS, resolution=5, **o),
    "kernel_error_curve": lambda **o: plots.kernel_error_curve(([1, 2], [0.5, 0.4]), **o),
}


def test_every_plot_is_here() -> None:
    assert sorted(DRAWN) == sorted(plots.__all__)


@pytest.mark.parametrize("name", DRAWN)
def test_axes_of_ones_own_are_drawn_into_and_their_figure_comes_back(name: str) -> None:
    figure = Figure()
    left, right = figure.subfigures(1, 2)
    ax, untouched = left.add_subplot(), right.add_subplot()
    assert DRAWN[name](ax=ax, title="a title") is figure
    assert ax.has_data()
    assert ax.get_title(loc="left") == "a title"
    assert not untouched.has_data()
    with pytest.raises(InputError, match="wanted matplotlib Axes"):
        DRAWN[name](ax="here")


@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_can_be_written(name: str) -> None:
    figure = DRAWN[name]()
    assert isinstance(figure, Figure)
    assert all((axes(figure).get_xlabel(), axes(figure).get_ylabel()))
    page = io.BytesIO()
    figure.savefig(page, format="png")
    assert page.getvalue().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.reliability({}, LABELS), "got an empty mapping of probabilities"),
        (lambda: plots.reliability(PROBS * 3, LABELS), "pass logits.softmax"),
        (lambda: plots.roc({}, {}), "got an empty mapping of scores"),
        (lambda: plots.roc([0.0], prediction(3), score="max"), "choose one of"),
        (lambda: plots.regression_band([0.0], [1.0]), "wanted a Prediction or"),
        (lambda: plots.regression_band([0.0, 1.0], ([0.0], [1.0])), "got 2 values of x and a prediction of 1"),
        (lambda: plots.regression_band([0.0], ([0.0], [-1.0])), "wanted variances, which are ≥ 0"),
        (lambda: plots.regression_band([[0.0, 1.0]], ([0.0], [1.0])), "a band has one axis"),
        (lambda: plots.regression_band([0.0], ([[0.0]], [[1.0]]), output=1), "with a column 1"),
        (lambda: plots.decision_map(corners, [0.0, 1.0]), r"wanted \(N, 2\)"),
        (lambda: plots.decision_map(corners, PROBS, resolution=1), "at least 2 grid points"),
        (lambda: plots.decision_map(lambda x: x, PROBS), "pass la.predict"),
        (lambda: plots.decision_map(corners, PROBS, [0, 1, 2, 3, 0.5]), "got label 0.5 at index 4"),
        (lambda: plots.kernel_error_curve(history(None)), "val_loader=held_out"),
        (lambda: plots.kernel_error_curve([1.0, 2.0]), "wanted la.history"),
        (lambda: plots.kernel_error_curve(([1.0, 2.0], [1.0])), "wanted the same shape"),
        (lambda: plots.kernel_error_curve(history(0.5), floor=0), "got floor=0"),
    ],
)
def test_what_cannot_be_drawn_says_so(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


ALONE = """
import sys
import scalla.plots
assert "matplotlib" not in sys.modules
if sys.argv[1] == "without":
    sys.modules["matplotlib"] = sys.modules["matplotlib.figure"] = None
    try:
        scalla.plots.roc([0.0], [1.0])
    except ImportError as error:
        assert 'pip install "scalla[plots]"' in str(error), error
    else:
        raise AssertionError("drawn without matplotlib")
else:
    import matplotlib
    # to read the backend is to import pyplot
    settings = lambda: {k: matplotlib.rcParams[k] for k in matplotlib.rcParams if k != "backend"}
    before = settings()
    scalla.plots.roc([0.0], [1.0])
    assert settings() == before
    assert "matplotlib.pyplot" not in sys.modules
"""


@pytest.mark.parametrize("matplotlib", ["with", "without"])
def test_matplotlib_is_asked_for_when_something_is_drawn_and_pyplot_never(matplotlib: str) -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", ALONE, matplotlib], check=True)
