"""x → f(x) and g(x): the frozen network beside the surrogate, in the scale of the kernel."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scalla.batches import EndlessBatches, inputs_of, labels_of
from scalla.functional import (
    FrozenNetwork,
    ParameterFilter,
    Params,
    batch_size,
    call,
    check_outputs,
    find_head,
    first_rows,
    select_parameters,
)
from scalla.ggn import check_finite, check_inputs
from scalla.likelihoods import check_labels
from scalla.surrogate import Mirror, Trunk, build_surrogate
from scalla.types import InputError, Inputs, Likelihood


class FeatureMap:
    """The network with the weights that its kernel is taken over, and the surrogate with its scale."""

    def __init__(
        self, model: nn.Module, params: Params, *, num_outputs: int, num_features: int, dict_key_y: str = "labels"
    ) -> None:
        #: the network alone, for kernels
        self.plain = FrozenNetwork(model, dict_key_y=dict_key_y)
        #: what predictions run: the network, with its penultimate features beside its outputs for `trunk`
        self.network = self.plain
        self.params = params
        self.num_outputs, self.num_features = num_outputs, num_features
        self.surrogate: nn.Module | None = None
        self.head: str | None = None
        self.scale = 1.0

    @staticmethod
    def of_data(
        model: nn.Module,
        train: EndlessBatches,
        *,
        likelihood: Likelihood,
        num_features: int,
        parameters: ParameterFilter,
        dict_key_y: str,
    ) -> FeatureMap:
        """For the network and the first batch, both checked."""
        batch = train.next()
        train.move_to(0, 0)
        x = inputs_of(batch)
        check_inputs(x, "the first training batch")
        network = FrozenNetwork(model, dict_key_y=dict_key_y)
        outputs = network(x)
        check_outputs(outputs, batch_size(x))
        check_finite(outputs, "outputs of the network")
        check_labels(likelihood, outputs, labels_of(batch, dict_key_y))
        params = select_parameters(network, parameters, x)
        return FeatureMap(
            model, params, num_outputs=outputs.shape[-1], num_features=num_features, dict_key_y=dict_key_y
        )

    # -- surrogate --

    def build(self, kind: str, x: Inputs, options: dict[str, Any], seed: int) -> nn.Module:
        """A new `mirror` or `trunk` for this network, ready to be trained."""
        self.head = find_head(self.plain, x)
        built = self.rebuild(kind, self.head, options)
        built.initialise(self.plain, first_rows(x, 256), seed)
        return built

    def rebuild(self, kind: str, head: str, options: dict[str, Any]) -> Mirror | Trunk:
        """The same, its weights still to be set."""
        self.head = head
        built = build_surrogate(kind, self.plain, head, self.num_outputs, self.num_features, options)
        self.install(built)
        return built

    def install(self, surrogate: nn.Module) -> None:
        self.surrogate = surrogate
        if isinstance(surrogate, Trunk):
            self.network = FrozenNetwork(self.plain.model, dict_key_y=self.plain.dict_key_y, tap=surrogate.head_name)

    # -- evaluation --

    def raw(self, x: Inputs) -> Float[Tensor, "B C m"]:
        """The surrogate's own output, as it is trained (against the normalised kernel), with gradients."""
        x = self.plain.prepare(x)
        shared = self.network(x)[:, self.num_outputs :] if isinstance(self.surrogate, Trunk) else None
        return self._surrogate_of(x, shared)

    def __call__(self, x: Inputs) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B C m"]]:
        """f(x) and g(x): one pass of the network, one of the surrogate (of its head alone for `trunk`)."""
        if not torch.compiler.is_compiling():
            self.network.sync()
        x = self.plain.prepare(x)
        outputs, shared = self.network.raw(x), None
        if isinstance(self.surrogate, Trunk):
            outputs, shared = outputs[:, : self.num_outputs], outputs[:, self.num_outputs :]
        features = self._surrogate_of(x, shared)
        self.check(features, len(outputs))
        if self.scale != 1.0:
            features = features * self.scale
        return outputs.to(features.dtype), features

    def _surrogate_of(self, x: Inputs, shared: Tensor | None) -> Tensor:
        assert self.surrogate is not None
        if shared is not None:
            return self.surrogate(shared)
        return self.surrogate(x) if isinstance(self.surrogate, Mirror) else call(self.surrogate, x)

    def check(self, features: Any, num_inputs: int) -> None:
        wanted = (num_inputs, self.num_outputs, self.num_features)
        if not isinstance(features, Tensor) or tuple(features.shape) != wanted:
            found = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise InputError(
                f"the surrogate gave {found} for {num_inputs} inputs; wanted (B, C, m) = {wanted}, with C = "
                f"{self.num_outputs} from the network and m = num_features = {self.num_features}"
            )

    def sync(self) -> None:
        """Follow the network to another device or dtype."""
        self.plain.sync()
        self.network.sync()
        self.params = {k: p.detach() for k, p in self.plain.model.named_parameters() if k in self.params}
