"""The demo's page: one HTML file that needs nothing else."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from pathlib import Path

import torch

from scalla.benchmark import environment
from scalla.checkpoint import replacing
from scalla.demo import charts, words
from scalla.demo.experiment import Demo
from scalla.demo.pictures import NUM_SHOWN, digit_gallery, extremes, patch_gallery, strip
from scalla.demo.row import Row
from scalla.report.page import asset
from scalla.report.series import colour_rules
from scalla.report.table import Heading, Line, table

TITLE = "What a network of digits makes of a photograph"
NUM_SAMPLES = 12


def write_page(demo: Demo, path: str | Path) -> Path:
    """Write the page whole or not at all, and return its path."""
    with replacing(path) as temporary:
        temporary.write_text(render(demo), encoding="utf-8")
    return Path(path)


def render(demo: Demo) -> str:
    """The whole page."""
    sections = [
        ("The answer", _answer(demo)),
        ("The table", _table(demo)),
        ("What it is sure of", _galleries(demo)),
        ("Can the scores tell them apart?", _scores(demo)),
        ("Is it right as often as it says?", _calibration(demo)),
        ("How it was run", _facts(demo)),
    ]
    body = "".join(f"<section><h2>{title}</h2>{html}</section>" for title, html in sections)
    light, dark = colour_rules()
    style = asset("style.css") + light + f"@media (prefers-color-scheme:dark){{{dark}}}" + _own_style()
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>ScaLLA: {TITLE}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<style>{style}</style></head>\n<body><header><h1>{TITLE}</h1>{_samples(demo)}</header>"
        f'<main>{body}</main><div id="tip" role="status" hidden></div>'
        f"<script>{asset('script.js')}</script></body></html>\n"
    )


def _own_style() -> str:
    return files("scalla.demo").joinpath("style.css").read_text(encoding="utf-8")


def _samples(demo: Demo) -> str:
    strips = (
        strip("Digits", demo.digits.test.images[:NUM_SAMPLES], "what the network was trained on"),
        strip("One photograph", demo.context[:NUM_SAMPLES], "context: shown to ScaLLA without labels"),
        strip("Another photograph", demo.ood[:NUM_SAMPLES], "never seen before the test"),
    )
    return f'<div class="samples">{"".join(strips)}</div>'


def _answer(demo: Demo) -> str:
    shares = [row.sure_of_patches() for row in demo.rows]
    return (
        f'<p class="lead">{words.headline(demo)}</p>'
        f"<p>Patches of the unseen photograph taken for a digit with a probability of more than 90%:</p>"
        f"{charts.share_bars(demo.rows, shares)}<p>{words.calibration(demo)}</p>"
    )


def _table(demo: Demo) -> str:
    headings = [
        Heading("accuracy, %", "400 test digits"),
        Heading("NLL", "400 test digits", "negative log-likelihood of the labels, in nats; less is better"),
        Heading("ECE", "400 test digits", "expected calibration error in 15 bins; less is better"),
        Heading("probabilities", f"AUROC, {len(demo.ood)} patches", "score: entropy of the probabilities"),
        Heading("Gaussian", f"AUROC, {len(demo.ood)} patches", "score: entropy of the Gaussian over the outputs"),
        Heading("seconds to fit", "cost", "of one core, the choice of the prior precision included"),
    ]
    lines = [
        Line(escape(row.title), [f"<td>{cell}</td>" for cell in _cells(row)], css="" if row.name == "map" else "ours")
        for row in demo.rows
    ]
    caption = "AUROC: how often a patch has a larger score than a digit; 0.5 is a guess, 1 is never wrong."
    return table(caption, headings, [("", lines)])


def _cells(row: Row) -> list[str]:
    areas = (row.auroc("predictive_entropy"), row.auroc("gaussian_entropy"))
    return [
        f"{100 * row.accuracy:.2f}",
        f"{row.nll:.4f}",
        f"{row.reliability.ece:.4f}",
        *("–" if area is None else f"{area:.3f}" for area in areas),
        f"{row.fit_seconds:.1f}" if row.fit_seconds else "–",
    ]


def _galleries(demo: Demo) -> str:
    before, after = demo.row("map"), demo.row("scalla_biased")
    both = (before, after)
    images = demo.digits.test.images
    score_in, score_out = after.score(after.own_score)
    keys = "".join(f'<span class="key m-{row.name}"><i></i>{escape(row.title)}</span>' for row in both)
    drawn = torch.arange(min(2 * NUM_SHOWN, len(demo.ood)))  # in the random order that they came in
    return (
        "<h3>Patches of the unseen photograph, as they came</h3>"
        f"<p>What each method takes them for, and with which probability. {keys}<br>"
        "A dot: the method's own score sets off an alarm that one test digit in twenty sets off, too.</p>"
        f"{patch_gallery(both, demo.ood, drawn)}"
        "<h3>The patches of which the network itself is surest</h3>"
        f"{patch_gallery(both, demo.ood, extremes(before.ood.max_prob, largest=True))}"
        "<h3>The digits of which ScaLLA biased is least sure</h3>"
        "<p>What they are, and the largest probability. Red: misread.</p>"
        f"{digit_gallery(after, images, extremes(after.digits.entropy, largest=True, num=2 * NUM_SHOWN))}"
        "<h3>The digits of which it is surest</h3>"
        f"{digit_gallery(after, images, extremes(after.digits.entropy, largest=False))}"
        "<h3>Where its Gaussian score is wrong</h3><p>The digits with the largest scores, then the patches with the "
        "smallest: those that an alarm gets wrong first.</p>"
        f"{digit_gallery(after, images, extremes(score_in, largest=True))}"
        f"{patch_gallery(both, demo.ood, extremes(score_out, largest=False))}"
    )


def _scores(demo: Demo) -> str:
    return (
        f"<p>{words.detection(demo)}</p>{charts.roc_chart(demo.rows)}"
        "<p>The less the two colours overlap, the better the score.</p>"
        f"{charts.histograms(demo.rows)}"
    )


def _calibration(demo: Demo) -> str:
    return (
        "<p>Test digits in bins of the largest probability: how many of each bin are right. Bars on the diagonal are "
        "what a calibrated method has; below it, it is too sure. The fainter a bar, the fewer digits it stands for.</p>"
        f"{charts.reliability(demo.rows)}"
    )


def _facts(demo: Demo) -> str:
    settings = demo.settings
    facts = {
        "network": f"64 → 128 → 64 → 10 with ReLU, {demo.num_params:,} weights, {settings.num_epochs} epochs of Adam "
        f"on {len(demo.digits.train):,} digits, no weight decay: {demo.network_seconds:.1f} s",
        "ScaLLA": f"mirror surrogate with {settings.num_features} features, {settings.num_steps:,} steps of "
        f"{settings.batch_size} digits and {settings.batch_size} patches of the context; seed {settings.seed}",
        "biased": "the kernel between digits and context is zeroed, so that the variance away from the digits is the "
        "prior's",
        "prior precision": ", ".join(
            f"{row.title} {row.prior_precision:.3g}" for row in demo.rows if row.prior_precision is not None
        )
        + f", by the likelihood of {len(demo.digits.val)} held-out digits",
        "kernel error": "; ".join(
            f"{row.title} {row.kernel_error.error:.2f} (the best of that rank: {row.kernel_error.floor:.2f})"
            for row in demo.rows
            if row.kernel_error is not None
        ),
        "unseen": "no hyper-parameter was chosen on the photograph of the out-of-distribution patches; the network is "
        "one of three that were tried, with these numbers in view",
        "versions": ", ".join(f"{name} {version}" for name, version in environment.versions().items() if version),
        "hardware": f"{environment.hardware()['cpu']}, one thread of torch {torch.__version__}",
    }
    items = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())
    return f'<dl class="facts">{items}</dl>'
