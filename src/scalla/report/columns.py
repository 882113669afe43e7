"""The columns of the tables: where each number stands in a record, which way is better, how it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scalla.report.published import DIGITS, PUBLISHED
from scalla.report.results import ReportRow
from scalla.report.spread import Spread

Mark = Literal["best", "near", ""]
#: the out-of-distribution sets in the order of the page: the two of the main table, then the others
MAIN_SETS = ("KMNIST", "MNIST")
OTHER_SETS = ("digits", "photos", "glyphs", "automata", "noise")


@dataclass(frozen=True)
class Column:
    """One number of a record. `own_path` is where a detector or control, which has no probabilities, has its own."""

    title: str
    path: tuple[str, ...]
    #: "" where neither is: nothing is marked as the best
    better: Literal["more", "less", ""]
    help: str
    group: str = ""
    digits: int = 3
    #: significant digits in place of decimals: for seconds, which span powers of ten
    significant: bool = False
    scale: float = 1.0
    own_path: tuple[str, ...] | None = None
    #: the field of `Published` that stands beside it
    published: str = ""
    #: what a sentence calls it, where that is not the title
    phrase: str = ""
    #: says what the method is worth, rather than what it costs
    is_quality: bool = True

    @property
    def label(self) -> str:
        return f"{self.title}, {self.group}" if self.group else self.title

    def path_in(self, row: ReportRow) -> tuple[str, ...]:
        return self.path if row.kind == "method" or self.own_path is None else self.own_path

    def by_seed(self, row: ReportRow) -> dict[int, float]:
        return row.by_seed(self.path_in(row))

    def spread(self, row: ReportRow) -> Spread | None:
        return row.spread(self.path_in(row))

    def text(self, value: float) -> str:
        value *= self.scale
        return significant(value) if self.significant else f"{value:.{self.digits}f}"

    def published_text(self, value: float) -> str:
        """With the digits that were printed."""
        return f"{value * self.scale:.{DIGITS[self.published]}f}"

    def published_for(self, row: ReportRow) -> float | None:
        found = PUBLISHED.get((row.method, row.variant)) if row.protocol == "paper" else None
        return getattr(found, self.published) if found is not None and self.published else None


def significant(value: float, digits: int = 3) -> str:
    """Three significant digits, without an exponent where that is readable."""
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e7:
        return f"{value:.{digits - 1}e}"
    decimals = max(0, digits - len(f"{abs(value):.0f}")) if abs(value) >= 1 else digits
    return f"{value:,.{decimals}f}"


def quality_columns() -> list[Column]:
    return [
        Column(
            "ACC, %", ("metrics", "accuracy"), "more", "Accuracy of the mean softmax", "FashionMNIST", 2, scale=100,
            published="accuracy", phrase="accuracy",
        ),
        Column(
            "NLL", ("metrics", "nll"), "less", "−mean log of the mean softmax at the label, in nats", "FashionMNIST",
            4, published="nll", phrase="NLL",
        ),
        Column(
            "ECE", ("metrics", "ece"), "less", "Expected calibration error, 15 equal bins of the largest probability",
            "FashionMNIST", 4, published="ece", phrase="ECE",
        ),
    ]  # fmt: skip


def ood_columns(name: str, protocol: str) -> list[Column]:
    def column(title: str, score: str, measure: str, help_: str, **options: str) -> Column:
        path = ("metrics", "ood", name)
        own = (*path, "score", measure) if score == "entropy" else None
        better: Literal["more", "less"] = "less" if measure == "fpr95" else "more"
        published = options.get("published", "") if name == "KMNIST" else ""
        phrase = f"{'AUC of the chosen score' if score == 'chosen' else title} on {name}"
        return Column(
            title, (*path, score, measure), better, help_, name, own_path=own, published=published, phrase=phrase
        )

    entropy = "entropy of the mean softmax (a detector or control: its own score)"
    found = [
        column("AUC", "entropy", "auc", f"Area under the ROC curve; score: {entropy}", published="auc"),
        column(
            "Gaussian AUC",
            "gaussian_entropy",
            "auc",
            "Score: entropy of the Gaussian over the outputs",
            published="gaussian_auc",
        ),
        column(
            "projected",
            "gaussian_entropy_projected",
            "auc",
            "Gaussian AUC without the direction in which all logits move together, of which the data say nothing",
        ),
        column(
            "double softmax",
            "double_softmax",
            "auc",
            "AUC of the entropy of a softmax of the probabilities: what the published code computes",
        ),
        column("FPR95", "entropy", "fpr95", f"False alarms at 95% of the OOD inputs found; score: {entropy}"),
        column("Gaussian FPR95", "gaussian_entropy", "fpr95", "False alarms at 95%; score: entropy of the Gaussian"),
    ]
    if protocol == "tuned":
        found.append(
            column("chosen AUC", "chosen", "auc", "AUC of the score that was best on the held-out part of the context")
        )
    return found


def cost_columns() -> list[Column]:
    def column(title: str, key: str, help_: str, phrase: str = "") -> Column:
        return Column(title, ("cost", key), "less", help_, "cost", significant=True, phrase=phrase, is_quality=False)

    return [
        column(
            "fit, s",
            "fit_seconds",
            "Seconds of one processor core, without the training of the network",
            "time of the fit",
        ),
        column(
            "tuning, s", "tuning_seconds", "Seconds of one core: marginal likelihood, or all trials but the fit kept"
        ),
        column(
            "µs / prediction",
            "us_per_prediction",
            "From an input to its probabilities (by probit where the predictive is Gaussian, else by sampling) "
            "or its score",
            "time of a prediction",
        ),
        column("× MAP", "ratio_to_map", "The same, as a multiple of the network's own forward pass in the same run"),
        column("peak MB", "peak_memory_fit_mb", "The most memory of the process until the fit was done, data included"),
    ]


def table_columns(protocol: str) -> list[Column]:
    """The columns of the main table."""
    return [
        *quality_columns(),
        *(column for name in MAIN_SETS for column in ood_columns(name, protocol)),
        *cost_columns(),
    ]


def other_set_columns(protocol: str) -> list[Column]:
    return [
        column
        for name in OTHER_SETS
        for column in ood_columns(name, protocol)
        if column.title in ("AUC", "Gaussian AUC", "chosen AUC")
    ]


def marks(rows: Sequence[ReportRow], column: Column) -> dict[str, Mark]:
    """The best mean among rows of one kind, and those within one standard deviation of the best one's seeds."""
    found = {row.slug: s for row in rows if (s := column.spread(row)) is not None}
    if not found or not column.better:
        return {}
    sign = 1 if column.better == "more" else -1
    best = max(found.values(), key=lambda s: sign * s.mean)
    reach = best.std or 0.0

    def mark(s: Spread) -> Mark:
        if s.mean == best.mean:
            return "best"
        return "near" if best.std is not None and abs(s.mean - best.mean) <= reach else ""

    return {slug: mark(s) for slug, s in found.items()}
