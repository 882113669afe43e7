"""The measurements as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def filled(page: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with each table between its markers, <!-- step --> and <!-- /step -->, as measured."""
    for part, make in _TABLES.items():
        if part in found and found[part]["rows"]:
            text = f"<!-- {part} -->\n{make(found[part]['rows'])}\n<!-- /{part} -->"
            page = re.sub(rf"<!-- {part} -->.*?<!-- /{part} -->", lambda _, text=text: text, page, flags=re.DOTALL)
    return page


def tables(found: Mapping[str, Mapping[str, Any]]) -> str:
    """One table for each part that was measured."""
    blocks = []
    for part, make in _TABLES.items():
        if part in found and found[part]["rows"]:
            blocks.append(make(found[part]["rows"]))
    for about in list(found.values())[:1]:
        machine, versions = about["hardware"], about["versions"]
        blocks.append(
            f"Seconds of the processor on {machine['threads']} thread of {machine['cpu']}; "
            f"torch {versions['torch']}, laplace-torch {versions['laplace-torch']}, Python {versions['python']}.\n"
        )
    return "\n".join(blocks)


def _markdown(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [f"**{title}**", "", "| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join([*lines, ""])


def _step(rows: Sequence[Mapping[str, Any]]) -> str:
    return _markdown(
        "One step of a fit ÷ a bare product and a bare step of the same surrogate",
        ("network", "surrogate", "weights", "batch", "step, ms", "floor, ms", "ratio"),
        (
            (
                r["network"],
                r["surrogate"],
                f"{r['parameters'] / 1e6:.2f} M",
                r["batch"],
                f"{1e3 * r['step_seconds']:.0f}",
                f"{1e3 * r['floor_seconds']:.0f}",
                f"{r['ratio']:.2f}",
            )
            for r in rows
        ),
    )


def _variants(rows: Sequence[Mapping[str, Any]]) -> str:
    first = rows[0]
    half = first["batch"] // 2
    return _markdown(
        f"One step of a fit in other ways ÷ the plain one ({first['network']} network, {half} + {half} inputs)",
        ("way", "step, ms", "ratio"),
        (
            (
                r["way"],
                *((r["failed"], "") if "failed" in r else (f"{1e3 * r['step_seconds']:.0f}", f"{r['ratio']:.2f}")),
            )
            for r in rows
        ),
    )


def _matching(rows: Sequence[Mapping[str, Any]]) -> str:
    return _markdown(
        "The matching loss, forward and backward: Gram identity ÷ all pairs",
        ("inputs, classes", "Gram, ms", "pairs, ms", "time", "numbers held"),
        (
            (
                f"{r['batch']}, {r['classes']}",
                f"{1e3 * r['gram_seconds']:.2f}",
                f"{1e3 * r['pairwise_seconds']:.2f}",
                f"1 : {1 / r['ratio']:.1f}",
                f"1 : {r['pairwise_numbers'] / r['gram_numbers']:.0f}",
            )
            for r in rows
        ),
    )


def _prediction(rows: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(
        _markdown(
            f"Probabilities, variances and a score ÷ the plain forward pass ({r['network']} network)",
            ("method", "µs an input", "ratio"),
            ((name, f"{r['microseconds_an_input'][name]:.0f}", f"{r['ratio'][name]:.2f}") for name in r["ratio"]),
        )
        for r in rows
    )


def _memory(rows: Sequence[Mapping[str, Any]]) -> str:
    return _markdown(
        "Peak memory, mirror, m = 100",
        ("network", "batch", "import, MB", "training step, MB", "fit, MB", "predict, MB", "fit ratio", "predict ratio"),
        (
            (
                r["network"],
                r["batch"],
                *(f"{r['mb'][task]:.0f}" for task in ("import", "train", "fit", "predict")),
                f"{r['fit_ratio']:.2f}",
                f"{r['predict_ratio']:.2f}",
            )
            for r in rows
        ),
    )


def _classes(rows: Sequence[Mapping[str, Any]]) -> str:
    return _markdown(
        f"Features factored over {rows[0]['classes']} classes, m = {rows[0]['num_features']}",
        ("surrogate", "class_rank", "weights", "kernel error", "floor of rank m", "fit, s"),
        (
            (
                r["surrogate"],
                r["class_rank"] if r["class_rank"] < r["classes"] else f"{r['class_rank']} (dense)",
                f"{r['weights'] / 1e3:.0f} k",
                f"{r['error']:.3f}",
                f"{r['floor']:.3f}",
                f"{r['seconds']:.0f}",
            )
            for r in rows
        ),
    )


def _scaling(rows: Sequence[Mapping[str, Any]]) -> str:
    return _markdown(
        "How the seconds grow",
        ("what", "with", "from", "to", "seconds, from", "seconds, to", "exponent"),
        (
            (
                r["what"],
                r["letter"],
                f"{r['sizes'][0]:.3g}",
                f"{r['sizes'][-1]:.3g}",
                f"{r['seconds'][0]:.2g}",
                f"{r['seconds'][-1]:.2g}",
                f"{r['exponent']:.2f}",
            )
            for r in rows
        ),
    )


def _quality(rows: Sequence[Mapping[str, Any]]) -> str:
    curves = [r for r in rows if r.get("curve")]
    text = _markdown(
        "Kernel error against what a fit has cost",
        ("recipe", "steps", "seconds", "JVP'd inputs", "error", "÷ floor"),
        (
            (
                r["recipe"],
                last["step"],
                f"{last['seconds']:.0f}",
                f"{last['jvp_inputs']:.2g}",
                f"{last['error']:.3f}",
                f"{last['error'] / r['floor']:.1f}",
            )
            for r in curves
            for last in r["curve"][-1:]
        ),
    )
    compared = [r for r in rows if "share_of_seconds" in r]
    if not compared:
        return text
    return (
        text
        + "\n"
        + _markdown(
            "The last error of the published recipe, reached by",
            ("recipe", "error", "share of its seconds", "share of its JVP'd inputs"),
            (
                (r["recipe"], f"{r['error']:.3f}", f"{r['share_of_seconds']:.3f}", f"{r['share_of_jvp_inputs']:.3f}")
                for r in compared
            ),
        )
    )


_TABLES = {
    "step": _step,
    "variants": _variants,
    "prediction": _prediction,
    "memory": _memory,
    "quality": _quality,
    "classes": _classes,
    "scaling": _scaling,
    "matching": _matching,
}
