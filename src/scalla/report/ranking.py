"""Where ScaLLA leads and where it does not: computed from the runs, seed by seed, and put in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Literal

from scalla.benchmark.fmnist import PROTOCOLS
from scalla.report.columns import Column, cost_columns, ood_columns, quality_columns
from scalla.report.results import ReportRow, Results
from scalla.report.series import shown_first
from scalla.report.spread import Interval, paired_difference
from scalla.report.table import Heading, Line, table

Verdict = Literal["leads", "level", "behind"]
OURS = ("scalla", "scalla_biased", "scalla_residual", "scalla_biased_residual")
#: what the summary speaks of: (set, or "" for in distribution; title)
SCORES = ("AUC", "Gaussian AUC", "chosen AUC")
COSTS = ("µs / prediction", "fit, s")
VERDICT_WORDS: dict[Verdict, str] = {
    "leads": "Leads in",
    "level": "Cannot be told from the best in",
    "behind": "Does not lead in",
}


@dataclass(frozen=True, eq=False)
class Standing:
    """One of our rows in one column, against the best of all rows that are not ours."""

    column: Column
    ours: ReportRow
    best: ReportRow
    difference: Interval
    #: 1 is the first; of `count` rows, ours among them
    rank: int
    count: int

    @property
    def advantage(self) -> int:
        """+1 where the mean is the better one, −1 where it is the worse."""
        sign = 1 if self.column.better == "more" else -1
        return (self.difference.mean * sign > 0) - (self.difference.mean * sign < 0)

    @property
    def verdict(self) -> Verdict:
        """With one seed, the order of the two numbers; with more, only what their paired interval allows."""
        known = self.difference.half_width is None or self.difference.sign != 0
        if not known or self.advantage == 0:
            return "level"
        return "leads" if self.advantage > 0 else "behind"


def summary_columns(protocol: str) -> list[Column]:
    """The columns that the summary ranks."""
    found = [c for name in ("KMNIST", "MNIST") for c in ood_columns(name, protocol) if c.title in SCORES]
    return [*quality_columns(), *found, *(c for c in cost_columns() if c.title in COSTS)]


def our_rows(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """Our rows, each in the variant that the charts begin with."""
    shown = shown_first(rows)
    return [row for name in OURS for row in rows if row.method == name and row.slug in shown]


def standing(ours: ReportRow, column: Column, rows: Sequence[ReportRow]) -> Standing | None:
    """None where ours, or all others, have no such number."""
    mine = column.by_seed(ours)
    sign = 1 if column.better == "more" else -1
    rivals = {
        row.slug: (row, s.mean) for row in rows if row.method not in OURS and (s := column.spread(row)) is not None
    }
    if not mine or not rivals:
        return None
    best = max(rivals.values(), key=lambda pair: sign * pair[1])[0]
    difference = paired_difference(mine, column.by_seed(best))
    own = column.spread(ours)
    if difference is None or own is None:
        return None  # no seed in common: nothing can be said
    rank = 1 + sum(sign * mean > sign * own.mean for _, mean in rivals.values())
    return Standing(column, ours, best, difference, rank, len(rivals) + 1)


def summary(results: Results) -> str:
    """For each protocol and each of our rows: leads, level, behind, with the numbers folded below."""
    parts = []
    for protocol in PROTOCOLS:
        rows = results.of(protocol, "method")
        for ours in our_rows(rows):
            found = [s for c in summary_columns(protocol) if (s := standing(ours, c, rows)) is not None]
            if found:
                others = _against_detectors(ours, results.of(protocol, "control", "detector"))
                parts.append(_card(protocol, ours, found, others))
    if not parts:
        return "<p>No run of ScaLLA is among the results yet, so there is nothing to say about it.</p>"
    return f'<div class="verdicts">{"".join(parts)}</div>'


def _card(protocol: str, ours: ReportRow, found: Sequence[Standing], others: str) -> str:
    items = []
    for verdict, title in VERDICT_WORDS.items():
        names = ", ".join(escape(s.column.phrase or s.column.label) for s in found if s.verdict == verdict) or "nothing"
        items.append(f'<li class="{verdict}"><b>{title}</b> {names}.</li>')
    noise = (
        ""
        if len(ours.records) > 1
        else "<p><small>One seed: the order of two numbers, and no noise is known.</small></p>"
    )
    return (
        f"<section><h3>{escape(ours.label)}, {protocol} protocol</h3>{noise}<ul>{''.join(items)}{others}</ul>"
        f"<details><summary>Numbers</summary>{_numbers(ours, found)}</details></section>"
    )


def _numbers(ours: ReportRow, found: Sequence[Standing]) -> str:
    lines = []
    for s in found:
        own, best = s.column.spread(s.ours), s.column.spread(s.best)
        assert own is not None
        assert best is not None
        cells = (
            s.column.text(own.mean),
            f"{s.column.text(best.mean)} {escape(s.best.label)}",
            signed(s.column, s.difference),
            f"{s.rank} of {s.count}",
            f'<span class="{s.verdict}">{s.verdict}</span>',
        )
        lines.append(Line(escape(s.column.label), [f"<td>{cell}</td>" for cell in cells]))
    heads = (escape(ours.label), "best other row", "difference, seed by seed", "place", "verdict")
    return table("Against the best of all other rows", [Heading(h) for h in heads], [("", lines)])


def _against_detectors(ours: ReportRow, rows: Sequence[ReportRow]) -> str:
    """By the score that would be used: the chosen one, or in the paper protocol the Gaussian's entropy."""
    title = "chosen AUC" if ours.protocol == "tuned" else "Gaussian AUC"
    column = next(c for c in ood_columns("KMNIST", ours.protocol) if c.title == title)
    own_path = ("metrics", "ood", "KMNIST", "score", "auc")
    found = standing(ours, replace(column, own_path=own_path), rows)
    if found is None:
        return ""
    best = found.best.spread(own_path)
    own = column.spread(ours)
    assert best is not None
    assert own is not None
    word = {"leads": "ahead of", "level": "level with", "behind": "behind"}[found.verdict]
    return (
        f'<li class="{found.verdict}"><b>Controls and detectors:</b> {word} the best of them on KMNIST, '
        f"{escape(found.best.label)} {column.text(best.mean)}, with {column.phrase} {column.text(own.mean)}.</li>"
    )


def signed(column: Column, difference: Interval) -> str:
    """A difference as the column writes it, with the half width of its interval."""
    text = f"{'−' if difference.mean < 0 else '+'}{column.text(abs(difference.mean))}"
    return text if difference.half_width is None else f"{text} ± {column.text(difference.half_width)}"
