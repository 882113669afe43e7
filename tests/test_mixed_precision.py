"""Steps in bfloat16 and on CUDA: what is lowered and what is not, and that the host does not wait for the device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cases import CASES, mlp, normal
from scalla import InputError, ScaLLA
from scalla.device import in_autocast, sent
from scalla.functional import FrozenNetwork, select_parameters
from scalla.jvp import JacobianProduct
from scalla.probes import draw_probe
from untouched import assert_untouched, same_bits, state_of

NUM = 64
X, Y = normal(NUM, 2), torch.arange(NUM) % 3
CONTEXT = normal(16, 2, seed=8) + 1
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here")

WAYS: dict[str, dict[str, Any]] = {
    "mirror": {},
    "trunk": {"surrogate": "trunk"},
    "several probes, biased": {"num_probes": 4, "context": CONTEXT, "bias": True},
    "directed": {"targets": "directed"},
    "trunk, directed": {"surrogate": "trunk", "targets": "directed"},
}
every_way = pytest.mark.parametrize("way", WAYS)


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp(width=16)


def fitted(model: nn.Module | None = None, *, surrogate: str = "mirror", **options: Any) -> ScaLLA:
    la = ScaLLA(model or network(), num_features=12, surrogate=surrogate)
    settings = {"num_steps": 100, "lr": 1e-2, "context": CONTEXT, **options}
    return la.fit(settings.pop("train_loader", [(X, Y)]), **settings)


class Dtypes(nn.Module):
    """A surrogate that notes the type of what its layer makes, in training and outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3 * 12)
        self.seen: dict[bool, set[torch.dtype]] = {True: set(), False: set()}

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x)
        self.seen[self.training].add(found.dtype)
        return found.view(-1, 3, 12)


# ---------------------------------------------------------------- bfloat16


@every_way
def test_the_kernel_error_is_that_of_float32_to_a_tenth(way: str) -> None:
    held = normal(40, 2, seed=3)
    errors = [fitted(**WAYS[way], autocast=dtype).kernel_error(held).error for dtype in (None, torch.bfloat16)]
    assert errors[1] < 1.1 * errors[0] + 0.01
    assert errors[1] != errors[0]


@every_way
def test_what_comes_out_is_in_float32_and_float64_and_the_network_untouched(way: str) -> None:
    model = network().train()
    before = state_of(model)
    la = fitted(model, **WAYS[way], num_steps=20, autocast=torch.bfloat16)
    assert_untouched(model, before)
    assert la.features(X[:3]).dtype == torch.float32
    assert la.posterior_precision.dtype == torch.float64
    assert la.surrogate is not None
    assert {p.dtype for p in la.surrogate.parameters()} == {torch.float32}
    with torch.no_grad():
        assert torch.equal(la.predict(X[:3]).mean, model.eval()(X[:3]))


@pytest.mark.parametrize("targets", ["probes", "directed"])
def test_the_surrogate_is_lowered_while_it_is_trained_and_then_no_more(targets: str) -> None:
    surrogate = Dtypes()
    options = {"num_steps": 4, "targets": targets, "val_loader": [(X, Y)], "score_every": 1, "lr": 1e-2}
    ScaLLA(network(), num_features=12, surrogate=surrogate).fit([(X, Y)], **options, autocast=torch.bfloat16)
    assert surrogate.seen == {True: {torch.bfloat16}, False: {torch.float32}}
    assert {p.grad for p in surrogate.parameters()} == {None}


