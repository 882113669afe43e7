import math
from dataclasses import replace

import pytest
import torch
from made_methods import BrightnessDetector, GaussianMethod, SamplingMethod
from tiny_images import tiny_images
from torch import Tensor, nn

from scalla.benchmark import measure as measuring
from scalla.benchmark.measure import (
    Outputs,
    detection,
    encode_image,
    extremes,
    histograms,
    measure,
    outputs_of,
    prediction_cost,
    prediction_scores,
    roc_points,
    scores_of,
)
from scalla.metrics import auroc
from scalla.report.gallery import decode_image
from scalla.types import InputError

GAUSSIAN = {"mutual_information", "gaussian_entropy", "gaussian_entropy_projected", "variance"}
ALWAYS = {"entropy", "double_softmax", "max_prob"}


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_perfect_separation() -> None:
    assert detection(f64(0, 1, 2), f64(3, 4)) == {"auc": 1.0, "fpr95": 0.0, "aupr": 1.0}
    turned = detection(f64(3, 4), f64(0, 1, 2))
    assert (turned["auc"], turned["fpr95"]) == (0.0, 1.0)


def test_ties_count_half() -> None:
    found = detection(torch.zeros(8), torch.zeros(4))
    assert found == {"auc": 0.5, "fpr95": 1.0, "aupr": pytest.approx(4 / 12)}


def test_roc_points_lie_on_the_curve_and_reach_both_ends() -> None:
    generator = torch.Generator().manual_seed(0)
    inside, outside = torch.randn(400, generator=generator), 1 + torch.randn(300, generator=generator)
    points = roc_points(inside, outside)
    fpr, tpr = f64(*points["fpr"]), f64(*points["tpr"])
    assert (fpr[0], tpr[0], fpr[-1], tpr[-1]) == (0, 0, 1, 1)
    assert bool((fpr.diff() >= 0).all())
    assert bool((tpr.diff() >= 0).all())
    assert len(fpr) <= measuring.NUM_ROC_POINTS + 1
    area = float(torch.trapezoid(tpr, fpr))
    assert area == pytest.approx(auroc(inside, outside), abs=2e-3)
    rates = {(0.0, 0.0)}
    for threshold in torch.cat([inside, outside]):
        flagged = ((inside >= threshold).double().mean(), (outside >= threshold).double().mean())
        rates.add(tuple(round(float(rate), 9) for rate in flagged))
    assert {(round(f, 9), round(t, 9)) for f, t in zip(points["fpr"], points["tpr"], strict=True)} <= rates


def test_roc_points_of_one_score_for_all() -> None:
    assert roc_points(torch.zeros(5), torch.zeros(5)) == {"fpr": [0.0, 1.0], "tpr": [0.0, 1.0]}


def test_histograms_lose_no_input() -> None:
    generator = torch.Generator().manual_seed(0)
    values = {"a": torch.randn(1000, generator=generator).double(), "b": f64(-1e9, 1e9, math.inf)}
    found = histograms(values)
    assert {name: sum(counts) for name, counts in found["counts"].items()} == {"a": 1000, "b": 3}
    assert len(found["edges"]) == measuring.NUM_HISTOGRAM_BINS + 1
    assert (found["counts"]["b"][0], found["counts"]["b"][-1]) == (1, 2)
    middle = found["edges"][20]
    assert sum(found["counts"]["a"][:20]) == int((values["a"] <= middle).sum())


def test_histogram_of_equal_scores() -> None:
    found = histograms({"a": torch.zeros(5, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)})
    assert sum(found["counts"]["a"]) == 5
    assert found["edges"][0] < 0 < found["edges"][-1]


def test_extremes_are_the_ends_of_the_order() -> None:
    x = torch.linspace(0, 1, 20)[:, None, None, None].expand(20, 1, 28, 28)
    scores = torch.arange(20.0).flip(0)
    found = extremes(x, scores)
    assert [item["index"] for item in found["least"]] == [19, 18, 17, 16, 15, 14]
    assert [item["index"] for item in found["most"]] == [0, 1, 2, 3, 4, 5]
    assert [item["score"] for item in found["most"]] == [19, 18, 17, 16, 15, 14]


def test_images_survive_their_packing() -> None:
    pixels = torch.arange(784, dtype=torch.uint8).view(28, 28)
    assert decode_image(encode_image(pixels.float() / 255)) == pixels.numpy().tobytes()


def test_scores_of_a_gaussian_and_of_what_has_none() -> None:
    x = tiny_images().test[0].double()
    assert set(outputs_of(GaussianMethod(), x, num_samples=8).scores) == ALWAYS | GAUSSIAN
    assert set(outputs_of(GaussianMethod(rank=0), x, num_samples=1).scores) == ALWAYS
    assert set(outputs_of(SamplingMethod(), x, num_samples=40).scores) == ALWAYS | GAUSSIAN


