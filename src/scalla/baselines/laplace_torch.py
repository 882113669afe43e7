"""The way to laplace-torch: a lazy import, loaders as it wants them, and faster exact Jacobians for it."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from scalla.baselines.jacobians import exact_jacobians
from scalla.baselines.protocol import split_batch
from scalla.functional import FrozenNetwork, make_twin
from scalla.types import InputError, Inputs, Likelihood, Loader, ScallaError

#: the most numbers that the Jacobians of one batch may hold (256 MB in float32)
MAX_JACOBIAN_ELEMENTS = 2**26


@contextlib.contextmanager
def quiet(seed: int = 0) -> Iterator[None]:
    """A random state of its own, and without two warnings that nobody can act on."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        # By a dependency's import, and by torch itself at the first forward-mode derivative.
        warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated")
        # A reminder about the link, given whenever a prior precision is tuned: the evidence has no link.
        warnings.filterwarnings("ignore", message="By default `link_approx` is `probit`")
        # Loaders draw from the global state: their order must be a function of the seed.
        torch.manual_seed(seed)
        yield


def import_laplace() -> ModuleType:
    """laplace-torch, or an error that says how to get it."""
    try:
        with quiet():
            import laplace
    except ImportError as error:
        raise ScallaError(
            f"this baseline runs on laplace-torch >= 0.3, which could not be imported ({error}); "
            "install it with: pip install 'scalla[bench]'"
        ) from error
    if not hasattr(laplace, "ELLA"):
        raise ScallaError(
            "this baseline runs on laplace-torch >= 0.3, and an older one is installed; "
            "install it with: pip install -U 'scalla[bench]'"
        )
    return laplace


def own_copy(model: nn.Module) -> nn.Module:
    """A copy with weights of its own, in eval mode, all of them trainable.

    laplace-torch sets attributes on the network, switches modes, clears gradients and registers hooks.
    """
    return copy.deepcopy(make_twin(model)).requires_grad_(True)


def count_outputs(network: nn.Module, loader: DataLoader[Any], likelihood: Likelihood) -> int:
    """C, from two training inputs; a softmax of one logit is refused."""
    with torch.no_grad():
        num_outputs = network(tensor_inputs(split_batch(next(iter(loader)))[0][:2], network)).shape[-1]
    check_softmax(num_outputs, likelihood)
    return int(num_outputs)


def check_softmax(num_outputs: int, likelihood: Likelihood) -> None:
    if likelihood == "classification" and num_outputs < 2:
        raise InputError(
            "got a network with one output for classification; this baseline has a softmax over C ≥ 2 classes: "
            "give the network two outputs (−f/2, f/2)"
        )


def tensor_inputs(x: Inputs, model: nn.Module) -> Tensor:
    """x on the device and in the dtype of the model."""
    if not isinstance(x, Tensor):
        raise InputError(f"got inputs of type {type(x).__name__}; this baseline takes tensors only")
    weight = next(model.parameters())
    return x.to(weight.device, weight.dtype if x.is_floating_point() else None)


def as_dataloader(loader: Loader, *, batch_size: int | None = None) -> DataLoader[Any]:
    """The loader as a DataLoader over a dataset of known length, in batches of at most `batch_size`."""
    if isinstance(loader, DataLoader) and hasattr(loader.dataset, "__len__") and loader.batch_size is not None:
        if batch_size is None or loader.batch_size <= batch_size:
            return loader
        return DataLoader(loader.dataset, batch_size=batch_size, sampler=loader.sampler, collate_fn=loader.collate_fn)
    batches = [split_batch(batch) for batch in loader]
    if not batches:
        raise InputError("train_loader is empty; wanted at least one batch")
    if not all(isinstance(x, Tensor) for x, _ in batches):
        raise InputError("got batches whose inputs are not tensors; this baseline takes tensors only")
    size = batch_size or max(len(y) for _, y in batches)
    data = TensorDataset(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))
    return DataLoader(data, batch_size=size)


def per_example_backend() -> type[Any]:
    """laplace-torch's default backend with exact Jacobians input by input, and the full GGN made of them.

    Its own differentiates the batch as a whole (the same Jacobians for B times the work), and makes the full
    GGN by products with float32 unit vectors, which leaves a float64 network with float32 accuracy.
    """
    from laplace.curvature import CurvlinopsGGN, GGNInterface

    class PerExampleGGN(CurvlinopsGGN):
        def jacobians(  # type: ignore[override]
            self, x: Tensor, enable_backprop: bool = False
        ) -> tuple[Float[Tensor, "B C P"], Float[Tensor, "B C"]]:
            if enable_backprop:
                return super().jacobians(x, enable_backprop=True)
            network = FrozenNetwork(self.model)
            params = {k: p.detach() for k, p in self.params_dict.items()}
            return exact_jacobians(network, params, x), network(x)

        def full(self, x: Tensor, y: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return GGNInterface.full(self, x, y)

    return PerExampleGGN
