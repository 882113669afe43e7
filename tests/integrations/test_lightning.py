"""A callback's result is that of the same fit by hand, and the training is what it would be without it."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cases import loader, mlp, normal
from scalla import InputError, NotFittedError, ScaLLA

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl

from scalla.integrations.lightning import ScaLLACallback

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated"),
]
SMALL: dict[str, Any] = {"num_features": 6, "seed": 3}


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(mlp(3), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def on_train_end(self) -> None:  # after the callbacks'
        self.modes_at_end = {m.training for m in self.modules()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data() -> DataLoader[Any]:
    return loader(normal(32, 2), torch.arange(32) % 3, 8)


def train(*callbacks: Any) -> Classifier:
    module = Classifier()
    trainer(*callbacks).fit(module, data())
    return module


def trainer(*callbacks: Any) -> pl.Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return pl.Trainer(
        max_epochs=2, callbacks=list(callbacks), accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def test_it_is_the_fit_that_one_would_make_by_hand(tmp_path: Path) -> None:
    callback = ScaLLACallback(fit={"num_steps": 4}, tune=True, path=tmp_path / "la.safetensors", **SMALL)
    with pytest.raises(NotFittedError, match=r"run Trainer\.fit to its end first"):
        _ = callback.la
    module, alone = train(callback), train()
    for name, weight in alone.state_dict().items():
        assert torch.equal(module.state_dict()[name], weight), name
    assert module.modes_at_end == {True}
    by_hand = ScaLLA(module, **SMALL).fit(data(), num_steps=4).optimize_prior_precision(method="marglik")
    x = normal(5, 2, seed=9)
    assert callback.la.model is module
    assert torch.equal(callback.la(x), by_hand(x))
    assert callback.la.n_data == 32
    assert float(callback.la.prior_precision) != 1
    assert torch.equal(ScaLLA.load(tmp_path / "la.safetensors", module)(x), by_hand(x))


def test_a_submodule_and_a_loader_of_ones_own() -> None:
    class Wrapped(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("not the network")

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    own = loader(normal(16, 2, seed=8), torch.arange(16) % 3, 8)
    callback = ScaLLACallback(network="net", train_loader=own, fit={"num_steps": 2}, **SMALL)
    module = Wrapped()
    trainer(callback).fit(module, data())
    assert callback.la.n_data == 16
    assert torch.equal(callback.la(normal(3, 2)), ScaLLA(module.net, **SMALL).fit(own, num_steps=2)(normal(3, 2)))


def test_mistakes_are_found_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"fit=\{\.\.\.\} with steps; choose from autocast, bias, callback, "):
        ScaLLACallback(fit={"steps": 3})
    never = pytest.MonkeyPatch()
    never.setattr(Classifier, "training_step", lambda *a: pytest.fail("the training began"))
    try:
        with pytest.raises(InputError, match="got num_features=0"):
            train(ScaLLACallback(num_features=0))
        with pytest.raises(InputError, match="network='head', which Classifier has not; its submodules are net"):
            train(ScaLLACallback(network="head"))
        with pytest.raises(InputError, match="in a folder that does not exist; make it first"):
            train(ScaLLACallback(path=tmp_path / "none" / "la.safetensors"))
    finally:
        never.undo()


def test_several_loaders_are_refused() -> None:
    class Two(Classifier):
        def training_step(self, batch: Any, index: int) -> Tensor:
            return super().training_step(batch["a"], index)

    with pytest.raises(InputError, match="several training loaders; give ScaLLACallback the one"):
        trainer(ScaLLACallback(**SMALL)).fit(Two(), {"a": data(), "b": data()})


def test_without_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "scalla.integrations.lightning")
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"needs Lightning .*pip install lightning"):
        import scalla.integrations.lightning  # noqa: F401
