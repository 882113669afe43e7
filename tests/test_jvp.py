"""J(x) v against dense Jacobians, on every route, and PyTorch's switches left as they were."""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import CASES, BagClassifier, Case, mlp, normal, old_weight_norm
from oracles import dense_jacobian, outputs_of
from scalla.functional import FrozenNetwork, select_parameters
from scalla.jvp import ROUTES, JacobianProduct, jacobian, switched
from scalla.probes import draw_probe
from scalla.types import InputError, UnsupportedModuleError
from untouched import process_state

NUM = 5


def reference(case: Case) -> nn.Module:
    """The case's network in float64, which can be copied (the old `weight_norm` only after a forward pass)."""
    model = case.model().eval()
    with torch.no_grad():
        outputs_of(model, case.inputs(2))
    return model.double()


def directions_of(params: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    return [draw_probe(params, kind="gaussian", seed=0, step=s) for s in range(count)]


def dense_product(case: Case, directions: list[dict[str, Tensor]]) -> Tensor:
    """(B, C, S): the dense Jacobian times each direction."""
    dense = dense_jacobian(reference(case), case.inputs(NUM))
    flat = torch.stack([torch.cat([v.double().flatten() for v in d.values()]) for d in directions], -1)
    return dense @ flat


def product_of(model: nn.Module, x: Any, parameters: Any = "all") -> JacobianProduct:
    network = FrozenNetwork(model)
    return JacobianProduct(network, select_parameters(network, parameters, x), x)


def assert_matches(case: Case, dtype: torch.dtype, tolerance: float) -> JacobianProduct:
    model, x = case.model(dtype=dtype), case.inputs(NUM)
    product = product_of(model, x)
    directions = directions_of(product.params, 3)
    found, wanted = product(x, directions), dense_product(case, directions)
    assert found.shape == (NUM, case.num_outputs, 3)
    assert found.dtype == dtype
    assert float((found.double() - wanted).abs().max() / wanted.abs().max()) < tolerance
    alone = product(x, directions[1:2])  # a probe by itself, without vmap
    assert float((alone[..., 0].double() - wanted[..., 1]).abs().max() / wanted.abs().max()) < tolerance
    return product


@pytest.mark.parametrize("name", CASES)
def test_equals_the_dense_jacobian_in_float64(name: str) -> None:
    assert_matches(CASES[name], torch.float64, 1e-12)


# What each network needs in float32: no forward rule for fused attention, for mkldnn's LSTM, for `weight_norm`.
ROUTE_OF = {
    "mlp": "forward",
    "resnet": "forward",
    "transformer_encoder": "forward, plain attention",
    "multihead_attention": "forward, plain attention",
    "fused_attention": "forward, plain attention",
    "bert": "forward, plain attention",
    "weight_norm_old": "double vjp",
    "weight_norm": "double vjp",
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_dense_jacobian_in_float32_by_the_first_route_that_serves(name: str) -> None:
    product = assert_matches(CASES[name], torch.float32, 3e-6)
    assert product.route.name == ROUTE_OF.get(name, product.route.name)


def test_an_lstm_is_differentiated_without_mkldnn() -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch is built without mkldnn, whose LSTM has no forward mode")
    product = assert_matches(CASES["lstm"], torch.float32, 3e-6)
    assert product.route.without_mkldnn


@pytest.mark.parametrize("name", ["mlp", "resnet", "transformer_encoder", "lstm", "weight_norm", "dict_keywords"])
def test_bf16_networks_to_the_precision_of_bf16(name: str) -> None:
    assert_matches(CASES[name], torch.bfloat16, 0.1)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_every_route_gives_the_same_product(route: Any) -> None:
    case = CASES["mlp"]
    product = product_of(case.model(dtype=torch.float64), case.inputs(NUM))
    product.route, product.shares_primal = route, False
    directions = directions_of(product.params, 2)
    torch.testing.assert_close(
        product(case.inputs(NUM), directions), dense_product(case, directions), rtol=1e-12, atol=1e-12
    )


def test_some_weights_only() -> None:
    case = CASES["mlp"]
    product = product_of(case.model(dtype=torch.float64), case.inputs(NUM), ["2.*"])
    directions = directions_of(product.params, 2)
    assert list(product.params) == ["2.weight", "2.bias"]
    dense = dense_jacobian(reference(case), case.inputs(NUM), ["2.weight", "2.bias"])
    flat = torch.stack([torch.cat([v.flatten() for v in d.values()]) for d in directions], -1)
    torch.testing.assert_close(product(case.inputs(NUM), directions), dense @ flat, rtol=1e-12, atol=1e-12)


def test_dropout_is_off_and_batch_statistics_are_not_used() -> None:
    for name in ("dropout", "cnn_batchnorm"):
        case = CASES[name]
        model = case.model(dtype=torch.float64).train()
        before = copy.deepcopy(model.state_dict())
        product = product_of(model, case.inputs(NUM))
        directions = directions_of(product.params, 1)
        torch.testing.assert_close(
            product(case.inputs(NUM), directions), dense_product(case, directions), rtol=1e-12, atol=1e-12
        )
        assert model.training
        assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())


# ---------------------------------------------------------------- the exact Jacobian


@pytest.mark.parametrize("name", ["one_logit", "cnn_batchnorm", "lstm", "weight_norm_old", "dict_keywords", "bert"])
def test_jacobian_by_parameter(name: str) -> None:
    case = CASES[name]
    network = FrozenNetwork(case.model(dtype=torch.float64))
    x = case.inputs(3)
    params = select_parameters(network, "all", x)
    found = jacobian(network, params, x)
    assert {k: j.shape for k, j in found.items()} == {k: (3, case.num_outputs, *p.shape) for k, p in params.items()}
    flat = torch.cat([j.flatten(2) for j in found.values()], -1)
    torch.testing.assert_close(flat, dense_jacobian(reference(case), x), rtol=1e-12, atol=1e-12)


def test_weights_that_the_output_does_not_depend_on_have_a_zero_jacobian() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 3), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    x = normal(4, 2, dtype=torch.float64)
    network = FrozenNetwork(Unused().double())
    params = select_parameters(network, "all", x)
    assert float(jacobian(network, params, x)["unused.weight"].abs().max()) == 0
    product = JacobianProduct(network, params, x)
    only_unused = {k: torch.full_like(p, float(k.startswith("unused"))) for k, p in params.items()}
    assert float(product(x, [only_unused]).abs().max()) == 0


