"""A fit that rows have in common: once, the same numbers, its cost in every row."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_images import tiny_images

from scalla import ScaLLA
from scalla.benchmark.methods import ROWS, Problem, seeded_fit
from scalla.benchmark.network import build_network
from scalla.benchmark.shared_fits import SharedFits


def fitted(folder: Path, fits: SharedFits | None, **changes: object) -> ScaLLA:
    images = tiny_images()
    problem = Problem(build_network(0), images.train, images.context, 3, fits=fits)
    row = ROWS["scalla_biased"]
    settings = {**row.settings_of("prior 1", "paper", quick=True), "num_steps": 3, **changes}
    method = seeded_fit(row, problem, settings)
    assert isinstance(method, ScaLLA)
    return method


def test_second_fit_is_the_first_one_with_its_cost(tmp_path: Path) -> None:
    x = tiny_images().test[0]
    first, second = (SharedFits(tmp_path / "fits", {"seed": 3}) for _ in range(2))
    made, alone = fitted(tmp_path, first), fitted(tmp_path, None)
    found = fitted(tmp_path, second, prior_precision=7.0)
    assert len(list((tmp_path / "fits").glob("*.safetensors"))) == 1
    assert first.spent_before.cpu == 0 < second.spent_before.cpu
    assert second.peak_before_mb > 0
    assert (float(made.prior_precision), float(found.prior_precision)) == (1.0, 7.0)
    assert torch.equal(made.features(x), alone.features(x))
    assert torch.equal(made.features(x), found.features(x))
    found.prior_precision = 1.0
    assert torch.equal(made(x), found(x))
    assert found.history == made.history


def test_other_settings_and_other_data_are_other_fits(tmp_path: Path) -> None:
    folder = tmp_path / "fits"
    fitted(tmp_path, SharedFits(folder, {"seed": 3}))
    fitted(tmp_path, SharedFits(folder, {"seed": 3}), num_steps=4)
    fitted(tmp_path, SharedFits(folder, {"seed": 4}))
    assert len(list(folder.glob("*.safetensors"))) == 3
