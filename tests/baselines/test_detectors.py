"""Detectors against naive NumPy-style loops on toy data, and on data that anything must separate."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from scalla.baselines.detectors import FDBD, KNN, MSP, Energy, GaussianMixture, Mahalanobis, ReAct, ViM
from scalla.baselines.protocol import Detector
from scalla.types import InputError, NotFittedError

DETECTORS = {
    "msp": MSP,
    "energy": Energy,
    "react": ReAct,
    "mahalanobis": Mahalanobis,
    "relative mahalanobis": lambda model: Mahalanobis(model, relative=True),
    "gaussian mixture": GaussianMixture,
    "knn": lambda model: KNN(model, num_neighbours=3),
    "vim": ViM,
    "fdbd": FDBD,
}


class Toy(nn.Module):
    """Hidden features behind a dropout, and linear layers that are declared in another order than they run."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5))

    def forward(self, x):
        return self.head(self.body(x))


@pytest.fixture
def toy():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Toy().double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(90, 4, generator=generator, dtype=torch.float64)
    y = torch.arange(90) % 3
    x[torch.arange(90), y] += 2
    x_test = 2 * torch.randn(20, 4, generator=generator, dtype=torch.float64)
    return model, x, y, x_test


def loader(x, y, batch_size=25):
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def features(model, x):
    with torch.no_grad():
        hidden = torch.tanh(model.body[0](x))
        return hidden, model.head(hidden)


def naive(name, model, x, y, x_test):
    """The score of each test input, from its definition, one input and one class at a time."""
    train, train_logits = features(model, x)
    test, test_logits = features(model, x_test)
    weight, bias = model.head.weight.detach(), model.head.bias.detach()
    groups = [train[y == c] for c in range(3)]
    means = [g.mean(0) for g in groups]
    scatters = [sum(torch.outer(r - m, r - m) for r in g) for g, m in zip(groups, means, strict=True)]
    within = sum(scatters) / len(train)
    total = sum(torch.outer(r - train.mean(0), r - train.mean(0)) for r in train) / len(train)
    origin = -torch.linalg.pinv(weight) @ bias
    _, vectors = torch.linalg.eigh(sum(torch.outer(r - origin, r - origin) for r in train))
    off = torch.eye(6, dtype=torch.float64) - vectors[:, -3:] @ vectors[:, -3:].T
    scores = []
    for phi, f in zip(test, test_logits, strict=True):
        energy = -f.exp().sum().log()
        distances = [(phi - m) @ torch.linalg.inv(within) @ (phi - m) for m in means]
        if name == "msp":
            score = 1 - f.softmax(-1).max()
        elif name == "energy":
            score = energy
        elif name == "react":
            limit = train.flatten().sort().values[round(0.9 * train.numel()) - 1]
            score = -(weight @ phi.clamp(max=float(limit)) + bias).exp().sum().log()
        elif name == "mahalanobis":
            score = min(distances)
        elif name == "relative mahalanobis":
            score = min(distances) - (phi - train.mean(0)) @ torch.linalg.inv(total) @ (phi - train.mean(0))
        elif name == "gaussian mixture":
            ridge = 1e-3 * within.diagonal().mean() * torch.eye(6, dtype=torch.float64)
            density = torch.zeros((), dtype=torch.float64)
            for group, mean, scatter in zip(groups, means, scatters, strict=True):
                cov = scatter / len(group) + ridge
                quadratic = (phi - mean) @ torch.linalg.inv(cov) @ (phi - mean)
                density += len(group) / len(train) * (-quadratic / 2).exp() / (2 * torch.pi * cov).det().sqrt()
            score = -density.log()
        elif name == "knn":
            unit = train / train.norm(dim=-1, keepdim=True)
            score = (unit - phi / phi.norm()).norm(dim=-1).sort().values[2]
        elif name == "vim":
            alpha = train_logits.amax(-1).mean() / torch.stack([(off @ (r - origin)).norm() for r in train]).mean()
            score = alpha * (off @ (phi - origin)).norm() + energy
        elif name == "fdbd":
            top = int(f.argmax())
            to_boundary = [(f[top] - f[c]) / (weight[top] - weight[c]).norm() for c in range(3) if c != top]
            score = -sum(to_boundary) / 2 / (phi - train.mean(0)).norm()
        scores.append(score)
    return torch.stack(scores)


