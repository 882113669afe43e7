"""ScaLLA at the end of a training with Lightning: Trainer(callbacks=[ScaLLACallback(...)]).

Needs `pip install lightning`, or pytorch-lightning. A loop of one's own needs no callback: after it,
`ScaLLA(model).fit(train_loader)`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch import nn
from torch.utils.data import DataLoader

from scalla.method import ScaLLA
from scalla.types import InputError, Likelihood, Loader, NotFittedError

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback
        except ImportError as error:
            raise ImportError(
                f"scalla.integrations.lightning needs Lightning ({error}): pip install lightning"
            ) from error


@final
class ScaLLACallback(Callback):
    """Fits ScaLLA on the weights that the training ends with; `callback.la` is the result.

    With several devices the processes fit together. The training itself, and the network, are left as they are.

    Args:
        likelihood: "classification" or "regression".
        network: name of the LightningModule's submodule that is the network; by default the module itself, by its
            `forward`.
        train_loader: batches (x, y) or mappings; by default the trainer's own. Give one without augmentations if the
            trainer's has them.
        fit: options of `ScaLLA.fit`: context, bias, num_steps, …
        tune: choose the prior precision by the evidence after the fit.
        path: a file to save the result to.
        options: those of `ScaLLA`: num_features, surrogate, …

    Examples:
        >>> from scalla.integrations.lightning import ScaLLACallback
        >>> callback = ScaLLACallback("classification", fit={"num_steps": 1000}, num_features=50)
    """

    def __init__(
        self,
        likelihood: Likelihood = "classification",
        *,
        network: str | None = None,
        train_loader: Loader | None = None,
        fit: Mapping[str, Any] | None = None,
        tune: bool = False,
        path: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.likelihood: Likelihood = likelihood
        self.network = network
        self.train_loader = train_loader
        self.fit_options = dict(fit or {})
        self.tune = tune
        self.path = None if path is None else Path(path)
        self.options = options
        self._method: ScaLLA | None = None
        known = set(inspect.signature(ScaLLA.fit).parameters) - {"self", "train_loader"}
        if unknown := sorted(set(self.fit_options) - known):
            raise InputError(f"got fit={{...}} with {', '.join(unknown)}; choose from {', '.join(sorted(known))}")

    @property
    def la(self) -> ScaLLA:
        """The fitted ScaLLA."""
        if self._method is None or self._method.posterior is None:
            raise NotFittedError("this callback has fitted nothing yet; run Trainer.fit to its end first")
        return self._method

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """What could fail at the end of the training is looked at before it."""
        self._method = ScaLLA(self._network_of(pl_module), self.likelihood, **self.options)
        if self.path is not None and not self.path.absolute().parent.is_dir():
            raise InputError(f"got path={str(self.path)!r} in a folder that does not exist; make it first")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        la = self._method
        assert la is not None
        la.fit(self._loader_of(trainer), **self.fit_options)
        if self.tune:
            la.optimize_prior_precision(method="marglik")
        if self.path is not None and trainer.is_global_zero:
            la.save(self.path)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """The trainer has put its module back onto the CPU by now: so goes the rest."""
        la = self._method
        assert la is not None
        la.to(pl_module.device)

    def _network_of(self, pl_module: nn.Module) -> nn.Module:
        if self.network is None:
            return pl_module
        try:
            return pl_module.get_submodule(self.network)
        except AttributeError as error:
            names = ", ".join(name for name, _ in pl_module.named_children())
            raise InputError(
                f"got network={self.network!r}, which {type(pl_module).__name__} has not; its submodules are {names}"
            ) from error

    def _loader_of(self, trainer: Any) -> Loader:
        loader = trainer.train_dataloader if self.train_loader is None else self.train_loader
        if isinstance(loader, Mapping) or (
            isinstance(loader, list | tuple) and any(isinstance(part, DataLoader) for part in loader)
        ):
            raise InputError("the trainer has several training loaders; give ScaLLACallback the one: train_loader=...")
        return loader