# ---------------------------------------------------------------- what cannot be differentiated


def test_embedding_bag_is_named_with_its_remedy() -> None:
    ids = torch.randint(10, (NUM, 4))
    with pytest.raises(UnsupportedModuleError, match=r"module 'words' \(EmbeddingBag\).*parameters=") as caught:
        product_of(BagClassifier(), ids)
    for route in ROUTES:
        assert route.name in str(caught.value)


class AttentionThenBag(nn.Module):
    """What has a slower kernel with a forward rule stands before what has none."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.words = nn.EmbeddingBag(10, 3, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        weights = self.attention(x, x, x, need_weights=False)[0][..., 0]
        ids = torch.arange(weights.shape[1]).expand(len(x), -1)
        return self.words(ids, per_sample_weights=weights)


def test_a_module_that_only_needs_a_slower_kernel_is_not_blamed() -> None:
    with pytest.raises(UnsupportedModuleError, match=r"no Jacobian-vector product through module 'words'"):
        product_of(AttentionThenBag(), normal(NUM, 4, 8))


def test_the_remedy_for_embedding_bag_works() -> None:
    ids = torch.randint(10, (NUM, 4))
    model = BagClassifier().double()
    product = product_of(model, ids, "last_layer")
    directions = directions_of(product.params, 2)
    dense = dense_jacobian(model, ids, ["head.weight", "head.bias"])
    flat = torch.stack([torch.cat([v.flatten() for v in d.values()]) for d in directions], -1)
    torch.testing.assert_close(product(ids, directions), dense @ flat, rtol=1e-12, atol=1e-12)


class _WrongForward(torch.autograd.Function):
    """x ↦ 2x whose forward-mode rule says 3x, as a kernel with a bug would."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return 3 * tangent

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return 2 * cotangent


class _WrongBackward(_WrongForward):
    """Reverse mode disagrees with itself: the rule is not even linear in the cotangent."""

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return 2 * cotangent.square()


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x


class Through(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(2, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def test_a_route_that_is_silently_wrong_is_not_taken() -> None:
    model, x = Through(_WrongForward.apply).double(), normal(NUM, 2, dtype=torch.float64)
    product = product_of(model, x)
    assert not product.route.forward_mode
    directions = directions_of(product.params, 2)
    flat = torch.stack([torch.cat([v.flatten() for v in d.values()]) for d in directions], -1)
    torch.testing.assert_close(product(x, directions), dense_jacobian(model, x) @ flat, rtol=1e-12, atol=1e-12)


def test_where_all_routes_disagree_it_says_so() -> None:
    with pytest.raises(UnsupportedModuleError, match="its derivative disagrees with reverse mode"):
        product_of(Through(_WrongBackward.apply), normal(NUM, 2))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Through(_NoBackward.apply), "cannot be differentiated: module of type Through"),
        (nn.Sequential(Through(lambda t: torch.from_numpy(t.detach().numpy()))), "failed in reverse mode"),
        (nn.Sequential(nn.Linear(2, 3), Through(lambda t: t)), r"module '1.linear' \(Linear\) failed in reverse mode"),
    ],
)
def test_no_reverse_mode_is_a_clear_error(model: nn.Module, message: str) -> None:
    with pytest.raises(UnsupportedModuleError, match=message):
        product_of(model, normal(NUM, 2))


