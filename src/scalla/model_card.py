"""The README.md of a repository on the Hugging Face Hub: what was fitted, and how good it measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from scalla.calibration import Measured

#: metric → what it is called, and how its number is written
NAMES = {
    "accuracy": ("Accuracy", "{:.2%}"),
    "nll": ("Negative log-likelihood", "{:.4f}"),
    "ece": ("Expected calibration error (15 bins)", "{:.4f}"),
    "brier": ("Brier score", "{:.4f}"),
    "rmse": ("Root mean squared error", "{:.4g}"),
    "crps": ("Continuous ranked probability score", "{:.4g}"),
    "coverage_95": ("Coverage of the 95 % interval", "{:.2%}"),
    "ood_auroc_predictive_entropy": ("OOD AUROC, predictive entropy", "{:.4f}"),
    "ood_auroc_gaussian_entropy": ("OOD AUROC, Gaussian entropy", "{:.4f}"),
}

TEXT = """\
# {title}

`{network}` with uncertainty by ScaLLA (scalable linearized Laplace): {gives}, from the
network as it was trained.

## Use

```python
from scalla import ScaLLA

la = ScaLLA.from_pretrained({source!r}{model})
prediction = la.predict(x)  # .mean, .var, {reads}
score = la.ood_score(x)  # larger: more out of distribution
```

{about_model}

## What was fitted

| | |
| --- | --- |
{facts}

## Measured

{measured}
"""
UNMEASURED = "Nothing was measured when this was written (`save_pretrained(..., val_loader=...)` does it)."
GIVES = {
    "classification": ("calibrated probabilities and an out-of-distribution score", ".probs, .entropy"),
    "regression": ("error bars and an out-of-distribution score", ".var_with_noise"),
}


def model_card(
    config: Mapping[str, Any],
    measured: Measured | None,
    *,
    source: str,
    dataset: str,
    ood_dataset: str,
    license: str | None,
    builds_itself: bool,
) -> str:
    """Front matter for the Hub and a page for people; `config` is the block "scalla" of config.json."""
    gives, reads = GIVES[config["likelihood"]]
    about_model = (
        "The network is built from `config.json`."
        if builds_itself
        else f"`model` is a `{config['network']}` with any weights; those of this repository are put into a copy of it."
    )
    text = TEXT.format(
        title=source,
        network=config["network"],
        gives=gives,
        reads=reads,
        source=source,
        model="" if builds_itself else ", model",
        about_model=about_model,
        facts="\n".join(f"| {name} | {value} |" for name, value in _facts(config)),
        measured=UNMEASURED if measured is None else _table(measured, dataset, ood_dataset),
    )
    return f"---\n{_front_matter(config, measured, source, dataset, license)}\n---\n\n{text}"


def _facts(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    levels = config["sigma_noise"]
    facts = [
        ("likelihood", config["likelihood"]),
        ("outputs C", config["num_outputs"]),
        ("weights in the kernel P", f"{config['num_params']:,}"),
        ("features m", config["num_features"]),
        ("surrogate", config["surrogate"]),
        ("inputs in the posterior N", f"{config['num_data']:,}"),
        ("prior precision δ", f"{config['prior_precision']:.4g}"),
        ("temperature T", f"{config['temperature']:.4g}"),
        ("scalla", config["version"]),
    ]
    if config["likelihood"] == "regression":
        levels = ", ".join(f"{v:.4g}" for v in (levels if isinstance(levels, list) else [levels]))
        facts.insert(-1, ("observation noise σ", levels))
    return facts


def _table(measured: Measured, dataset: str, ood_dataset: str) -> str:
    of = f"On {measured.num_inputs:,} inputs ({dataset})"
    if measured.num_ood:
        of += f", and for OOD against {measured.num_ood:,} others ({ood_dataset})"
    lines = [f"{of}.", "", "| | network alone | ScaLLA |", "| --- | ---: | ---: |"]
    for key, (name, form) in NAMES.items():
        if key in measured.scalla:
            cells = [form.format(side[key]) if key in side else "–" for side in (measured.network, measured.scalla)]
            lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def _front_matter(
    config: Mapping[str, Any], measured: Measured | None, source: str, dataset: str, license: str | None
) -> str:
    """YAML, of which JSON is a part."""
    facts: dict[str, Any] = {
        "library_name": "scalla",
        "tags": ["scalla", "uncertainty", "calibration", "laplace-approximation", "out-of-distribution-detection"],
    }
    if license is not None:
        facts["license"] = license
    if measured is not None:
        results = [
            {"type": key, "name": NAMES[key][0], "value": value} for key, value in sorted(measured.scalla.items())
        ]
        task = {"type": config["likelihood"]}
        data = {"type": dataset, "name": dataset}
        facts["model-index"] = [{"name": source, "results": [{"task": task, "dataset": data, "metrics": results}]}]
    return "\n".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in facts.items())
