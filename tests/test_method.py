"""ScaLLA as a module: moved, copied, in a state dict; its mode, its repr and the network that it leaves alone."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import BatchNormCNN, loader, mlp, normal
from scalla import InputError, ScaLLA
from untouched import assert_untouched, same_bits, state_of

NUM = 12
X, Y = normal(NUM, 2), torch.arange(NUM) % 3
NEW = normal(5, 2, seed=9)


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return mlp()


def fitted(model: nn.Module | None = None, **options: Any) -> ScaLLA:
    la = ScaLLA(model or network(), num_features=5, **options)
    return la.fit(loader(X, Y, 5), num_steps=4)


def same(left: ScaLLA, right: ScaLLA, x: Tensor = NEW) -> bool:
    a, b = left.predict(x), right.predict(x)
    return same_bits(a.probs, b.probs) and same_bits(a.cov, b.cov)


@pytest.mark.parametrize("surrogate", ["mirror", "trunk"])
def test_a_state_dict_of_tensors_rebuilds_it(surrogate: str, tmp_path: Path) -> None:
    la = fitted(surrogate=surrogate, prior_precision=0.3, temperature=0.7)
    torch.save(la.state_dict(), tmp_path / "state.pt")
    other = ScaLLA(network(), num_features=5, surrogate=surrogate)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert same(other, la)
    assert float(other.prior_precision) == 0.3
    assert other.temperature == 0.7
    assert float(other.log_marginal_likelihood()) == float(la.log_marginal_likelihood())
    assert [e.step for e in other.history] == [e.step for e in la.history]


def test_the_state_of_one_that_is_not_fitted() -> None:
    la = ScaLLA(network(), num_features=5)
    other = ScaLLA(network(), num_features=5)
    other.load_state_dict(la.state_dict())
    assert other.posterior is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_features": 6}, "state of a ScaLLA with num_features=5; this one has 6"),
        ({"num_features": 5, "surrogate": "trunk"}, "with surrogate='mirror'; this one has 'trunk'"),
        ({"num_features": 5, "likelihood": "regression"}, "likelihood='classification'; this one has 'regression'"),
    ],
)
def test_the_state_of_another_kind_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ScaLLA(network(), **settings).load_state_dict(fitted().state_dict())


def test_a_copy_is_independent() -> None:
    la = fitted()
    other = copy.deepcopy(la)
    assert same(other, la)
    before = la.posterior_precision
    other.update([(X, Y)])
    other.prior_precision = 9.0
    assert torch.equal(la.posterior_precision, before)
    assert not torch.equal(other.posterior_precision, before)


def test_it_survives_pickle_for_worker_processes() -> None:
    la = fitted()
    assert same(pickle.loads(pickle.dumps(la)), la)  # noqa: S301


def test_moving_it_moves_network_and_surrogate_and_keeps_the_posterior_in_float64() -> None:
    la = fitted()
    before = la.predict(NEW).cov
    la.to(torch.float64)
    assert {p.dtype for p in la.parameters()} == {torch.float64}
    assert la.predict(NEW).cov.dtype == torch.float64
    torch.testing.assert_close(la.predict(NEW).cov.float(), before, rtol=1e-4, atol=1e-6)
    la.float()
    assert la.posterior_precision.dtype == torch.float64
    torch.testing.assert_close(la.predict(NEW).cov, before, rtol=1e-4, atol=1e-6)


def test_buffers_that_are_replaced_are_followed() -> None:
    """`.to()` replaces the running statistics of the network that it shares."""
    model, x = BatchNormCNN(), normal(8, 1, 6, 6)
    la = ScaLLA(model, num_features=4).fit([(x, torch.arange(8) % 3)], num_steps=2)
    model.double()
    assert la.predict(x).mean.dtype in (torch.float32, torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(la.predict(x).mean.double(), model.eval()(x.double()), rtol=1e-5, atol=1e-6)


def test_its_mode_is_its_own() -> None:
    model = network().train()
    la = fitted(model)
    wanted = la.predict(NEW).probs
    before = state_of(model)
    for mode in (True, False):
        assert la.train(mode) is la
        assert la.training is mode
        assert torch.equal(la.predict(NEW).probs, wanted)
    la.eval()
    assert_untouched(model, before)


def test_its_repr_says_what_it_is() -> None:
    la = ScaLLA(network(), num_features=5)
    assert "likelihood='classification', num_features=5, not fitted" in repr(la)
    assert "12 inputs" in repr(fitted())


def test_the_network_keeps_its_gradients_and_can_be_trained_on() -> None:
    """A posterior of a network does not stop its training; the next fit sees the new weights."""
    model = network()
    la = fitted(model)
    before = la.predict(NEW).mean
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    nn.functional.cross_entropy(model(X), Y).backward()
    optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(la.predict(NEW).mean, model(NEW))
    assert not torch.allclose(la.predict(NEW).mean, before)
    features = la.features(NEW)
    la.fit(loader(X, Y, 5), num_steps=4)
    assert not torch.allclose(la.features(NEW), features)


def test_a_surrogate_of_ones_own_is_as_it_was_after_a_fit_that_failed() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 15)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).view(-1, 3, 5)

    surrogate = Own()
    la = fitted(surrogate=surrogate)
    wanted, before = la.predict(NEW), state_of(surrogate)

    def callback(entry: Any) -> None:
        if entry.step == 3:
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        la.fit(loader(X + 1, Y, 5), num_steps=5, callback=callback)
    assert_untouched(surrogate, before)
    assert torch.equal(la.predict(NEW).cov, wanted.cov)