def test_a_scripted_network_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.trace(mlp(), torch.zeros(2, 2))
        with pytest.raises(UnsupportedModuleError, match="Jitted modules"):
            product_of(scripted, normal(NUM, 2))


def test_an_infinite_derivative_is_not_blamed_on_a_route() -> None:
    model = nn.Sequential(nn.Linear(2, 3, bias=False), Sqrt())
    with pytest.raises(InputError, match="NaN or infinite at the first inputs"):
        product_of(model, torch.zeros(NUM, 2))


class Sqrt(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs().sqrt()


def test_outputs_must_be_a_matrix() -> None:
    with pytest.raises(InputError, match=r"output has shape \(1, 2, 3\); wanted \(B, C\)"):
        product_of(Through(lambda t: t[None]), normal(NUM, 2))


def test_where_tangents_cannot_be_batched_they_are_taken_one_by_one() -> None:
    """`.item()` on a perturbed tensor fails under vmap, not under a plain JVP."""

    def scaled(t: Tensor) -> Tensor:
        return t * float(t.detach().abs().max().item())

    model, x = Through(scaled).double(), normal(NUM, 2, dtype=torch.float64)
    with torch.no_grad():
        size = float(model.linear(x).abs().max())
    product = product_of(model, x)
    directions = directions_of(product.params, 3)
    flat = torch.stack([torch.cat([v.flatten() for v in d.values()]) for d in directions], -1)
    torch.testing.assert_close(product(x, directions), size * dense_jacobian(model.linear, x) @ flat)


# ---------------------------------------------------------------- PyTorch's switches

ALL_OFF = ROUTES[2]


@contextlib.contextmanager
def unusual_switches() -> Iterator[dict[str, object]]:
    """Switches as a user may have set them, so that "restored" differs from "set to the defaults"."""
    before = torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda.flash_sdp_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        yield process_state()
    finally:
        torch.backends.mha.set_fastpath_enabled(before[0])
        torch.backends.cuda.enable_flash_sdp(before[1])


def everything_off() -> bool:
    return not (
        torch.backends.mha.get_fastpath_enabled()
        or torch.backends.cuda.flash_sdp_enabled()
        or torch.backends.cuda.mem_efficient_sdp_enabled()
        or torch.backends.cuda.cudnn_sdp_enabled()
        or torch.backends.mkldnn.enabled
    ) and bool(torch.backends.cuda.math_sdp_enabled())


def test_switches_are_off_inside_and_as_before_outside() -> None:
    with unusual_switches() as before:
        with switched(ALL_OFF):
            assert everything_off()
            with switched(ALL_OFF):
                assert everything_off()
            assert everything_off()
        assert process_state() == before


def test_switches_come_back_after_an_error() -> None:
    with unusual_switches() as before:
        with pytest.raises(ZeroDivisionError), switched(ALL_OFF):
            raise ZeroDivisionError
        assert process_state() == before
        with pytest.raises(UnsupportedModuleError):
            product_of(BagClassifier(), torch.randint(10, (NUM, 4)))
        assert process_state() == before


def test_one_thread_at_a_time_sees_its_own_switches() -> None:
    """A thread that needs no switch waits for one that has them off: what it finds to work must work later, too."""
    inside, overlapped = threading.Event(), threading.Event()

    def switches_off() -> bool:
        with switched(ALL_OFF):
            inside.set()
            overlapped.wait(0.2)
            return everything_off()

    def needs_none() -> bool:
        inside.wait(10)
        with switched(ROUTES[0]):
            overlapped.set()
            return process_state() == before

    with unusual_switches() as before, ThreadPoolExecutor(2) as pool:
        found = [pool.submit(switches_off), pool.submit(needs_none)]
        assert all(f.result(20) for f in found)
        assert process_state() == before


def test_products_in_several_threads_agree_with_one() -> None:
    case = CASES["transformer_encoder"]
    model, x = case.model(dtype=torch.float64), case.inputs(NUM)
    wanted = product_of(model, x)
    directions = directions_of(wanted.params, 2)
    expected = wanted(x, directions)

    def work(_: int) -> Tensor:
        return product_of(model, x)(x, directions)

    before = process_state()
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(work, range(12)):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert process_state() == before


def test_the_network_keeps_weights_hooks_and_gradients() -> None:
    model = old_weight_norm()
    weights = {k: p.detach().clone() for k, p in model.named_parameters()}
    hooks = list(model[0]._forward_pre_hooks)
    x = normal(NUM, 2)
    product = product_of(model, x)
    product(x, directions_of(product.params, 2))
    assert all(torch.equal(p, weights[k]) and p.grad is None for k, p in model.named_parameters())
    assert list(model[0]._forward_pre_hooks) == hooks