@pytest.mark.parametrize("name", CASES)
def test_every_architecture_has_a_product_in_bfloat16_by_the_same_route(name: str) -> None:
    case = CASES[name]
    frozen, x = FrozenNetwork(case.model()), case.inputs(6)
    params = select_parameters(frozen, "all", x)
    exact, lowered = (JacobianProduct(frozen, params, x, autocast=dtype) for dtype in (None, torch.bfloat16))
    assert lowered.route == exact.route
    assert lowered.shares_primal == exact.shares_primal
    directions = [draw_probe(params, kind="rademacher", seed=0, step=s) for s in range(3)]
    found, wanted = lowered(x, directions), exact(x, directions)
    assert found.dtype == wanted.dtype
    assert 0 < (found - wanted).norm() < 0.1 * wanted.norm()
    u = normal(*wanted.shape[:2], seed=9)
    pulled = lowered.transposed(x, u)
    inner = sum((pulled[k] * directions[0][k]).sum() for k in params)
    scale = wanted[..., 0].norm() * u.norm()
    assert abs(inner - (u * wanted[..., 0]).sum()) < 0.05 * scale


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm([4, 4, 4]), nn.InstanceNorm2d(4, affine=True)]
)
def test_a_convolution_after_a_normalisation_keeps_forward_mode(norm: nn.Module) -> None:
    """Of bf16 inputs and float32 weights these make tangents that the next convolution does not take."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    frozen, x = FrozenNetwork(model), normal(4, 1, 6, 6)
    product = JacobianProduct(frozen, select_parameters(frozen, "all", x), x, autocast=torch.bfloat16)
    assert product.route.forward_mode
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_only_what_is_in_the_lower_dtype_is_brought_back() -> None:
    for dtype, wanted in ((torch.float32, torch.float32), (torch.float64, torch.float64)):
        layer = nn.Linear(2, 3, dtype=dtype)
        lowered = in_autocast(layer, torch.bfloat16, torch.device("cpu"))(X.to(dtype))
        assert lowered.dtype == wanted
        assert same_bits(lowered, layer(X.to(dtype))) == (dtype == torch.float64)  # which autocast leaves alone
    assert in_autocast(layer, None, torch.device("cpu")) is layer


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.float16, r"autocast=torch.float16, whose gradients underflow .* choose torch.bfloat16"),
        (torch.float64, r"autocast=torch.float64; wanted torch.bfloat16, or None"),
        ("bfloat16", r"autocast='bfloat16'; wanted torch.bfloat16, or None"),
        (True, r"autocast=True; wanted torch.bfloat16, or None"),
    ],
)
def test_another_dtype_is_refused(dtype: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fitted(autocast=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_network_that_autocast_would_leave_as_it_is_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=rf"for a network in {dtype}; wanted one in torch.float32"):
        fitted(network().to(dtype), autocast=torch.bfloat16)


# ---------------------------------------------------------------- resumed


class Stopped(Exception):
    """What interrupts a fit here."""


def stop(entry: Any) -> None:
    if entry.step == 7:
        raise Stopped


@every_way
def test_stopped_and_resumed_it_is_the_same_to_the_bit(way: str, tmp_path: Path) -> None:
    options = {**WAYS[way], "num_steps": 12, "autocast": torch.bfloat16}
    wanted = fitted(**options)
    stored = {"checkpoint_dir": tmp_path, "checkpoint_every": 0.0}
    with pytest.raises(Stopped):
        fitted(**options, **stored, callback=stop)
    with pytest.raises(InputError, match=r"other settings \(autocast differ\)"):
        fitted(**{**options, "autocast": None}, **stored, resume=True)
    found = fitted(**options, **stored, resume=True)
    assert same_bits(found.posterior_precision, wanted.posterior_precision)
    assert same_bits(found.features(X), wanted.features(X))


# ---------------------------------------------------------------- waiting for the device


class Readings(TorchDispatchMode):
    """Counts what would make the host wait for CUDA: a number read, or a shape that depends on values."""

    NAMES = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "allclose")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in self.NAMES
        return func(*args, **(kwargs or {}))


class OneBatch:
    """A loader that reads nothing itself, as those of PyTorch do for the seed of an epoch."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield self.x, torch.zeros(len(self.x))


def readings(num_steps: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[int, int]:
    """How often a fit of so many steps reads the device, and how often it logs."""
    # Adam reads its own count of steps, which it keeps on the CPU for that.
    monkeypatch.setattr(torch.optim, "Adam", torch.optim.SGD)
    if "context" in options:
        options["context"] = OneBatch(options["context"])
    with Readings() as mode:
        la = fitted(num_steps=num_steps, **{"lr": 1e-6, "context": None, **options})
    return mode.count, len(la.history)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@every_way
def test_the_loop_reads_the_device_where_it_logs_and_nowhere_else(
    way: str, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 40 steps, an entry each, to 160, an entry every four: four times the steps, the readings the same."""
    found = [readings(n, monkeypatch, **WAYS[way], autocast=dtype) for n in (40, 160)]
    assert found[0] == found[1]
    assert found[0][1] == 40
    assert found[0][0] >= 40


def test_reading_the_loss_at_every_step_is_counted() -> None:
    with Readings() as mode:
        assert math.isfinite(float(torch.ones(())))
        assert bool(torch.ones(3).any())
    assert mode.count == 2


def test_on_the_same_device_nothing_is_copied() -> None:
    assert sent(X, torch.device("cpu")) is X
    assert sent(X, torch.device("meta")).device.type == "meta"


@on_cuda
@every_way
def test_a_fit_on_cuda(way: str) -> None:
    model = network().cuda()
    held = normal(40, 2, seed=3)
    errors = [fitted(model, **WAYS[way], autocast=dtype).kernel_error(held).error for dtype in (None, torch.bfloat16)]
    assert errors[1] < 1.1 * errors[0] + 0.01


@on_cuda
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("way", ["mirror", "trunk", "several probes, biased"])
def test_no_step_on_cuda_waits_for_the_device(
    way: str, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two entries of a long fit, PyTorch raises at any wait."""
    from scalla import training

    steps = 0

    def counted(*args: Any) -> float:
        nonlocal steps
        steps += 1
        if steps == 10:
            torch.cuda.set_sync_debug_mode("error")
        if steps == 40:
            raise Stopped
        return real(*args)

    real = training.learning_rate
    monkeypatch.setattr(training, "learning_rate", counted)
    try:
        with pytest.raises(Stopped):
            fitted(network().cuda(), **WAYS[way], num_steps=2000, autocast=dtype)
    finally:
        torch.cuda.set_sync_debug_mode("default")
