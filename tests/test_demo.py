"""The demo: its numbers, its sentences and its page, with fits too short to be good."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sklearn.metrics import roc_auc_score
from typer.testing import CliRunner

from scalla import InputError
from scalla.cli.app import app
from scalla.data.digits import digits, photo_patches
from scalla.demo import Demo, Settings, run_demo, words
from scalla.demo.page import render
from scalla.demo.pictures import extremes
from scalla.demo.row import FALSE_ALARMS, Row
from scalla.predictive import Prediction

SHORT = Settings(num_epochs=12, num_steps=6, num_features=12, num_context=60, num_ood=40)
# Fits this short are no use to the likelihood of held-out digits, and the grid says so.
pytestmark = pytest.mark.filterwarnings("ignore:the best prior precision:UserWarning")


@pytest.fixture(scope="module")
def demo() -> Demo:
    return run_demo(SHORT)


def row_of(logits: torch.Tensor, ood: torch.Tensor, labels: torch.Tensor, name: str = "map") -> Row:
    def prediction(f: torch.Tensor) -> Prediction:
        return Prediction(f, f.new_zeros(*f.shape, 0), noise=f.new_zeros(0, 1))

    return Row(name, name, prediction(logits), prediction(ood), labels)


def test_rows_measure_what_they_hold(demo: Demo) -> None:
    labels = digits(seed=0).test.labels
    assert [row.name for row in demo.rows] == ["map", "scalla", "scalla_biased"]
    for row in demo.rows:
        probs = row.digits.probs
        assert row.accuracy == pytest.approx(float((probs.argmax(-1) == labels).double().mean()))
        assert row.nll == pytest.approx(float(-probs[torch.arange(400), labels].log().mean()), rel=1e-4)
        for name in row.scores:
            inside, outside = row.score(name)
            truth = torch.cat([torch.zeros(400), torch.ones(40)])
            assert row.auroc(name) == pytest.approx(roc_auc_score(truth, torch.cat([inside, outside])))
        inside, outside = row.score(row.own_score)
        threshold = inside.sort().values[-int(FALSE_ALARMS * 400)]  # the 20 largest are flagged
        assert row.share_flagged >= float((outside >= threshold).double().mean())
        if row.flagged.any():
            assert float((inside >= outside[row.flagged].min()).double().mean()) <= FALSE_ALARMS


def test_the_network_learns_and_map_has_no_gaussian(demo: Demo) -> None:
    before, unbiased, biased = demo.rows
    assert before.accuracy > 0.8
    assert before.auroc("gaussian_entropy") is None
    assert before.kernel_error is None
    for row in (unbiased, biased):
        assert row.kernel_error is not None
        assert row.kernel_error.error > row.kernel_error.floor
        assert torch.equal(row.digits.mean, before.digits.mean)
    assert not torch.equal(unbiased.digits.var, biased.digits.var)


def test_same_seed_same_numbers_without_the_unseen_photograph_in_any_choice(
    demo: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other patches in its place everything but their own predictions stays; and no trace is left."""

    def patches(which: str, num: int, seed: int = 0, size: int = 8) -> torch.Tensor:
        drawn = torch.rand(num, 1, size, size, generator=torch.Generator().manual_seed(1))
        return drawn if which == "ood" else photo_patches(which, num, seed, size)

    monkeypatch.setattr("scalla.demo.experiment.photo_patches", patches)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    told: dict[str, list[float]] = {}
    other = run_demo(SHORT, on_progress=lambda stage, share: told.setdefault(stage, []).append(share))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    for before, after in zip(demo.rows, other.rows, strict=True):
        assert before.prior_precision == after.prior_precision
        assert torch.equal(before.digits.probs, after.digits.probs)
        assert torch.equal(before.digits.var, after.digits.var)
    assert not torch.equal(demo.rows[0].ood.probs, other.rows[0].ood.probs)
    # Every stage was told of from its start to its end.
    assert list(told) == ["network", "MAP", "ScaLLA", "ScaLLA biased"]
    for shares in told.values():
        assert shares == sorted(shares)
        assert shares[-1] == 1.0


