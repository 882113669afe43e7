"""A fit that stops anywhere and goes on is to the bit the fit that never stopped."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from cases import loader, mlp, normal
from scalla import FileFormatError, InputError, ScaLLA
from scalla.checkpoint import read_file
from scalla.resume import FILE_NAME
from untouched import same_bits

NUM, STEPS = 22, 12
X, Y = normal(NUM, 2), torch.arange(NUM) % 3
CONTEXT = normal(9, 2, seed=8) + 2


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp()


class Noisy(nn.Module):
    """A surrogate with random numbers and a state of its own: dropout and batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.body = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 15))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).view(-1, 3, 5)


SETTINGS: dict[str, dict[str, Any]] = {
    "mirror": {},
    "trunk, constant rate": {"surrogate": "trunk", "schedule": "constant"},
    "own, with dropout": {"surrogate": Noisy},
    "biased, several probes": {"context": [CONTEXT, CONTEXT - 5], "bias": True, "num_probes": 2},
    "early stop": {"val_loader": [(CONTEXT, None)], "score_every": 1, "patience": 4, "lr": 0.5},
    "gaussian probes, directed": {"probe": "gaussian", "targets": "directed"},
}
every_setting = pytest.mark.parametrize("name", SETTINGS)


class Stopped(Exception):
    """What interrupts a fit here."""


def unfitted(name: str) -> ScaLLA:
    options = SETTINGS[name]
    surrogate = options.get("surrogate", "mirror")
    return ScaLLA(
        network(),
        num_features=5,
        surrogate=surrogate() if isinstance(surrogate, type) else surrogate,
        probe=options.get("probe", "rademacher"),
    )


def fit(name: str, *, batches: Any = None, **options: Any) -> ScaLLA:
    own = {k: v for k, v in SETTINGS[name].items() if k not in ("surrogate", "probe")}
    settings = {"num_steps": STEPS, "lr": 1e-2, "checkpoint_every": 0.0, **own, **options}
    return unfitted(name).fit(batches or loader(X, Y, 5, shuffle=True), **settings)


def stop_at(step: int) -> Callable[[Any], None]:
    def callback(entry: Any) -> None:
        if entry.step >= step:
            raise Stopped

    return callback


def assert_same_fit(found: ScaLLA, wanted: ScaLLA) -> None:
    assert found.surrogate is not None
    assert wanted.surrogate is not None
    left, right = found.surrogate.state_dict(), wanted.surrogate.state_dict()
    assert left.keys() == right.keys()
    assert all(same_bits(left[k], right[k]) for k in left)
    assert found.posterior is not None
    assert wanted.posterior is not None
    assert same_bits(found.posterior.ggn, wanted.posterior.ggn)
    assert same_bits(found.posterior.loss, wanted.posterior.loss)
    assert found.n_data == wanted.n_data
    assert [(e.step, e.loss, e.lr, e.kernel_score) for e in found.history] == [
        (e.step, e.loss, e.lr, e.kernel_score) for e in wanted.history
    ]
    x = normal(6, 2, seed=20)
    assert same_bits(found.features(x), wanted.features(x))
    assert same_bits(found.predict(x).probs, wanted.predict(x).probs)