def test_scores_are_what_their_names_say() -> None:
    x = tiny_images().test[0]
    prediction = replace(GaussianMethod().predict(x, n_samples=4000), link="mc")
    scores = prediction_scores(prediction)
    probs = prediction.probs
    cov = prediction.factor @ prediction.factor.mT
    torch.testing.assert_close(scores["entropy"], -(probs * probs.log()).sum(-1))
    torch.testing.assert_close(scores["max_prob"], 1 - probs.max(-1).values)
    torch.testing.assert_close(scores["variance"], cov.diagonal(dim1=1, dim2=2).sum(-1))
    expected = 0.5 * (torch.logdet(cov) + 10 * math.log(2 * math.pi * math.e))
    torch.testing.assert_close(scores["gaussian_entropy"], expected, atol=1e-8, rtol=0)


def test_chunks_change_nothing() -> None:
    x = tiny_images().test[0]
    method = GaussianMethod()
    whole = outputs_of(method, x, num_samples=16, chunk=len(x))
    parts = outputs_of(method, x, num_samples=16, chunk=7)
    assert method.calls == [20, 7, 7, 6]
    torch.testing.assert_close(whole.probs, parts.probs, atol=1e-12, rtol=0)
    for name, values in whole.scores.items():
        torch.testing.assert_close(values, parts.scores[name], atol=1e-9, rtol=0)


def test_record_of_a_method() -> None:
    images = tiny_images()
    found = measure(GaussianMethod(), images, num_samples=64)
    metrics, curves = found["metrics"], found["curves"]
    outputs = outputs_of(GaussianMethod(), images.test[0], num_samples=64)
    correct = (outputs.probs.argmax(-1) == images.test[1]).double()
    assert metrics["accuracy"] == pytest.approx(float(correct.mean()))
    label_probs = outputs.probs[torch.arange(20), images.test[1]]
    assert metrics["nll"] == pytest.approx(float(-label_probs.log().mean()))
    assert set(metrics["ood"]) == {"KMNIST", "MNIST"}
    outside = outputs_of(GaussianMethod(), images.out["KMNIST"], num_samples=64)
    for score in ALWAYS | GAUSSIAN:
        assert metrics["ood"]["KMNIST"][score]["auc"] == auroc(outputs.scores[score], outside.scores[score])
    assert sum(curves["reliability"]["count"]) == 20
    assert curves["rejection"]["accuracy"][0] == pytest.approx(metrics["accuracy"])
    assert set(curves["ood"]) == {"entropy", "gaussian_entropy"}
    assert found["gallery"]["score"] == "gaussian_entropy"
    first = found["gallery"]["sets"]["FashionMNIST"]["most"][0]
    assert first["index"] == int(outputs.scores["gaussian_entropy"].argmax())
    assert first["label"] == int(images.test[1][first["index"]])
    assert first["predicted"] == int(outputs.probs[first["index"]].argmax())
    for kind, severities in (("rotation", 6), ("noise", 6)):
        shift = metrics["shift"][kind]
        assert len(shift) == severities
        assert shift[0]["severity"] == 0
        assert shift[0]["nll"] == pytest.approx(metrics["nll"])  # of the very images of the test
        assert shift[0]["auc"]["entropy"] == 0.5


def test_record_of_a_detector() -> None:
    images = tiny_images()
    found = measure(BrightnessDetector(), images, num_samples=0)
    assert found["metrics"]["accuracy"] is None
    assert set(found["metrics"]["ood"]["MNIST"]) == {"score"}
    inside, outside = (x.double().mean((1, 2, 3)) for x in (images.test[0], images.out["MNIST"]))
    assert found["metrics"]["ood"]["MNIST"]["score"]["auc"] == auroc(inside, outside)
    assert set(found["curves"]) == {"ood"}
    assert found["gallery"]["sets"]["FashionMNIST"]["most"][0]["predicted"] is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_score_that_fails_is_an_error_and_never_a_zero(value: float) -> None:
    def spoil(mean: Tensor) -> Tensor:
        mean = mean.clone()
        mean[0, 0] = value
        return mean

    with pytest.raises(InputError, match="NaN"):
        measure(GaussianMethod(spoil=spoil), tiny_images(), num_samples=8)


def test_a_detector_that_fails_is_an_error() -> None:
    class Broken(BrightnessDetector):
        def score(self, x: Tensor) -> Tensor:
            return super().score(x) * math.nan

    with pytest.raises(InputError, match="NaN"):
        measure(Broken(), tiny_images(), num_samples=0)


def test_costs_are_of_the_kind_of_the_method() -> None:
    x = tiny_images().test[0]
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    for method, has_samples in ((GaussianMethod(), True), (SamplingMethod(), True), (BrightnessDetector(), False)):
        found = prediction_cost(method, network, x, num_samples=4, seconds=0)
        assert found["timing_batch"] == 20
        assert found["us_map_forward"] > 0
        assert found["ratio_to_map"] == pytest.approx(found["us_per_prediction"] / found["us_map_forward"])
        assert (found["us_per_prediction_mc"] is not None) == has_samples


def test_a_detector_is_asked_in_chunks() -> None:
    x = torch.rand(1203, 1, 2, 2)
    assert torch.equal(scores_of(BrightnessDetector(), x, num_samples=0)["score"], BrightnessDetector().score(x))
    assert isinstance(outputs_of(GaussianMethod(), tiny_images().test[0], num_samples=2), Outputs)
