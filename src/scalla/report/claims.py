"""What ScaLLA must reach, and whether it does."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from scalla.benchmark.fmnist import PROTOCOLS
from scalla.report.columns import Column, ood_columns, quality_columns
from scalla.report.ranking import OURS, our_rows, signed
from scalla.report.results import ReportRow, Results
from scalla.report.spread import paired_difference
from scalla.report.table import Heading, Line, table


@dataclass(frozen=True)
class Claim:
    """What a row must reach: a value of its own, or a difference from MAP's on the same network."""

    method: str
    column_title: str
    bound: float
    against_map: bool
    words: str


CLAIMS = (
    Claim("scalla", "Gaussian AUC", 0.80, False, "Gaussian AUC on KMNIST at least 0.80"),
    Claim("scalla_biased", "Gaussian AUC", 0.98, False, "Gaussian AUC on KMNIST at least 0.98"),
    *(
        claim
        for name in OURS
        for claim in (
            Claim(name, "NLL", 0.0, True, "NLL no worse than MAP's"),
            Claim(name, "ECE", 0.0, True, "ECE no worse than MAP's"),
            Claim(name, "ACC, %", 0.001, True, "accuracy no more than 0.1 points below MAP's"),
        )
    ),
)
VERDICT_CSS = {"met": "good", "not met": "bad"}


def claims_table(results: Results) -> str:
    """Each claim with what was measured: met, met within noise, or not met."""
    lines = []
    for protocol in PROTOCOLS:
        rows = results.of(protocol, "method")
        reference = next((row for row in rows if row.method == "map"), None)
        columns = [*quality_columns(), *ood_columns("KMNIST", protocol)]
        for ours in our_rows(rows):
            for claim in (c for c in CLAIMS if c.method == ours.method):
                column = next(c for c in columns if c.title == claim.column_title)
                cells = _claim_cells(claim, column, ours, reference)
                if cells is not None:
                    header = f"{escape(ours.label)}, {protocol}"
                    lines.append(Line(header, [f"<td>{escape(claim.words)}</td>", *cells], css="words"))
    if not lines:
        return ""
    headings = [Heading("what it must reach"), Heading("measured"), Heading("verdict")]
    return table("What ScaLLA must reach", headings, [("", lines)])


def _claim_cells(claim: Claim, column: Column, ours: ReportRow, reference: ReportRow | None) -> list[str] | None:
    mine = column.by_seed(ours)
    if not claim.against_map:
        found = column.spread(ours)
        if found is None:
            return None
        std = f" ± {column.text(found.std)}" if found.std is not None else ""
        within = found.std is not None and claim.bound - found.mean <= found.std
        verdict = "met" if found.mean >= claim.bound else "within one std" if within else "not met"
        return _cells(f"{column.text(found.mean)}{std}", verdict)
    difference = None if reference is None else paired_difference(mine, column.by_seed(reference))
    if difference is None:
        return None
    # How much worse than MAP's it is, beyond what it may be.
    excess = (-difference.mean if column.better == "more" else difference.mean) - claim.bound
    within = difference.half_width is not None and excess <= difference.half_width
    verdict = "met" if excess <= 0 else "within noise" if within else "not met"
    return _cells(f"difference {signed(column, difference)}", verdict)


def _cells(measured: str, verdict: str) -> list[str]:
    return [f"<td>{measured}</td>", f'<td class="{VERDICT_CSS.get(verdict, "")}">{verdict}</td>']
