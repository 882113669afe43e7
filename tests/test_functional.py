"""The network as a function: what it is given, what it gives back, and that the user's module is left alone."""

from __future__ import annotations

import copy
import threading
from collections import UserDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cases import CASES, BatchNormCNN, KeywordClassifier, Recurrent, dropout_mlp, mlp, normal, old_weight_norm, words
from oracles import outputs_of
from scalla.functional import (
    FrozenNetwork,
    batch_size,
    check_outputs,
    concatenate,
    find_head,
    first_rows,
    logits_of,
    make_twin,
    select_parameters,
)
from scalla.types import InputError

# ---------------------------------------------------------------- f(x)


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_the_evaluation_mode(name: str) -> None:
    case = CASES[name]
    model, x = case.model().train(), case.inputs(4)
    network = FrozenNetwork(model)
    reference = case.model().eval()
    with torch.no_grad():
        wanted = outputs_of(reference, x)
    found = network(x)
    assert not found.requires_grad
    torch.testing.assert_close(found, wanted)
    assert model.training


@pytest.mark.parametrize("name", ["mlp", "cnn_batchnorm", "lstm", "weight_norm", "dict_keywords"])
def test_weights_are_arguments_and_those_not_given_keep_their_value(name: str) -> None:
    case = CASES[name]
    model, x = case.model(dtype=torch.float64), case.inputs(4)
    network = FrozenNetwork(model)
    first = next(iter(dict(model.named_parameters())))
    new = {first: dict(model.named_parameters())[first].detach() + 0.3}
    other = case.model(dtype=torch.float64).eval()
    with torch.no_grad():
        dict(other.named_parameters())[first].add_(0.3)
        x64 = x if isinstance(x, dict) else x.double()
        torch.testing.assert_close(network.at(x)(new), outputs_of(other, x64), rtol=1e-12, atol=1e-12)


def test_no_mode_hook_buffer_or_attribute_of_the_users_module_changes() -> None:
    model = nn.Sequential(BatchNormCNN(), nn.Dropout(0.5)).train()
    model[0][1].eval()
    fired: list[str] = []
    model.register_forward_hook(lambda *_: fired.append("hook"))
    before = copy.deepcopy(model.state_dict())
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    network = FrozenNetwork(model)
    network(normal(5, 1, 6, 6))
    network.at(normal(5, 1, 6, 6))(dict(model.named_parameters()))
    assert [m.training for m in model.modules()] == [m is not model[0][1] for m in model.modules()]
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())
    assert {name: set(vars(m)) for name, m in model.named_modules()} == attributes
    assert len(model._forward_hooks) == 1
    assert all(p.grad is None for p in model.parameters())


def test_hooks_that_change_the_output_are_part_of_the_network() -> None:
    model = mlp()
    model.register_forward_hook(lambda mod, args, out: 2 * out)
    x = normal(3, 2)
    with torch.no_grad():
        torch.testing.assert_close(FrozenNetwork(model)(x), model(x))


def test_several_threads_may_predict_at_once() -> None:
    model = dropout_mlp().train()
    network, x = FrozenNetwork(model), normal(50, 2)
    wanted = network(x)
    barrier = threading.Barrier(4)

    def work(_: int) -> bool:
        barrier.wait(10)
        return all(torch.equal(network(x), wanted) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_it_follows_replaced_tensors() -> None:
    """`.to(dtype)` replaces buffers, and the recurrent layers' own list of weights."""
    for model, x in ((BatchNormCNN(), normal(4, 1, 6, 6)), (Recurrent(nn.LSTM), normal(4, 4, 8))):
        network = FrozenNetwork(model.eval())
        model.double()
        network.sync()
        assert network.dtype == torch.float64
        with torch.no_grad():
            torch.testing.assert_close(network(x), model(x.double()), rtol=1e-12, atol=1e-12)


def test_weights_changed_in_place_are_seen_at_once() -> None:
    model, x = mlp(), normal(4, 2)
    network = FrozenNetwork(model)
    with torch.no_grad():
        model[0].weight.mul_(2)
        torch.testing.assert_close(network(x), model(x))


class Bare(nn.Module):
    """Neither weights nor buffers."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_network_without_tensors_has_the_defaults() -> None:
    network = FrozenNetwork(Bare())
    assert network.device == torch.device("cpu")
    assert network.dtype == torch.get_default_dtype()


def test_a_network_that_cannot_be_copied_is_refused() -> None:
    model = mlp()
    model.lock = threading.Lock()
    with pytest.raises(InputError, match=r"\(Sequential\) cannot be copied by copy.deepcopy.*plain module inside"):
        FrozenNetwork(model)


def test_a_twin_shares_tensors_and_a_copy_owns_them() -> None:
    model = old_weight_norm()  # whose `weight` is an attribute with a graph behind it
    shared, owned = make_twin(model), make_twin(model, share=False)
    for name, p in model.named_parameters():
        assert shared.get_parameter(name) is p
        assert owned.get_parameter(name) is not p
        assert torch.equal(owned.get_parameter(name), p)


# ---------------------------------------------------------------- inputs


class Inputs(nn.Module):
    """Keeps what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, dtype=torch.float64)

    def see(self, *args: Any) -> Tensor:
        type(self).seen = args
        return torch.zeros(2, 1, dtype=torch.float64)

    seen: tuple[Any, ...] = ()


