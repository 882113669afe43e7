"""MSP (Hendrycks and Gimpel 2017): the maximum softmax probability."""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scalla.functional import FrozenNetwork
from scalla.types import Inputs, Loader


@final
class MSP:
    """1 − max_c softmax(f(x))_c."""

    def __init__(self, model: nn.Module) -> None:
        self._network = FrozenNetwork(model)

    def fit(self, train_loader: Loader, *, context: Loader | None = None, progress_bar: bool = False) -> MSP:
        """Nothing to fit."""
        return self

    def score(self, x: Inputs) -> Float[Tensor, " B"]:
        """From the odds, so that confident inputs keep an order."""
        logits = self._network(x).double()
        largest, index = logits.max(-1)
        others = logits.scatter(-1, index[:, None], -torch.inf)
        # 1 − p = o / (1 + o), with o the odds of all the other classes.
        return torch.sigmoid(torch.logsumexp(others, -1) - largest)