@pytest.mark.parametrize("name", DETECTORS)
def test_scores_equal_their_definition(name, toy):
    model, x, y, x_test = toy
    detector = DETECTORS[name](model)
    assert isinstance(detector, Detector)
    assert detector.fit(loader(x, y)) is detector
    score = detector.score(x_test)
    assert score.dtype == torch.float64
    torch.testing.assert_close(score, naive(name, model, x, y, x_test), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(torch.cat([detector.score(b) for b in x_test.split(3)]), score, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", DETECTORS)
def test_the_model_is_left_alone(name, toy):
    model, x, y, x_test = toy
    model.head.weight.requires_grad_(False)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    DETECTORS[name](model).fit(loader(x, y)).score(x_test)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(m.training and not m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert not model.head.weight.requires_grad
    assert model.head.bias.requires_grad


@pytest.mark.parametrize("name", ["mahalanobis", "gaussian mixture", "knn", "vim"])
def test_separable_inputs_are_separated_perfectly(name):
    """Features are the inputs (identity weights): outliers leave the plane in which all training data lie."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4))
        model[0].bias.zero_()
        model[1].weight.copy_(torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0]]))
        model[1].bias.zero_()
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(200) % 2
    x = 0.05 * torch.randn(200, 4, generator=generator, dtype=torch.float64)
    x[torch.arange(200), y] += 3
    inside, outside = x[:50].clone() * 1.01, x[:50].clone()
    outside[:, 2:] += 2
    detector = DETECTORS[name](model).fit(loader(x, y))
    assert float(detector.score(outside).min()) > float(detector.score(inside).max())


def test_msp_and_energy_separate_confident_from_unsure_logits():
    model = nn.Sequential(nn.Identity(), nn.Linear(3, 3, bias=False)).double()
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(3))
    sure, unsure = 50 * torch.eye(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    for detector in (MSP(model), Energy(model)):
        assert float(detector.score(unsure).min()) > float(detector.score(sure).max())
    # 1 − p of a confident input is e^{-50}, and not the 0 that float64 makes of 1 − 1
    wanted = 2 * torch.exp(torch.tensor([-50.0] * 3, dtype=torch.float64))
    torch.testing.assert_close(MSP(model).score(sure), wanted, rtol=1e-9, atol=0)


def test_knn_in_small_chunks_is_the_same(toy):
    model, x, y, x_test = toy
    whole = KNN(model, num_neighbours=5).fit(loader(x, y)).score(x_test)
    chunked = KNN(model, num_neighbours=5, max_elements=200).fit(loader(x, y)).score(x_test)
    torch.testing.assert_close(chunked, whole, rtol=1e-12, atol=1e-12)


def test_dead_features_do_no_harm():
    """A ReLU that never fires on the training data leaves a covariance without an inverse."""
    model = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    with torch.no_grad():
        model[0].bias[3] = -100.0
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=generator, dtype=torch.float64)
    for name in ("mahalanobis", "relative mahalanobis", "gaussian mixture", "vim"):
        score = DETECTORS[name](model).fit(loader(x, torch.arange(40) % 2)).score(x)
        assert bool(torch.isfinite(score).all())


def test_errors_say_what_to_do(toy):
    model, x, y, x_test = toy
    for name in ("react", "mahalanobis", "gaussian mixture", "knn", "vim", "fdbd"):
        with pytest.raises(NotFittedError, match="call fit"):
            DETECTORS[name](model).score(x_test)
    with pytest.raises(InputError, match="set num_neighbours to at most"):
        KNN(model, num_neighbours=1000).fit(loader(x, y))
    with pytest.raises(InputError, match="wanted 0 ≤ it < 6"):
        ViM(model, num_principal=6).fit(loader(x, y))
    with pytest.raises(InputError, match=r"no nn\.Linear ran"):
        Mahalanobis(nn.Sequential(nn.Tanh())).fit(loader(x, y))
    with pytest.raises(InputError, match="needs f = W φ"):
        ViM(nn.Sequential(model, nn.Softmax(-1))).fit(loader(x, y))
    with pytest.raises(InputError, match="empty"):
        KNN(model).fit([])
