import io
import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from made_runs import _gallery

from scalla.benchmark.measure import encode_image
from scalla.report.columns import significant
from scalla.report.gallery import Pictures, decode_image, png
from scalla.report.svg import Axis, Frame, figure, linear_ticks, log_ticks, short


def test_linear_axis() -> None:
    axis = Axis("x", 2.0, 6.0)
    assert [axis.share(v) for v in (2, 4, 6)] == [0, 0.5, 1]
    assert Axis.around("x", [1.0, math.nan, 3.0, math.inf]).low == pytest.approx(0.88)
    assert Axis.around("x", [1.0, 3.0], least=0).low == 0


def test_logarithmic_axis() -> None:
    axis = Axis("x", 1e-2, 1e2, log=True)
    assert [axis.share(v) for v in (1e-2, 1, 1e2)] == pytest.approx([0, 0.5, 1])
    around = Axis.around("x", [0.1, 10.0, -3.0, 0.0], log=True)  # what has no logarithm is left out
    assert 0.05 < around.low < 0.1 < 10 < around.high < 20


@pytest.mark.parametrize("values", [[], [0.0], [5.0, 5.0], [math.nan]])
def test_axis_of_one_value_or_none_has_an_extent(values: list[float]) -> None:
    for log in (False, True):
        axis = Axis.around("x", values, log=log)
        assert axis.low < axis.high
        assert all(math.isfinite(axis.share(t)) for t in axis.shown_ticks())


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 7), (0.91, 0.912), (1e-6, 3e-6), (0, 4000)])
def test_linear_ticks_are_round_and_inside(low: float, high: float) -> None:
    ticks = linear_ticks(low, high)
    steps = np.diff(ticks)
    assert 3 <= len(ticks) <= 7
    assert min(ticks) >= low - 1e-9 * (high - low)
    assert max(ticks) <= high + 1e-9 * (high - low)
    np.testing.assert_allclose(steps, steps[0], rtol=1e-6)
    lead = steps[0] / 10 ** math.floor(math.log10(steps[0]) + 1e-9)
    assert any(lead == pytest.approx(nice) for nice in (1, 2, 5, 10))


@pytest.mark.parametrize(("low", "high"), [(1e-3, 1e3), (2.0, 30.0), (1.0, 1.5), (1.0, 1e12)])
def test_logarithmic_ticks_are_inside(low: float, high: float) -> None:
    ticks = log_ticks(low, high)
    assert 2 <= len(ticks) <= 8
    assert min(ticks) >= low * (1 - 1e-9)
    assert max(ticks) <= high * (1 + 1e-9)


def test_ticks_in_words() -> None:
    assert [short(v) for v in (0, 0.5, 100, 1e5, 3e-6, -2)] == ["0", "0.5", "100", "10⁵", "3·10⁻⁶", "-2"]


def test_numbers_in_words() -> None:
    values = (0, 0.1234, 12.345, 1234.4, 1234567.0, 1e-5, 123456789.0, 9.999)
    found = [significant(v) for v in values]
    assert found == ["0", "0.123", "12.3", "1,234", "1,234,567", "1.00e-05", "1.23e+08", "10.0"]


def test_frame_puts_values_where_they_belong() -> None:
    frame = Frame(Axis("x", 0, 10), Axis("y", 0, 1), width=360, height=250, left=50, bottom=40)
    assert frame.at(0, 0) == (50, 210)
    assert frame.at(10, 1) == (350, 8)
    assert frame.at(5, 0.5) == (200, 109)
    assert frame.at(-99, 99) == frame.at(0, 1)  # moved to the edge
    assert frame.points([0, 10], [0, 1]) == "50.0,210.0 350.0,8.0"


def test_svg_is_well_formed_and_says_its_axes() -> None:
    frame = Frame(Axis("steps & more", 1, 100, log=True), Axis("error <1>", 0, 1))
    text = frame.svg('a "chart"', frame.line("row <1>", [1, 10, 100], [0, 0.5, 1]))
    root = ElementTree.fromstring(text)
    assert root.attrib["aria-label"] == 'a "chart"'
    assert root.attrib["data-x"] == "1|100|1|steps & more"
    assert root.attrib["data-box"] == "54,350,214,8"
    line = root.find("polyline")
    assert line is not None
    assert line.attrib["data-n"] == "row <1>"
    labels = [t.text for t in root.iter("text")]
    assert "steps & more" in labels
    assert "error <1>" in labels
    assert figure("caption", text).startswith("<figure><svg")


def test_pictures_are_the_pixels_and_each_is_there_once() -> None:
    from matplotlib import image as matplotlib_image
    from torch import from_numpy

    pixels = np.arange(784, dtype=np.uint8).reshape(28, 28)
    encoded = encode_image(from_numpy(pixels).float() / 255)
    assert decode_image(encoded) == pixels.tobytes()
    read = matplotlib_image.imread(io.BytesIO(png(decode_image(encoded))), format="png")
    np.testing.assert_array_equal((255 * read).round().astype(np.uint8), pixels)

    pictures = Pictures()
    first, again = pictures.use(encoded, "one"), pictures.use(encoded, "two <b>")
    other = pictures.use(_gallery(np.random.default_rng(0), "s")["sets"]["KMNIST"]["most"][0]["image"], "three")
    assert [re.findall(r'href="#(\w+)"', text) for text in (first, again, other)] == [["p0"], ["p0"], ["p1"]]
    assert "two &lt;b&gt;" in again
    assert pictures.symbols().count("<symbol") == 2
