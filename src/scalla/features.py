"""x → f(x) and g(x): the frozen network beside the surrogate, in the scale of the kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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

_DEPENDS_ON_MODE = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)


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
        batch = train.peek()
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

    def trainable(self) -> list[nn.Parameter]:
        """The surrogate's weights that a fit may change: never those of the network itself."""
        assert self.surrogate is not None
        of_network = {id(p) for p in self.plain.model.parameters()}
        return [p for p in self.surrogate.parameters() if p.requires_grad and id(p) not in of_network]

    def set_training(self, mode: bool) -> None:
        """The mode of the surrogate's own modules; those that it shares with the network keep theirs."""
        assert self.surrogate is not None
        of_network = {id(m) for m in self.plain.model.modules()}
        shared = [(m, m.training) for m in self.surrogate.modules() if id(m) in of_network]
        if mode and any(training and isinstance(m, _DEPENDS_ON_MODE) for m, training in shared):
            raise InputError(
                "the surrogate holds layers of the network itself that are in training mode (dropout, batch "
                "normalisation), and training would change them; call model.eval() first, or give the surrogate a copy "
                "of these layers (copy.deepcopy)"
            )
        self.surrogate.train(mode)
        for module, theirs in shared:
            module.training = theirs

    # -- evaluation --

    def raw(self, x: Inputs) -> Float[Tensor, "B C m"]:
        """The surrogate's own output, as it is trained (against the normalised kernel), with gradients."""
        x = self.plain.prepare(x)
        return self._surrogate_of(x, self.penultimate(x) if isinstance(self.surrogate, Trunk) else None)

    def penultimate(self, x: Inputs) -> Float[Tensor, "B h"]:
        """What `trunk` reads: the input of the network's last linear layer."""
        return self.network(x)[:, self.num_outputs :]

    def __call__(self, x: Inputs) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B C m"]]:
        """f(x) and g(x): one pass of the network, one of the surrogate (of its head alone for `trunk`)."""
        if not torch.compiler.is_compiling():
            self.network.sync()
            check_inputs(x, "this batch")
        x = self.plain.prepare(x)
        outputs, shared = self.network.raw(x), None
        if isinstance(self.surrogate, Trunk):
            outputs, shared = outputs[:, : self.num_outputs], outputs[:, self.num_outputs :]
        features = self._surrogate_of(x, shared)
        self.check(features, outputs.shape[0])  # len() would fix B where the batch size is symbolic
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


@contextlib.contextmanager
def undone_on_error(module: nn.Module) -> Iterator[None]:
    """Weights, buffers, modes and gradients of `module` as they were, if what happens inside fails."""
    tensors = [(t, t.detach().clone()) for t in (*module.parameters(), *module.buffers())]
    modes = [(m, m.training) for m in module.modules()]
    gradients = [(p, p.grad) for p in module.parameters()]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for tensor, before in tensors:
                tensor.copy_(before)
        for part, training in modes:
            part.training = training
        for p, gradient in gradients:
            p.grad = gradient
        raise