@pytest.mark.parametrize(("name", "value"), [("num_steps", 0), ("seed", -1), ("num_ood", 2.5)])
def test_wrong_settings(name: str, value: object) -> None:
    with pytest.raises(InputError, match=f"got {name}={value}; wanted a whole number"):
        replace(SHORT, **{name: value})


def test_sentences_follow_the_numbers(demo: Demo) -> None:
    labels = torch.zeros(40, dtype=torch.long)
    sure, unsure = torch.tensor([9.0, 0.0]), torch.tensor([0.3, 0.0])
    right = torch.where(torch.arange(40)[:, None] < 30, sure, sure.flip(0))  # three in four
    better = torch.where(torch.arange(40)[:, None] < 30, sure, unsure)
    before = row_of(right, sure.expand(10, 2), labels)
    after = row_of(better, unsure.expand(10, 2), labels, "scalla_biased")
    made = replace(demo, rows=(before, after))
    assert "reads 75.0% of new digits" in words.headline(made)
    assert "It also takes 100% of the patches" in words.headline(made)
    assert "does so for 0%" in words.headline(made)
    assert "is more accurate than MAP (100.00% against 75.00%)" in words.calibration(made)
    assert "(less than MAP's" in words.calibration(made)
    assert "map 0%, scalla_biased 0%" in words.detection(made)  # all scores equal, or the misread digits' own
    turned = replace(demo, rows=(replace(before, name="scalla_biased"), replace(after, name="map")))
    assert "is less accurate than MAP (75.00% against 100.00%)" in words.calibration(turned)
    assert "(more than MAP's" in words.calibration(turned)
    same = replace(demo, rows=(before, replace(before, name="scalla_biased")))
    assert "is as accurate as MAP" in words.calibration(same)
    assert "about the same as MAP's" in words.calibration(same)


def test_extremes() -> None:
    scores = torch.tensor([0.3, 0.1, 0.9, 0.1])
    assert extremes(scores, largest=True, num=2).tolist() == [2, 0]
    assert extremes(scores, largest=False, num=3).tolist() == [1, 3, 0]


def test_the_page_needs_nothing_else_and_shows_the_numbers(demo: Demo) -> None:
    page = render(demo)
    assert "http://" not in page
    assert "https://" not in page
    assert page.count("<section>") == page.count("</section>") == 6
    for row in demo.rows:
        assert f"<td>{row.nll:.4f}</td>" in page
        assert f"<td>{100 * row.accuracy:.2f}</td>" in page
    biased = demo.row("scalla_biased")
    wrong = biased.digits.probs.argmax(-1) != biased.labels
    least = extremes(biased.digits.entropy, largest=True, num=16)
    assert page.count('<figure class="wrong">') >= int(wrong[least].sum())
    for i in least[:3].tolist():
        assert f"test digit {i}: a {int(biased.labels[i])}" in page


def test_the_command_prints_the_table_and_writes_the_page(
    demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Settings] = []

    def made_before(settings: Settings, **options: object) -> Demo:
        given.append(settings)
        return demo

    monkeypatch.setattr("scalla.demo.run_demo", made_before)
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "d"), "--seed", "3", "--steps", "7"])
    assert result.exit_code == 0, result.output
    assert (given[0].seed, given[0].num_steps) == (3, 7)
    for row in demo.rows:
        (line,) = (line for line in result.stdout.splitlines() if line.strip().startswith(row.title + "  "))
        assert f"{100 * row.accuracy:.2f}" in line
        assert f"{row.auroc(row.own_score):.3f}" in line
    assert (tmp_path / "d" / "report.html").read_text() == render(demo)
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "d"), "--json"])
    content = json.loads(result.stdout)
    assert [row["method"] for row in content["rows"]] == ["MAP", "ScaLLA", "ScaLLA biased"]
    assert [row["ece"] for row in content["rows"]] == [row.reliability.ece for row in demo.rows]
    assert content["rows"][0]["ood_auroc_gaussian"] is None
