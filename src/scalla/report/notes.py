"""Behind each row: settings, what was chosen, what differs from the published method, warnings, failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from scalla.report.columns import significant
from scalla.report.results import Record, ReportRow, Results, value_at


def notes(rows: Sequence[ReportRow]) -> str:
    """One folded entry for each row; the table's row headers lead here."""
    return f'<div class="notes">{"".join(_note(row) for row in rows)}</div>'


def _note(row: ReportRow) -> str:
    items: list[tuple[str, str]] = []
    if row.note:
        items.append(("note", escape(row.note)))
    record = row.first
    if record is not None:
        settings = record["run"]["settings"]
        items.append(("settings", pairs(settings.get("method", {}))))
        if record.get("chosen"):
            items.append(("chosen", "; ".join(f"seed {s}: {pairs(r['chosen'])}" for s, r in row.records.items())))
        if record.get("trials"):
            items.append(("trials, seed " + str(min(row.records)), _trials(record["trials"])))
        found = {key: row.spread(("metrics", "found", key)) for key in value_at(record, ("metrics", "found")) or {}}
        means = {key: s.mean for key, s in found.items() if s is not None}
        if means:
            items.append(("found, mean over seeds", pairs(means)))
        choices = Counter(value_at(r, ("metrics", "ood_choice", "score")) for r in row.records.values())
        choices.pop(None, None)
        if choices:
            text = ", ".join(f"{name} ({n} of {len(row.records)} seeds)" for name, n in choices.most_common())
            items.append(("score chosen on the held-out context", escape(text)))
        items.append(("seeds", ", ".join(map(str, row.records))))
        items += [("warning", escape(text)) for text in sorted(_warnings(row.records.values()))]
    items += [(f"failed, seed {seed}", error_text(r)) for seed, r in row.failures.items()]
    if row.missing:
        items.append(("missing seeds", ", ".join(map(str, row.missing))))
    body = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in items)
    name = row.label if row.variant in row.label else f"{row.label} · {row.variant}"
    return f'<details id="note-{row.slug}"><summary>{escape(name)}</summary><dl>{body}</dl></details>'


def error_text(record: Record) -> str:
    """The whole error of a failed run, as HTML."""
    error = record.get("error", {})
    head = f"{error.get('type', 'error')}: {error.get('message', '')}"
    trace = "\n".join(error.get("traceback", ()))
    return f"<code>{escape(head)}</code>" + (f"<pre>{escape(trace)}</pre>" if trace else "")


def failed_runs(results: Results) -> str:
    """Every failed run with its error."""
    if not results.failures:
        return "<p>None.</p>"
    items = []
    for record in results.failures:
        run = record["run"]
        parts = (run["task"], run["protocol"], run["method"], run["variant"], f"seed {run['seed']}")
        items.append(f"<dt>{escape(' · '.join(p for p in parts if p))}</dt><dd>{error_text(record)}</dd>")
    return f'<dl class="failures">{"".join(items)}</dl>'


def pairs(settings: Mapping[str, Any]) -> str:
    """Settings in one line."""
    return ", ".join(f"{escape(k.replace('_', ' '))} <b>{escape(_value(v))}</b>" for k, v in settings.items()) or "none"


def _trials(trials: Iterable[Mapping[str, Any]]) -> str:
    lines = []
    for trial in trials:
        given = {k: v for k, v in trial.items() if k != "value"}
        lines.append(f"<li>{pairs(given)}: {_value(trial.get('value'))}</li>")
    return (
        f"<ul>{''.join(lines)}</ul><small>Held-out NLL, of a detector minus the held-out AUC: the least wins.</small>"
    )


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}" if value == int(value) and abs(value) < 1e6 else significant(value)
    return str(value)


def _warnings(records: Iterable[Record]) -> set[str]:
    return {text for record in records for text in record.get("warnings", {})}