class Positional(Inputs):
    def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        return self.see(a, b, scale)


class Keywords(Inputs):
    def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        return self.see(a, b)


class OneKeyword(Inputs):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.see(input_ids)


class Starred(Inputs):
    def forward(self, **kwargs: Any) -> Tensor:
        return self.see(kwargs)


class WholeBatch(Inputs):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.see(batch)


class WholeInput(Inputs):
    """As `nn.Sequential` calls its argument."""

    def forward(self, input: dict[str, Tensor]) -> Tensor:
        return self.see(input)


class WholeWithOption(Inputs):
    def forward(self, inputs: dict[str, Tensor], detail: bool = False) -> Tensor:
        return self.see(inputs)


A, B = torch.tensor([1, 2]), torch.tensor([0.5, 1.5])


@pytest.mark.parametrize(
    ("module", "x", "wanted"),
    [
        (Positional, (A, B), (A, B.double(), 1.0)),
        (Positional, [A, B, 3.0], (A, B.double(), 3.0)),
        (Keywords, {"a": A, "b": B, "labels": A, "unknown": A}, (A, B.double())),
        (Keywords, UserDict({"a": A, "b": B}), (A, B.double())),
        (OneKeyword, {"input_ids": A, "attention_mask": B, "labels": A}, (A,)),
        (Starred, {"a": A, "b": B, "labels": A}, ({"a": A, "b": B.double()},)),
        (WholeBatch, {"a": A, "b": B, "labels": A}, ({"a": A, "b": B.double()},)),
        (WholeInput, {"a": A, "b": B, "labels": A}, ({"a": A, "b": B.double()},)),
        (WholeWithOption, {"a": A, "b": B, "labels": A}, ({"a": A, "b": B.double()},)),
    ],
)
def test_how_inputs_reach_the_network(module: type[Inputs], x: Any, wanted: tuple[Any, ...]) -> None:
    """Floating-point tensors in its dtype, others as they are; labels and names it does not take are left out."""
    FrozenNetwork(module())(x)
    torch.testing.assert_close(module.seen, wanted, rtol=0, atol=0)


def test_labels_may_have_another_name() -> None:
    FrozenNetwork(Starred(), dict_key_y="target")({"a": A, "labels": B, "target": A})
    assert set(Starred.seen[0]) == {"a", "labels"}


@pytest.mark.parametrize("x", [np.zeros((3, 2)), "text", 3.0, None])
def test_inputs_of_another_kind_are_refused(x: Any) -> None:
    with pytest.raises(InputError, match=rf"got inputs of type {type(x).__name__}; wanted a tensor"):
        FrozenNetwork(mlp())(x)


def test_rows_sizes_and_joins() -> None:
    x = {"ids": torch.arange(12).view(6, 2), "scale": torch.tensor(2.0), "table": torch.zeros(4, 2), "name": "n"}
    assert batch_size(x) == 6
    assert batch_size((torch.tensor(1.0), torch.zeros(3, 2))) == 3  # a number has no rows
    cut = first_rows(x, 2)
    assert cut["ids"].tolist() == [[0, 1], [2, 3]]
    assert (cut["scale"], cut["table"].shape, cut["name"]) == (torch.tensor(2.0), (4, 2), "n")
    assert first_rows((A, 3), 1)[0].tolist() == [1]
    with pytest.raises(InputError, match="without any tensor"):
        batch_size({"name": "n"})

    a, b = torch.zeros(2, 3), torch.ones(4, 3)
    assert torch.equal(concatenate([a, b]), torch.cat([a, b]))
    assert concatenate([a]) is a
    assert concatenate([a, torch.zeros(2, 4)]) is None
    assert concatenate([{"a": a}, {"a": b}]) is None


# ---------------------------------------------------------------- outputs


@dataclass
class Named:
    logits: Tensor


def test_logits_are_found_in_what_networks_return() -> None:
    t = torch.zeros(2, 3)
    for output in (t, {"logits": t, "loss": 1}, Named(t), (t, "hidden"), [t]):
        assert logits_of(output) is t
    for output in ({"scores": t}, "text", (), ("hidden", t), None):
        with pytest.raises(InputError, match=rf"returned {type(output).__name__}, in which there are no logits"):
            logits_of(output)