@every_setting
def test_stopped_at_random_steps_it_ends_to_the_bit_where_it_would_have(name: str, tmp_path: Path) -> None:
    """Stopped, and stopped again after having gone on."""
    wanted = fit(name)
    assert wanted.history[-1].step == STEPS or name == "early stop"
    last = wanted.history[-1].step
    for first in random.Random(name).sample(range(1, last + 1), 2):
        folder = tmp_path / f"{first}"
        with pytest.raises(Stopped):
            fit(name, checkpoint_dir=folder, callback=stop_at(first))
        with pytest.raises(Stopped):
            fit(name, checkpoint_dir=folder, resume=True, callback=stop_at((first + last + 1) // 2))
        torch.manual_seed(first)  # a new process has another random state
        assert_same_fit(fit(name, checkpoint_dir=folder, resume=True), wanted)
        assert list(folder.iterdir()) == []


def test_between_two_checkpoints_the_steps_are_taken_again(tmp_path: Path) -> None:
    """The clock decides when a checkpoint is written, never what comes out."""
    wanted = fit("mirror", num_steps=40)

    def callback(entry: Any) -> None:
        if entry.step == 30:
            raise Stopped

    with pytest.raises(Stopped):
        fit("mirror", num_steps=40, checkpoint_dir=tmp_path, checkpoint_every=0.02, callback=callback)
    assert_same_fit(fit("mirror", num_steps=40, checkpoint_dir=tmp_path, resume=True), wanted)


class Fails(Dataset[Any]):
    """Data in order, whose reading fails after so many inputs."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.left -= 1
        if self.left < 0:
            raise Stopped
        return X[index], Y[index]


@pytest.mark.parametrize("after", [0, 3, 9, 14, 21])
def test_stopped_while_the_precision_is_summed(after: int, tmp_path: Path) -> None:
    batches = torch.utils.data.DataLoader(Fails(10**6), batch_size=5)
    wanted = fit("mirror", batches=batches)
    # Twelve steps on batches of 5, 5, 5, 5, 2 read these; the first batch of the precision is there already.
    read = 10**6 - batches.dataset.left - NUM  # type: ignore[attr-defined]
    short = torch.utils.data.DataLoader(Fails(read + after), batch_size=5)
    with pytest.raises(Stopped):
        fit("mirror", batches=short, checkpoint_dir=tmp_path)
    _, meta = read_file(tmp_path / FILE_NAME, kind="fit checkpoint")
    assert meta["training"]["step"] == STEPS
    assert (meta["ggn"] or {"num_batches": 0})["num_batches"] == after // 5
    resumed = fit("mirror", batches=torch.utils.data.DataLoader(Fails(10**6), batch_size=5),
                  checkpoint_dir=tmp_path, resume=True)  # fmt: skip
    assert_same_fit(resumed, wanted)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_writes_the_checkpoint_and_leaves(number: int, tmp_path: Path) -> None:
    before = signal.getsignal(number)

    def callback(entry: Any) -> None:
        if entry.step == 5:
            signal.raise_signal(number)

    with pytest.raises(KeyboardInterrupt, match=r"stopped by a signal; fit\(..., resume=True\) goes on from"):
        fit("mirror", checkpoint_dir=tmp_path, checkpoint_every=1e6, callback=callback)
    assert signal.getsignal(number) == before
    _, meta = read_file(tmp_path / FILE_NAME, kind="fit checkpoint")
    assert meta["training"]["step"] == 5
    assert_same_fit(fit("mirror", checkpoint_dir=tmp_path, resume=True), fit("mirror"))


def test_a_checkpoint_does_not_change_the_fit_and_is_gone_afterwards(tmp_path: Path) -> None:
    wanted = fit("mirror")
    assert_same_fit(fit("mirror", checkpoint_dir=tmp_path / "new" / "folder"), wanted)
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    assert_same_fit(fit("mirror", checkpoint_dir=tmp_path, resume=True), wanted)  # nothing to go on from


def stopped(folder: Path, name: str = "mirror", **options: Any) -> Path:
    with pytest.raises(Stopped):
        fit(name, checkpoint_dir=folder, callback=stop_at(6), **options)
    return folder / FILE_NAME


def test_without_resume_it_starts_over(tmp_path: Path) -> None:
    stopped(tmp_path)
    seen: list[int] = []
    fit("mirror", checkpoint_dir=tmp_path, callback=lambda entry: seen.append(entry.step))
    assert seen[0] == 1


@pytest.mark.parametrize(
    "options",
    [{"num_steps": 13}, {"lr": 2e-2}, {"num_probes": 2}, {"schedule": "constant"}, {"context": CONTEXT}],
    ids=["num_steps", "lr", "num_probes", "schedule", "num_groups"],
)
def test_other_settings_are_refused_and_the_checkpoint_stays(
    options: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = stopped(tmp_path)
    content = path.read_bytes()
    name = request.node.callspec.id
    with pytest.raises(InputError, match=rf"fit with other settings \({name} differ\); give the same settings"):
        fit("mirror", checkpoint_dir=tmp_path, resume=True, **options)
    assert path.read_bytes() == content


def test_another_network_seed_or_size_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path)
    other = network()
    with torch.no_grad():
        other[0].weight[0, 0] += 1e-3
    for model, settings, name in (
        (other, {}, "weights"),
        (network(), {"seed": 1}, "seed"),
        (network(), {"num_features": 6}, "num_features"),
        (network(), {"surrogate": "trunk"}, "surrogate, trained"),
        (network(), {"surrogate_options": {"start": "random"}}, "surrogate_options"),
        (network(), {"probe": "gaussian"}, "probe"),
        (network(), {"parameters": ["2.*"]}, "parameters"),
    ):
        la = ScaLLA(model, **{"num_features": 5, **settings})
        with pytest.raises(InputError, match=rf"other settings \({name} differ\)"):
            la.fit(loader(X, Y, 5), num_steps=STEPS, lr=1e-2, checkpoint_dir=tmp_path, resume=True)


def test_another_surrogate_of_ones_own_is_refused(tmp_path: Path) -> None:
    path = stopped(tmp_path, "own, with dropout")
    content = path.read_bytes()
    frozen, wider = Noisy(), Noisy()
    frozen.body[0].requires_grad_(False)
    wider.body[0], wider.body[1], wider.body[4] = nn.Linear(2, 9), nn.BatchNorm1d(9), nn.Linear(9, 15)
    before = wider.body[0].weight.detach().clone()
    for surrogate, kind, message in (
        (frozen, InputError, r"other settings \(trained differ\)"),
        (wider, FileFormatError, r"does not fit this surrogate: 'body.0.bias' is \(\(8,\), .* in the file"),
    ):
        la = ScaLLA(network(), num_features=5, surrogate=surrogate)
        with pytest.raises(kind, match=message):
            la.fit(loader(X, Y, 5), num_steps=STEPS, lr=1e-2, checkpoint_dir=tmp_path, resume=True)
    assert torch.equal(wider.body[0].weight, before)
    assert path.read_bytes() == content


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    path = stopped(tmp_path)
    content = path.read_bytes()
    for damaged in (content[:-3], content[: len(content) // 2], b"", content[:-1] + bytes([content[-1] ^ 1])):
        path.write_bytes(damaged)
        with pytest.raises(FileFormatError, match="damaged"):
            fit("mirror", checkpoint_dir=tmp_path, resume=True)


def test_a_checkpoint_is_never_one_of_numbers_that_are_not_finite(tmp_path: Path) -> None:
    """A NaN that comes later leaves the last good checkpoint, and once it is mended the fit goes on."""
    x = X[:10].clone()
    bad = x.clone()
    bad[0] = torch.nan
    good = [(x, Y[:10])] * 6
    with pytest.raises(InputError, match="matching loss became nan"):
        fit("mirror", num_steps=90, batches=[*good[:4], (bad, Y[:10]), good[5]], checkpoint_dir=tmp_path)
    tensors, meta = read_file(tmp_path / FILE_NAME, kind="fit checkpoint")
    assert all(bool(torch.isfinite(t).all()) for t in tensors.values())
    assert meta["training"]["step"] == 4
    resumed = fit("mirror", num_steps=90, batches=good, checkpoint_dir=tmp_path, resume=True)
    assert_same_fit(resumed, fit("mirror", num_steps=90, batches=good))


def test_resume_wants_a_folder() -> None:
    with pytest.raises(InputError, match="resume=True without checkpoint_dir; name the folder of the earlier fit"):
        fit("mirror", resume=True)
