"""The page: records in, one HTML file out that needs nothing else."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from scalla.benchmark import fmnist
from scalla.report import comparison, curves, kernel, notes, ranking
from scalla.report.claims import claims_table
from scalla.report.columns import other_set_columns, significant, table_columns
from scalla.report.cost import cost_charts
from scalla.report.gallery import Pictures, galleries
from scalla.report.results import Results, load_results
from scalla.report.second_task import regression_part
from scalla.report.series import colour_rules, legend, shown_first
from scalla.report.shift import shift_charts, shift_table
from scalla.report.table import Heading, Line, results_table, table

TITLE = "ScaLLA: the benchmark"
PROTOCOL_WORDS = {
    "paper": "The published experiment: its network (40 epochs, no weight decay, not shuffled), prior precision 1 and "
    "the one of largest marginal likelihood, all of MNIST test as context.",
    "tuned": "A network trained with shuffling and with the weight decay of the prior. The hyper-parameters of every "
    "method are chosen by an equal number of trials on held-out training data; scores on a held-out part of the "
    "context. Neither test data nor KMNIST take part in any choice.",
}


def write_report(results: Path, out: Path) -> Path:
    """Write the page for the runs below `results` to the file `out`, whole or not at all, and return `out`."""
    page = render(load_results(Path(results)))
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=out.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(page)
        os.chmod(temporary, 0o644)
        os.replace(temporary, out)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    return out


def render(results: Results) -> str:
    """The whole page."""
    pictures = Pictures()
    sections = [
        ("summary", "Where ScaLLA leads, and where it does not", _summary(results)),
        *(
            (protocol, f"The {protocol} protocol", _protocol(protocol, results, pictures))
            for protocol in fmnist.PROTOCOLS
            if results.of(protocol)
        ),
        ("kernel", "How good the kernel is", kernel.kernel_part({p: results.of(p) for p in fmnist.PROTOCOLS})),
        ("regression", "Regression", regression_part(results)),
        ("runs", "How it was run", _runs(results)),
    ]
    sections = [section for section in sections if section[2]]
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title, _ in sections)
    body = "".join(f'<section id="{name}"><h2>{escape(title)}</h2>{html}</section>' for name, title, html in sections)
    light, dark = colour_rules()
    style = asset("style.css") + light + f"@media (prefers-color-scheme:dark){{{dark}}}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{TITLE}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<style>{style}</style></head>\n<body><header><h1>{TITLE}</h1>{_head(results)}<nav>{links}</nav></header>"
        f'<main>{body}</main><div id="tip" role="status" hidden></div>{pictures.symbols()}'
        f"<script>{asset('script.js')}</script></body></html>\n"
    )


def asset(name: str) -> str:
    return files("scalla.report").joinpath(name).read_text(encoding="utf-8")


def _head(results: Results) -> str:
    dates = sorted(r["started"][:10] for r in (*results.records, *results.failures))
    days = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    quick = (
        '<p class="warn">These are quick runs: a subset of the data and short fits. They show that everything runs; '
        "the numbers say nothing about the methods.</p>"
        if results.quick
        else ""
    )
    return (
        "<p>FashionMNIST in distribution; KMNIST, MNIST and five other sets out of distribution (OOD). Every row is an "
        "implementation run on the same trained network, the same data and the same metrics. ScaLLA approximates the "
        "kernel of a trained network by a small surrogate, which makes the linearized Laplace approximation cheap "
        "enough for any network. "
        f"{len(results.records)} runs, {len(results.failures)} failed, {days}.</p>{quick}"
    )


def _summary(results: Results) -> str:
    return (
        f"{ranking.summary(results)}{claims_table(results)}"
        "<p><small>Each row of ScaLLA stands against the best of all other methods, column by column. Differences are "
        "taken seed by seed, since rows of one seed share a network; ± of a difference is the half width of the 95% "
        "interval of its mean, and what cannot be told from the best is where that interval holds zero. ± of anything "
        "else is one standard deviation over seeds.</small></p>"
    )


def _protocol(protocol: str, results: Results, pictures: Pictures) -> str:
    rows = results.of(protocol)
    shown = shown_first(rows)
    caption = (
        f"{protocol.capitalize()} protocol: mean ± standard deviation over seeds. <b>Bold</b>: the best of its kind; "
        "<u>underlined</u>: within one standard deviation of it."
    )
    if protocol == "paper":
        caption += " Small below: the published value."
    parts = [
        f"<p>{PROTOCOL_WORDS[protocol]}</p>",
        results_table(caption, rows, table_columns(protocol)),
        _fold("Settings and notes of every row", notes.notes(rows)),
    ]
    if protocol == "paper" and (compared := comparison.comparison_table(results.of(protocol, "method"))):
        parts += ["<h3>Against the published numbers</h3>", f"<p>{comparison.EXPLANATION}</p>", compared]
    parts += [
        "<h3>Other sets</h3>",
        results_table("Five further OOD sets: area under the ROC curve", rows, other_set_columns(protocol)),
        legend(rows, shown),
    ]
    charts = (
        ("Quality against cost", cost_charts(rows, shown, protocol)),
        ("ROC curves and rejection", curves.roc_charts(rows, shown) + curves.rejection_chart(rows, shown)),
        ("Growing shift", shift_charts(rows, shown)),
    )
    for title, html in charts:
        if html:
            parts.append(f'<h3>{title}</h3><div class="charts">{html}</div>')
            if title == "Growing shift":
                parts.append(_fold("The same in numbers", shift_table(rows)))
    if diagrams := curves.reliability_diagrams(rows):
        text = "Bars below the line: more confident than right. The fainter a bar, the fewer inputs it stands for."
        parts.append(f'<h3>Reliability</h3><p>{text}</p><div class="small">{diagrams}</div>')
    if diagrams := curves.histograms(rows):
        keys = "".join(f'<span class="key {n.lower()}"><i></i>{n}</span>' for n in ("FashionMNIST", "KMNIST", "MNIST"))
        parts.append(f"<h3>Scores</h3><p>Shares of the inputs of each set, first seed. {keys}</p>{diagrams}")
    if shown_images := galleries(rows, pictures):
        text = "By the row's own score, the most extreme first, first seed. The pointer shows index, score and label."
        parts.append(f"<h3>The least and the most uncertain inputs</h3><p>{text}</p>{shown_images}")
    return "".join(parts)


def _fold(title: str, html: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{html}</details>"


def _runs(results: Results) -> str:
    parts = [
        "<h3>Failed runs</h3>",
        notes.failed_runs(results),
        "<h3>Networks</h3>",
        _networks(results),
        "<h3>Versions and hardware</h3>",
        _counted("versions", results.records),
        _counted("hardware", results.records),
        "<h3>Data</h3>",
        _checksums(results),
    ]
    if results.set_aside:
        items = "".join(f"<li>{escape(text)}</li>" for text in results.set_aside)
        parts.append(f"<h3>Not shown</h3><ul>{items}</ul>")
    return "".join(parts)


def _networks(results: Results) -> str:
    lines = []
    for protocol, row in results.networks.items():
        for seed, record in row.records.items():
            last = record["history"][-1]
            accuracy = last.get("validation_accuracy")
            cells = [
                notes.pairs(record["run"]["settings"]["network"]),
                f"{last['loss']:.4f}",
                "–" if accuracy is None else f"{100 * accuracy:.2f}",
                significant(record["cost"]["fit_seconds"]),
            ]
            lines.append(Line(f"{protocol}, seed {seed}", [f"<td>{cell}</td>" for cell in cells], css="wide"))
        for seed, record in row.failures.items():
            lines.append(Line(f"{protocol}, seed {seed}", spanning=notes.error_text(record)))
    if not lines:
        return "<p>None recorded.</p>"
    heads = ("settings", "last training loss", "held-out accuracy, %", "seconds of one core")
    return table("The trained networks, P = 140,594", [Heading(h) for h in heads], [("", lines)])


def _counted(field: str, records: Iterable[Mapping[str, Any]]) -> str:
    """What every run says of itself, with how many runs say so where they differ."""
    counts: dict[str, Counter[str]] = {}
    for record in records:
        for key, value in record[field].items():
            counts.setdefault(key, Counter())[str(value)] += 1
    items = []
    for key, found in counts.items():
        texts = [escape(v) + (f" ({n} runs)" if len(found) > 1 else "") for v, n in found.most_common()]
        items.append(f"<dt>{escape(key)}</dt><dd>{', '.join(texts)}</dd>")
    return f'<dl class="facts">{"".join(items)}</dl>'


def _checksums(results: Results) -> str:
    found: dict[str, set[str]] = {}
    for record in results.records:
        if record["run"]["task"] == fmnist.NAME:
            for name, sha in record["run"]["data"].items():
                found.setdefault(name, set()).add(sha)
    if not found:
        return "<p>The tables of the regression come inside scikit-learn.</p>"
    lines = [Line(escape(k), [f"<td><code>{' '.join(sorted(v))}</code></td>"]) for k, v in sorted(found.items())]
    return table("SHA-256 of the unpacked images and labels", [Heading("checksum")], [("", lines)])
