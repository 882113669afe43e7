"""MAP, LLA and ELLA against laplace-torch called directly and against dense float64 algebra."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from scalla.baselines import laplace_torch
from scalla.baselines.ella import ELLA
from scalla.baselines.jacobians import exact_jacobians, selected_jacobians
from scalla.baselines.lla import LLA
from scalla.baselines.map import MAP
from scalla.baselines.protocol import Method
from scalla.baselines.valla import VaLLA
from scalla.functional import FrozenNetwork
from scalla.types import InputError, NotFittedError, ScallaError


def tiny_mlp(num_outputs=3, *, seed=0, hidden=4):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, num_outputs)).double()


def tiny_cnn():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 3, 3, bias=False), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 3)
        ).double()


def data(num=40, num_classes=3, *, regression=False, seed=1, shape=(2,)):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, *shape, generator=generator, dtype=torch.float64)
    if regression:
        return x, torch.randn(num, num_classes, generator=generator, dtype=torch.float64)
    return x, torch.randint(num_classes, (num,), generator=generator)


def loader(x, y, batch_size=16):
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def backward_jacobians(model, x, names=None):
    """∂f/∂θ by a plain backward loop."""
    params = [p for n, p in model.named_parameters() if names is None or n in names]
    rows = []
    for single in x:
        outputs = model(single[None])[0]
        rows.append(
            torch.stack(
                [torch.cat([g.flatten() for g in torch.autograd.grad(f, params, retain_graph=True)]) for f in outputs]
            )
        )
    return torch.stack(rows)


def dense_covariance(model, x_train, x, *, likelihood, prior_precision, sigma_noise=1.0, names=None):
    train, test = backward_jacobians(model, x_train, names), backward_jacobians(model, x, names)
    with torch.no_grad():
        probs = model(x_train).softmax(-1)
    hessian = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None]
    if likelihood == "regression":
        hessian = torch.eye(probs.shape[-1], dtype=probs.dtype).expand_as(hessian) / sigma_noise**2
    precision = torch.einsum("ncp,ncd,ndq->pq", train, hessian, train)
    precision += prior_precision * torch.eye(len(precision), dtype=precision.dtype)
    return test @ torch.linalg.inv(precision) @ test.mT


METHODS = {
    "map": lambda model, **kw: MAP(model, **kw),
    "lla last_layer kron": lambda model, **kw: LLA(model, **kw),
    "lla last_layer full": lambda model, **kw: LLA(model, structure="full", **kw),
    "lla last_layer diag": lambda model, **kw: LLA(model, structure="diag", **kw),
    "lla all kron": lambda model, **kw: LLA(model, subset="all", **kw),
    "lla all full": lambda model, **kw: LLA(model, subset="all", structure="full", **kw),
    "lla all diag": lambda model, **kw: LLA(model, subset="all", structure="diag", **kw),
    "lla marglik": lambda model, **kw: LLA(model, prior_precision="marglik", **kw),
    "ella": lambda model, **kw: ELLA(model, num_points=20, num_features=5, **kw),
    "valla": lambda model, **kw: VaLLA(model, num_inducing=6, num_steps=3, batch_size=16, **kw),
}


@pytest.mark.parametrize("make_model", [tiny_mlp, tiny_cnn])
def test_exact_jacobians_equal_a_backward_loop(make_model):
    model = make_model()
    x, _ = data(5, shape=(1, 8, 8) if make_model is tiny_cnn else (2,))
    network = FrozenNetwork(model)
    params = {k: p.detach() for k, p in model.named_parameters()}
    wanted = backward_jacobians(model, x)
    torch.testing.assert_close(exact_jacobians(network, params, x), wanted, rtol=1e-10, atol=1e-12)
    outputs = torch.tensor([0, 2, 1, 1, 0])
    rows = selected_jacobians(network, params, x, outputs)
    torch.testing.assert_close(rows, wanted[torch.arange(5), outputs], rtol=1e-10, atol=1e-12)


def test_map_is_the_plain_softmax():
    model = tiny_mlp()
    x, y = data()
    prediction = MAP(model).fit(loader(x, y)).predict(x)
    assert torch.equal(prediction.probs, model(x).softmax(-1))
    assert torch.equal(prediction.var, torch.zeros_like(prediction.mean))
    torch.testing.assert_close(prediction.mutual_information, torch.zeros(40, dtype=torch.float64))


@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("structure", ["kron", "full", "diag"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_lla_equals_laplace_torch_called_directly(subset, structure, likelihood):
    laplace = laplace_torch.import_laplace()
    model = tiny_mlp()
    x, y = data(regression=likelihood == "regression")
    sigma = 0.5 if likelihood == "regression" else 1.0
    ours = LLA(model, likelihood, subset=subset, structure=structure, prior_precision=2.0, sigma_noise=sigma).fit(
        loader(x, y)
    )
    theirs = laplace.Laplace(
        copy.deepcopy(model),
        likelihood,
        subset_of_weights=subset,
        hessian_structure=structure,
        prior_precision=2.0,
        sigma_noise=sigma,
    )
    with laplace_torch.quiet():
        theirs.fit(loader(x, y))
        mean, cov = theirs._glm_predictive_distribution(x)
    prediction = ours.predict(x)
    torch.testing.assert_close(prediction.mean, mean, rtol=1e-10, atol=1e-12)
    # its own full GGN is made of products with float32 unit vectors
    tolerance = 1e-5 if structure == "full" else 1e-8
    torch.testing.assert_close(prediction.cov, cov, rtol=tolerance, atol=tolerance)
    evidence = float(theirs.log_marginal_likelihood())
    assert ours.log_marginal_likelihood() == pytest.approx(evidence, rel=tolerance)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_full_lla_equals_a_dense_reference(likelihood, subset):
    model = tiny_mlp()
    x, y = data(regression=likelihood == "regression")
    x_test = data(7, seed=3)[0] * 3
    sigma = 0.7 if likelihood == "regression" else 1.0
    method = LLA(model, likelihood, subset=subset, structure="full", prior_precision=0.3, sigma_noise=sigma)
    prediction = method.fit(loader(x, y)).predict(x_test)
    wanted = dense_covariance(
        model,
        x,
        x_test,
        likelihood=likelihood,
        prior_precision=0.3,
        sigma_noise=sigma,
        names=("2.weight", "2.bias") if subset == "last_layer" else None,
    )
    torch.testing.assert_close(prediction.cov, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_marginal_likelihood_of_a_full_curvature_takes_the_steps_of_laplace_torch(subset, likelihood):
    x, y = data(regression=likelihood == "regression")
    sigma = 0.5 if likelihood == "regression" else 1.0
    method = LLA(
        tiny_mlp(), likelihood, subset=subset, structure="full", sigma_noise=sigma, temperature=1.5
    ).fit(loader(x, y))  # fmt: skip
    found = method.optimize_prior_precision(num_steps=20, start=3.0)
    with laplace_torch.quiet():
        method._laplace.optimize_prior_precision(
            pred_type="glm", method="marglik", n_steps=20, lr=0.1, init_prior_prec=3.0, prior_structure="scalar"
        )
    assert found == pytest.approx(method.fitted_prior_precision, rel=1e-6)


def test_marginal_likelihood_finds_the_maximum_of_the_dense_evidence():
    model = tiny_mlp()
    x, y = data()
    method = LLA(model, subset="all", structure="full", prior_precision="marglik").fit(loader(x, y))
    jacobians = backward_jacobians(model, x)
    probs = model(x).softmax(-1).detach()
    hessian = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None]
    eigenvalues = torch.linalg.eigvalsh(torch.einsum("ncp,ncd,ndq->pq", jacobians, hessian, jacobians))
    scatter = sum(p.square().sum() for p in model.parameters()).detach()
    log_grid = torch.linspace(-6, 6, 4001, dtype=torch.float64)
    grid = log_grid.exp()
    evidence = -0.5 * ((1 + eigenvalues.clamp_min(0) / grid[:, None]).log().sum(-1) + grid * scatter)
    best = float(grid[evidence.argmax()])
    assert method.fitted_prior_precision == pytest.approx(best, rel=0.02)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_ella_of_full_rank_is_exact_lla(likelihood):
    """K = P directions span all of weight space: ELLA is LLA, up to the conditioning of the Gram matrix."""
    model = tiny_mlp(2, hidden=3)
    num_params = sum(p.numel() for p in model.parameters())
    x, y = data(200, 2, regression=likelihood == "regression")
    x, x_test = x * 3, data(9, seed=4)[0]
    method = ELLA(model, likelihood, num_points=200, num_features=num_params, prior_precision=0.8)
    prediction = method.fit(loader(x, y)).predict(x_test)
    wanted = dense_covariance(model, x, x_test, likelihood=likelihood, prior_precision=0.8)
    torch.testing.assert_close(prediction.cov, wanted, rtol=1e-6, atol=1e-8)


def test_ella_factor_has_the_covariance_of_laplace_torch():
    model = tiny_mlp()
    x, y = data()
    method = ELLA(model, num_points=20, num_features=5, seed=3).fit(loader(x, y))
    prediction = method.predict(x, n_samples=7)
    _, cov = method._laplace.predictive_moments(x)
    assert prediction.factor.shape == (40, 3, 5)
    torch.testing.assert_close(prediction.cov, cov, rtol=1e-9, atol=1e-12)


def test_ella_drops_the_variance_outside_its_directions():
    model = tiny_mlp()
    x, y = data()
    few = ELLA(model, num_points=20, num_features=3).fit(loader(x, y)).predict(x).var
    more = ELLA(model, num_points=20, num_features=12).fit(loader(x, y)).predict(x).var
    exact = LLA(model, subset="all", structure="full").fit(loader(x, y)).predict(x).var
    assert bool((few.sum() < more.sum()) & (more.sum() < exact.sum()))


@pytest.mark.parametrize("name", METHODS)
def test_methods_follow_the_protocol_and_leave_the_model_alone(name):
    model = tiny_mlp()
    model.insert(1, nn.Dropout(0.5))
    model.train()
    model[0].bias.requires_grad_(False)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    attributes = {k: set(vars(m)) for k, m in model.named_modules()}
    x, y = data()
    global_state = torch.get_rng_state()
    batches = [(x[:25], y[:25]), (x[25:], y[25:])]
    method = METHODS[name](model)
    assert isinstance(method, Method)
    assert method.fit(batches) is method
    method.predict(x)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True]
    assert all(p.grad is None for p in model.parameters())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert {k: set(vars(m)) for k, m in model.named_modules()} == attributes
    assert torch.equal(torch.get_rng_state(), global_state)


@pytest.mark.parametrize("name", METHODS)
def test_predictions_do_not_depend_on_the_batch_size(name):
    x, y = data()
    method = METHODS[name](tiny_mlp()).fit(loader(x, y))
    whole = method.predict(x, n_samples=16)
    parts = [method.predict(rows, n_samples=16) for rows in x.split(7)]
    probs = torch.cat([p.probs for p in parts])
    torch.testing.assert_close(probs, whole.probs, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(torch.cat([p.cov for p in parts]), whole.cov, rtol=1e-8, atol=1e-10)
    if name != "map":
        assert bool((whole.var > 0).all())
        generator = torch.Generator().manual_seed(11)
        other = method.predict(x, n_samples=16, generator=generator)
        assert not torch.equal(other.probs, whole.probs)


@pytest.mark.parametrize("name", METHODS)
def test_regression_keeps_the_noise_out_of_the_variance(name):
    x, y = data(num_classes=2, regression=True)
    prediction = METHODS[name](tiny_mlp(2), likelihood="regression", sigma_noise=0.5).fit(loader(x, y)).predict(x)
    torch.testing.assert_close(prediction.var_with_noise, prediction.var + 0.25)


@pytest.mark.parametrize("name", ["lla last_layer kron", "lla all full", "ella", "valla"])
def test_a_shuffled_loader_and_the_global_state_change_nothing(name):
    x, y = data()
    shuffled = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    predictions = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        predictions.append(METHODS[name](tiny_mlp(), seed=5).fit(shuffled).predict(x))
    assert torch.equal(predictions[0].probs, predictions[1].probs)


def test_the_jacobians_budget_does_not_change_the_posterior():
    x, y = data()
    wide = LLA(tiny_mlp(), subset="all", structure="full").fit(loader(x, y, 40))
    narrow = LLA(tiny_mlp(), subset="all", structure="full", max_jacobian_elements=200).fit(loader(x, y, 40))
    torch.testing.assert_close(narrow.predict(x).cov, wide.predict(x).cov, rtol=1e-9, atol=1e-12)


def test_errors_say_what_to_do(monkeypatch):
    model = tiny_mlp()
    x, y = data()
    with pytest.raises(InputError, match="choose 'kron', 'full' or 'diag'"):
        LLA(model, structure="dense")
    with pytest.raises(InputError, match="choose 'last_layer' or 'all'"):
        LLA(model, subset="first_layer")
    with pytest.raises(InputError, match="1 ≤ num_features ≤ num_points"):
        ELLA(model, num_points=3, num_features=4)
    with pytest.raises(InputError, match="set num_points to at most"):
        ELLA(model, num_points=1000).fit(loader(x, y))
    for method in (LLA(model), ELLA(model), VaLLA(model)):
        with pytest.raises(NotFittedError, match="call fit"):
            method.predict(x)
    for method in (LLA(tiny_mlp(1)), ELLA(tiny_mlp(1), num_points=20, num_features=5), VaLLA(tiny_mlp(1))):
        with pytest.raises(InputError, match="give the network two outputs"):
            method.fit(loader(x, y))
    monkeypatch.setitem(__import__("sys").modules, "laplace", None)
    with pytest.raises(ScallaError, match=r"pip install 'scalla\[bench\]'"):
        LLA(model).fit(loader(x, y))
