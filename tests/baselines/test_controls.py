"""Controls: the prior-only score against an explicit Jacobian, the classifier on kinds that differ."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from scalla.baselines.controls import Brightness, ContextClassifier, PriorScore
from scalla.baselines.protocol import Detector
from scalla.types import InputError, NotFittedError


def tiny_cnn():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 3)
        ).double()


def images(num, *, seed):
    return torch.rand(num, 1, 6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def backward_kernels(model, x):
    """J(x) J(x)ᵀ by a plain backward loop, in eval mode."""
    kernels = []
    for single in x:
        rows = []
        for output in model(single[None])[0]:
            grads = torch.autograd.grad(output, list(model.parameters()), retain_graph=True)
            rows.append(torch.cat([g.flatten() for g in grads]))
        jacobian = torch.stack(rows)
        kernels.append(jacobian @ jacobian.T)
    return torch.stack(kernels)


@pytest.mark.parametrize("budget", [2**26, 1])
def test_prior_score_equals_an_explicit_jacobian(budget):
    model = tiny_cnn()
    x = images(5, seed=1)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    log_det = PriorScore(model, max_jacobian_elements=budget)
    assert isinstance(log_det, Detector)
    trace = PriorScore(model, statistic="trace", max_jacobian_elements=budget)
    got = log_det.fit([]).score(x), trace.fit([]).score(x)
    assert all(m.training for m in model.modules())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    kernels = backward_kernels(model.eval(), x)
    torch.testing.assert_close(got[0], torch.linalg.slogdet(kernels).logabsdet, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got[1], kernels.diagonal(dim1=-2, dim2=-1).sum(-1), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(log_det.score(x[3:]), got[0][3:], rtol=1e-10, atol=1e-10)


def test_brightness_is_the_mean():
    x = images(4, seed=2)
    torch.testing.assert_close(Brightness().fit([]).score(x), torch.stack([row.mean() for row in x]))


@pytest.mark.parametrize("shape", [(1, 12, 12), (5,)])
def test_classifier_separates_kinds_that_differ(shape):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(400, *shape, generator=generator)
    context = torch.rand(150, *shape, generator=generator) + 1.5
    loader = DataLoader(TensorDataset(x, torch.zeros(400)), batch_size=50, shuffle=True)
    global_state = torch.get_rng_state()

    def fit():
        return ContextClassifier(seed=3, num_epochs=20, lr=1e-2, batch_size=64).fit(loader, context=context)

    control = fit()
    assert torch.equal(torch.get_rng_state(), global_state)
    new = torch.rand(50, *shape, generator=generator)
    assert float(control.score(new + 1.5).min()) > float(control.score(new).max())
    parts = torch.cat([control.score(b) for b in new.split(7)])
    torch.testing.assert_close(parts, control.score(new), rtol=1e-5, atol=1e-4)  # a float32 network
    torch.manual_seed(99)
    assert torch.equal(fit().score(new), control.score(new))


def test_classifier_stops_early_where_there_is_nothing_to_learn():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=generator)
    context = torch.randn(200, 3, generator=generator)
    control = ContextClassifier(num_epochs=60, patience=2, lr=1e-2).fit([(x, x)], context=[(context, x)])
    losses = control.held_out_losses
    assert len(losses) < 60
    assert min(losses) == min(losses[:-2])


def test_errors_say_what_to_do():
    x = images(4, seed=2)
    with pytest.raises(InputError, match="give context="):
        ContextClassifier().fit([(x, x)])
    with pytest.raises(InputError, match="of one shape"):
        ContextClassifier().fit([(x, x)], context=torch.zeros(4, 2))
    with pytest.raises(NotFittedError, match="call fit"):
        ContextClassifier().score(x)
    with pytest.raises(InputError, match="choose 'logdet' or 'trace'"):
        PriorScore(tiny_cnn(), statistic="det")
    with pytest.raises(InputError, match="take tensors only"):
        Brightness().score({"x": x})
