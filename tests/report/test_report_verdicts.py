"""What the page says of the numbers: best and near, leads and behind, claims met or not, published or not."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from made_runs import fail, record_of, regression_record, run_of

from scalla.benchmark.records import Run, write_json
from scalla.report import markdown_regression, markdown_table
from scalla.report.claims import claims_table
from scalla.report.columns import Column, marks, ood_columns, quality_columns, table_columns
from scalla.report.comparison import agreement, comparison_table
from scalla.report.published import DIGITS, PUBLISHED, ROUNDING
from scalla.report.ranking import Standing, standing, summary
from scalla.report.results import ReportRow, Results, load_results
from scalla.report.table import results_table
from scalla.types import InputError

ACC, NLL, ECE = quality_columns()


def write(folder: Path, method: str, variant: str, values: Sequence[float], name: str = "nll", protocol="paper"):
    """One run a seed, with that number of theirs."""
    for seed, value in enumerate(values, 1):
        run = run_of(method, variant, protocol, seed)
        metrics = {name: value} if name in ("nll", "ece", "accuracy") else {"ood": ood(record_of(run), name, value)}
        write_json(run.done_path(folder), record_of(run, **metrics))


def ood(record, score: str, value: float):
    found = record["metrics"]["ood"]
    found["KMNIST"][score]["auc"] = value
    return found


def rows_of(folder: Path, protocol: str = "paper") -> dict[str, ReportRow]:
    return {row.label: row for row in load_results(folder).of(protocol) if row.records}


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page)))


def test_best_and_near(tmp_path: Path) -> None:
    write(tmp_path, "map", "", [0.250, 0.254])  # mean 0.252
    write(tmp_path, "ella", "", [0.250, 0.252])  # the best, 0.251 ± 0.0014
    write(tmp_path, "mfvi", "", [0.260, 0.261])
    rows = rows_of(tmp_path)
    found = marks([*rows.values()], NLL)
    assert found == {rows["MAP"].slug: "near", rows["ELLA"].slug: "best", rows["MFVI"].slug: ""}
    turned = Column("x", ("metrics", "nll"), "more", "")
    assert marks([*rows.values()], turned)[rows["MFVI"].slug] == "best"
    assert marks([*rows.values()], Column("x", ("metrics", "nll"), "", "")) == {}
    assert marks([*rows.values()], Column("x", ("metrics", "none"), "more", "")) == {}


def test_with_one_seed_nothing_is_near(tmp_path: Path) -> None:
    write(tmp_path, "map", "", [0.2510])
    write(tmp_path, "ella", "", [0.2511])
    assert sorted(marks([*rows_of(tmp_path).values()], NLL).values()) == ["", "best"]


def test_cells_of_the_table(tmp_path: Path) -> None:
    write(tmp_path, "map", "", [0.2500, 0.2540])
    write(tmp_path, "ella", "", [0.2700])
    fail(tmp_path, run_of("valla", "", "paper", 1), "K_z is <not> positive")
    page = results_table("caption", load_results(tmp_path).of("paper", "method"), [NLL])
    text = text_of(page)
    assert "MAP 2 seeds, 3 missing 0.2520 ± 0.0028 best published 0.2539" in text
    assert "ELLA 1 seed, 2 missing 0.2700 published 0.2530" in text
    assert "failed LinAlgError: K_z is <not> positive" in text
    assert "<not>" not in page  # escaped
    assert "FMGP missing: not run" in text
    numbers = re.findall(r'<td[^>]*><span class="num">([^<]+)', page)
    assert numbers == ["0.2520", "0.2700"]  # and none for a row that has no run


def test_markdown(tmp_path: Path) -> None:
    write(tmp_path, "map", "", [0.2500, 0.2540])
    write(tmp_path, "ella", "", [0.2700])
    fail(tmp_path, run_of("valla", "", "paper", 1))
    lines = {line.split("|")[1].strip(): line for line in markdown_table(tmp_path, "paper").splitlines()}
    assert next(iter(lines)) == "Method"
    assert " **0.2520** ± 0.0028 (0.2539) " in lines["MAP (2 seeds, 3 missing)"]
    assert " 0.2700 (0.2530) " in lines["ELLA (1 seed, 2 missing)"]
    assert set(lines["VaLLA (failed)"].split("|")[2:-1]) == {" – "}
    assert set(lines["FMGP (not run)"].split("|")[2:-1]) == {" – "}
    assert len({line.count("|") for line in lines.values()}) == 1
    with pytest.raises(InputError, match="no run of the protocol 'tuned'"):
        markdown_table(tmp_path, "tuned")


def test_markdown_of_the_regression(tmp_path: Path) -> None:
    for seed, rmse in ((1, 0.50), (2, 0.52)):
        run = Run("regression", "map", "toy", "evidence", seed)
        record = regression_record(run)
        record["metrics"] |= {"rmse": rmse, "gap": {"rmse": 0.9, "nll": 1.0, "crps": 0.4, "coverage": 0.5}}
        write_json(run.done_path(tmp_path), record)
    text = markdown_regression(tmp_path)
    assert text.startswith("**Toy in one dimension**")
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert "| RMSE in the gap |" in lines["Method"]
    assert " **0.510** ± 0.014 " in lines["MAP (2 seeds, 3 missing)"]
    assert " 50.0 ± 0.0 " in lines["MAP (2 seeds, 3 missing)"]
    assert set(lines["ScaLLA (not run)"].split("|")[2:-1]) == {" – "}
    with pytest.raises(InputError, match="found no run below"):
        markdown_regression(tmp_path / "none")


def standing_of(folder: Path, column: Column) -> Standing:
    rows = rows_of(folder)
    found = standing(rows["ScaLLA · prior 1"], column, [*rows.values()])
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("ours", "verdict", "rank"),
    [
        ([0.240, 0.241, 0.239], "leads", 1),
        ([0.260, 0.262, 0.261], "behind", 3),
        ([0.249, 0.253, 0.248], "level", 1),
        ([0.252, 0.249, 0.253], "level", 2),
    ],
)
def test_standing_against_the_best_other_row(tmp_path: Path, ours: list[float], verdict: str, rank: int) -> None:
    write(tmp_path, "map", "", [0.250, 0.251, 0.250])
    write(tmp_path, "ella", "", [0.255, 0.256, 0.255])
    write(tmp_path, "scalla", "prior 1", ours)
    found = standing_of(tmp_path, NLL)
    assert (found.verdict, found.rank, found.count, found.best.method) == (verdict, rank, 3, "map")
    assert found.difference.mean == pytest.approx(sum(ours) / 3 - 0.751 / 3)


def test_our_other_row_is_no_rival(tmp_path: Path) -> None:
    write(tmp_path, "map", "", [0.250])
    write(tmp_path, "scalla_biased", "prior 1", [0.1])
    write(tmp_path, "scalla", "prior 1", [0.2])
    found = standing_of(tmp_path, NLL)
    assert (found.best.method, found.verdict, found.count) == ("map", "leads", 2)  # one seed: the order is all


def test_summary_says_where_it_leads_and_where_it_does_not(tmp_path: Path) -> None:
    write(tmp_path, "map", "", [0.250, 0.251])
    write(tmp_path, "scalla", "prior 1", [0.240, 0.241])
    text = text_of(summary(load_results(tmp_path)))
    leads, behind = re.search(r"Leads in (.*?)\.", text), re.search(r"Does not lead in (.*?)\.", text)
    assert leads is not None
    assert behind is not None
    assert "NLL" in leads[1]
    assert "NLL" not in behind[1]


def test_summary_without_a_run_of_ours_claims_nothing(tmp_path: Path) -> None:
    write(tmp_path, "map", "", [0.250, 0.251])
    results = load_results(tmp_path)
    assert "No run of ScaLLA is among the results yet" in summary(results)
    assert claims_table(results) == ""


def verdict_of(results: Results, words: str) -> str:
    found = re.findall(
        rf"{words} .*?(met within|not met|within noise|within one std|met)", text_of(claims_table(results))
    )
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize(
    ("values", "verdict"),
    [([0.85, 0.86], "met"), ([0.70, 0.71], "not met"), ([0.75, 0.84], "within one std"), ([0.79], "not met")],
)
def test_claim_of_an_absolute_value(tmp_path: Path, values: list[float], verdict: str) -> None:
    write(tmp_path, "scalla", "prior 1", values, "gaussian_entropy")
    assert verdict_of(load_results(tmp_path), "Gaussian AUC on KMNIST at least 0.80") == verdict


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        ([0.249, 0.250, 0.250], "met"),
        ([0.260, 0.261, 0.261], "not met"),
        ([0.251, 0.249, 0.254], "within noise"),
    ],
)
def test_claim_against_map(tmp_path: Path, ours: list[float], verdict: str) -> None:
    write(tmp_path, "map", "", [0.250, 0.251, 0.250])
    write(tmp_path, "scalla", "prior 1", ours)
    assert verdict_of(load_results(tmp_path), "NLL no worse than MAP's") == verdict


def test_a_claim_against_map_needs_map(tmp_path: Path) -> None:
    write(tmp_path, "scalla", "prior 1", [0.25])
    assert "no worse than MAP" not in text_of(claims_table(load_results(tmp_path)))


def test_published_numbers_within_noise(tmp_path: Path) -> None:
    write(tmp_path, "map", "", [0.2530, 0.2550, 0.2540])  # published: 0.2539
    write(tmp_path, "ella", "", [0.2630, 0.2632, 0.2631])  # published: 0.2530
    write(tmp_path, "sngp", "", [0.26])
    rows = rows_of(tmp_path)
    assert agreement(rows["MAP"], NLL) == "ours"
    assert agreement(rows["ELLA"], NLL) == "neither"
    assert agreement(rows["SNGP"], NLL) == ""  # one seed: no noise is known
    text = text_of(comparison_table([*rows.values()]))
    assert "0.2539 ✓ within noise of ours" in text


def test_their_code_explains_a_number(tmp_path: Path) -> None:
    for seed, value in enumerate([0.2530, 0.2531, 0.2529], 1):
        run = run_of("ella", "", "paper", seed)
        theirs = {"accuracy": 0.91, "nll": value, "ece": 0.01, "auc": {"KMNIST": 0.5}}
        write_json(run.done_path(tmp_path), record_of(run, nll=0.27 + seed / 1e4, as_published=theirs))
    (row,) = rows_of(tmp_path).values()
    assert agreement(row, NLL) == "theirs"


def test_published_table_is_complete() -> None:
    rows = {(row, variant) for row, variant in PUBLISHED}
    assert len(rows) == 9
    assert {m for m, _ in rows} == {
        "map",
        "lla_all_kron",
        "ella",
        "valla",
        "fmgp",
        "mfvi",
        "sngp",
        "scalla",
        "scalla_biased",
    }
    assert PUBLISHED["scalla_biased", "prior 1"].gaussian_auc == 0.982
    assert PUBLISHED["fmgp", ""].auc == 0.890
    shown = {c.published for c in table_columns("paper") if c.published}
    assert shown == set(DIGITS) == set(ROUNDING)
    for found in PUBLISHED.values():
        for name in shown:
            value = getattr(found, name)
            assert value is None or 0 < value < 1


def test_published_values_stand_beside_the_paper_protocol_only(tmp_path: Path) -> None:
    write(tmp_path, "map", "", [0.25], protocol="tuned")
    write(tmp_path, "map", "", [0.25], protocol="paper")
    assert ACC.published_for(rows_of(tmp_path)["MAP"]) == 0.9101
    assert ACC.published_for(rows_of(tmp_path, "tuned")["MAP"]) is None
    auc = next(c for c in ood_columns("MNIST", "paper") if c.title == "AUC")
    assert auc.published_for(rows_of(tmp_path)["MAP"]) is None  # KMNIST alone was published