def test_outputs_must_be_one_row_for_each_input() -> None:
    check_outputs(torch.zeros(4, 3), 4)
    for shape in ((4,), (4, 3, 1), (3, 4), ()):
        with pytest.raises(InputError, match=r"wanted \(B, C\), one row of C outputs.*Wrap the network"):
            check_outputs(torch.zeros(shape), 4)


def test_a_module_whose_forward_has_no_signature_is_called_with_the_input() -> None:
    class Builtin(nn.Module):
        forward = torch.sin  # type: ignore[assignment]

    assert torch.equal(FrozenNetwork(Builtin())(B), B.sin())


# ---------------------------------------------------------------- weights and head


def names(model: nn.Module, parameters: Any, x: Any) -> list[str]:
    return list(select_parameters(FrozenNetwork(model), parameters, x))


def test_weights_are_selected_by_word_pattern_and_function() -> None:
    model, x = mlp(), normal(4, 2)
    everything = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert names(model, "all", x) == everything
    assert names(model, "trainable", x) == everything
    assert names(model, "last_layer", x) == ["2.weight", "2.bias"]
    assert names(model, ["0.*", "2.bias"], x) == ["0.weight", "0.bias", "2.bias"]
    assert names(model, "*.weight", x) == ["0.weight", "2.weight"]
    assert names(model, lambda name, p: p.ndim == 1, x) == ["0.bias", "2.bias"]
    model[0].requires_grad_(False)
    assert names(model, "trainable", x) == ["2.weight", "2.bias"]
    assert names(model, ["0.*"], x) == ["0.weight", "0.bias"]  # whatever requires_grad says
    model.requires_grad_(False)
    assert names(model, "trainable", x) == everything  # a network frozen after training


def test_selected_weights_are_the_networks_own_values_without_gradients() -> None:
    model = mlp()
    for name, p in select_parameters(FrozenNetwork(model), "all", normal(4, 2)).items():
        assert p.data_ptr() == model.get_parameter(name).data_ptr()
        assert not p.requires_grad


def test_integer_weights_are_left_out() -> None:
    model = mlp()
    model.register_parameter("codes", nn.Parameter(torch.arange(3), requires_grad=False))
    assert "codes" not in names(model, "all", normal(4, 2))


def test_a_selection_of_nothing_lists_what_there_is() -> None:
    with pytest.raises(InputError, match=r"selects none of the network's 4 weights \(0.weight, 0.bias, 2.weight"):
        names(mlp(), ["head.*"], normal(4, 2))
    many = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    with pytest.raises(InputError, match=r"12 weights \(0.weight.*…\)"):
        names(many, "nothing", normal(4, 2))


def test_the_last_layer_of_a_parametrised_head_and_of_a_root_layer() -> None:
    body = nn.Linear(2, 4)
    head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    found = names(nn.Sequential(body, head), "last_layer", normal(4, 2))
    assert sorted(found) == [
        "1.bias",
        "1.parametrizations.weight.original0",
        "1.parametrizations.weight.original1",
    ]
    assert names(nn.Linear(2, 3), "last_layer", normal(4, 2)) == ["weight", "bias"]


def test_the_last_layer_that_shares_its_weight_with_another() -> None:
    model = KeywordClassifier()
    model.embedding = nn.Embedding(3, 6)
    model.classifier.weight = model.embedding.weight
    ids = {"input_ids": torch.tensor([[0, 1], [2, 1]])}
    assert names(model, "last_layer", ids) == ["embedding.weight", "classifier.bias"]


class TwoHeads(nn.Module):
    """The head is registered first, runs last, and is not called `fc`; others have as many or as few outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.zz_result = nn.Linear(5, 3)
        self.body = nn.Linear(2, 5)
        self.gate = nn.Linear(2, 3)
        self.never_runs = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x))
        return self.zz_result(torch.tanh(self.body(x))) * gate


class ConvHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.classify = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(torch.relu(self.stem(x))).mean((2, 3))


@pytest.mark.parametrize(
    ("model", "x", "head"),
    [
        (mlp(), normal(4, 2), "2"),
        (TwoHeads(), normal(4, 2), "zz_result"),
        (ConvHead(), normal(4, 1, 6, 6), "classify"),
        (nn.Linear(2, 3), normal(4, 2), ""),
        (KeywordClassifier(), words(4), "classifier"),
        (CASES["transformer_encoder"].model(), normal(4, 4, 8), "head"),
        (CASES["bert"].model(), words(4), "classifier"),
    ],
)
def test_the_head_is_the_last_layer_with_as_many_outputs_that_runs(model: nn.Module, x: Any, head: str) -> None:
    assert find_head(FrozenNetwork(model), x) == head
    assert not any(m._forward_hooks for m in model.modules())


def test_a_network_without_such_a_layer_is_refused() -> None:
    with pytest.raises(InputError, match=r"no linear or convolutional layer with C = 2 outputs in Bare.*surrogate"):
        find_head(FrozenNetwork(Bare()), normal(4, 2))
