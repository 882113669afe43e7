"""ScaLLA as estimators of scikit-learn: fit(X, y), predict_proba, predict(return_std=True), ood_score.

Without a network of your own they train a small one on the standardised table; a trained network is used as it is.
Needs `pip install "scalla[sklearn]"`, scikit-learn 1.6 or later.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from scalla import context as contexts
from scalla.integrations.tabular_network import build_mlp, train_network
from scalla.method import ScaLLA
from scalla.predictive import Prediction
from scalla.types import InputError, Likelihood

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError(
        f'scalla.integrations.sklearn needs scikit-learn 1.6 or later ({error}): pip install "scalla[sklearn]"'
    ) from error

#: rows that are predicted at a time
ROWS_AT_A_TIME = 1024
#: mean and standard deviation that leave numbers as they are
UNSCALED: tuple[np.ndarray, np.ndarray] = np.zeros(()), np.ones(())


class _ScaLLAEstimator(BaseEstimator):
    """What the two have in common; `ScaLLAClassifier` describes the arguments."""

    def __init__(
        self,
        model: nn.Module | Callable[[int, int], nn.Module] | None = None,
        *,
        hidden: Sequence[int] = (64, 64),
        num_epochs: int = 200,
        batch_size: int = 64,
        network_lr: float = 0.01,
        num_features: int = 50,
        surrogate: str | nn.Module = "mirror",
        num_steps: int = 500,
        lr: float = 1e-3,
        context: Any = None,
        bias: bool = False,
        prior_precision: float = 1.0,
        tune: bool = True,
        random_state: Any = None,
    ) -> None:
        self.model = model
        self.hidden = hidden
        self.num_epochs = num_epochs
        self.batch_size = batch_size
        self.network_lr = network_lr
        self.num_features = num_features
        self.surrogate = surrogate
        self.num_steps = num_steps
        self.lr = lr
        self.context = context
        self.bias = bias
        self.prior_precision = prior_precision
        self.tune = tune
        self.random_state = random_state

    @abstractmethod
    def fit(self, X: Any, y: Any) -> _ScaLLAEstimator:
        """Train the network if need be, then the surrogate, then sum the posterior."""

    def _fit(self, X: np.ndarray, targets: Tensor, likelihood: Likelihood, num_outputs: int) -> None:
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        is_trained = isinstance(self.model, nn.Module)
        self._x_mean, self._x_std = UNSCALED if is_trained else mean_and_std(X)
        x = self._standardised(X)
        network, sigma = self.model, torch.ones(1)
        if not isinstance(network, nn.Module):
            network = self._new_network(x, num_outputs, seed)
            x = x.to(next(network.parameters()).dtype)
            targets = targets.to(x.dtype) if likelihood == "regression" else targets
            sigma = train_network(
                network,
                x,
                targets,
                likelihood=likelihood,
                num_epochs=self.num_epochs,
                batch_size=self.batch_size,
                lr=self.network_lr,
                prior_precision=self.prior_precision,
                seed=seed,
            )
        la = ScaLLA(
            network,
            likelihood,
            num_features=self.num_features,
            surrogate=self.surrogate,
            prior_precision=self.prior_precision,
            sigma_noise=sigma,
            seed=seed,
        )
        loader = DataLoader(TensorDataset(x, targets), batch_size=self.batch_size, shuffle=True)
        la.fit(loader, context=self._context(x), bias=self.bias, num_steps=self.num_steps, lr=self.lr)
        if self.tune:
            tuned = ("prior_precision", "sigma_noise") if likelihood == "regression" else ("prior_precision",)
            la.optimize_prior_precision(method="marglik", tune=tuned)
        self.scalla_ = la

    def _new_network(self, x: Tensor, num_outputs: int, seed: int) -> nn.Module:
        if self.model is None:
            return build_mlp(x.shape[1], num_outputs, hidden=self.hidden, seed=seed)
        if not callable(self.model):
            raise InputError(
                f"got a model of type {type(self.model).__name__}; wanted None, a trained torch.nn.Module or a "
                "function (num_inputs, num_outputs) -> torch.nn.Module"
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.model(x.shape[1], num_outputs)

    def _context(self, x: Tensor) -> Any:
        if self.context is None:
            return None
        if not isinstance(self.context, str):
            return self._standardised(np.asarray(self.context, dtype=np.float64)).to(x.dtype)
        if self.context != "generated":
            raise InputError(f"got context={self.context!r}; wanted an array with the columns of X, or 'generated'")
        return contexts.default(x)

    def _standardised(self, X: np.ndarray) -> Tensor:
        # A copy: arrays of scikit-learn's parallel jobs are memory that must not be written to.
        return torch.tensor((X - self._x_mean) / self._x_std)

    def _blocks(self, X: Any) -> Iterator[Tensor]:
        """Rows as the network takes them, a few at a time."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=[np.float64, np.float32], allow_nd=self.model is not None)
        yield from self._standardised(X).split(ROWS_AT_A_TIME)

    def _predictions(self, X: Any) -> Iterator[Prediction]:
        for x in self._blocks(X):
            with torch.no_grad():
                yield self.scalla_.predict(x, n_samples=0)

    def ood_score(self, X: Any, score: str = "gaussian_entropy") -> np.ndarray:
        """One number for each row, larger = more out of distribution; see `scalla.SCORES`."""
        with torch.no_grad():
            return array([self.scalla_.ood_score(x, score) for x in self._blocks(X)])


@final
class ScaLLAClassifier(ClassifierMixin, _ScaLLAEstimator):
    """A classifier with calibrated probabilities and an out-of-distribution score.

    Args:
        model: None for a multilayer perceptron that is trained here; a function (num_inputs, num_outputs) → network
            for one of your own that is trained here; or a trained network, which is used as it is. Inputs (and targets
            of a regression) are standardised, unless the network is trained already.
        hidden: widths of the perceptron's hidden layers.
        num_epochs: epochs of the network's training.
        batch_size: rows in a batch, of the network's training and of the surrogate's.
        network_lr: learning rate of the network's training.
        num_features: m, the rank of the kernel.
        surrogate: "mirror", "trunk", or a module of your own, x → (B, C, m).
        num_steps: training steps of the surrogate.
        lr: learning rate of the surrogate's training.
        context: rows unlike the training data, an array with the same columns; "generated" makes some of the training
            data (`scalla.context.default`).
        bias: fall back to the prior away from the training data; needs a context.
        prior_precision: δ, of the network's training and of the posterior.
        tune: choose δ (and the noise of a regression) by the evidence after the fit.
        random_state: decides everything random.

    Attributes:
        scalla_: the fitted ScaLLA; it sees standardised inputs, unless the network was trained already.
        n_features_in_: columns of X.
        classes_: the labels, in the order of the columns of `predict_proba`.

    Examples:
        >>> from sklearn.datasets import load_iris
        >>> from scalla.integrations.sklearn import ScaLLAClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> classifier = ScaLLAClassifier(num_epochs=20, num_steps=50, random_state=0).fit(X, y)
        >>> classifier.predict_proba(X[:5]).shape
        (5, 3)
    """

    def fit(self, X: Any, y: Any) -> ScaLLAClassifier:
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], allow_nd=self.model is not None)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        num_classes = len(self.classes_)
        if num_classes < 2:
            raise InputError(f"got labels of one class, {str(self.classes_[0])!r} alone; wanted at least two classes")
        self._fit(X, torch.tensor(labels), "classification", num_classes)
        if max(self.scalla_.n_outputs, 2) != num_classes:
            raise InputError(
                f"got labels of {num_classes} classes for a network with {self.scalla_.n_outputs} outputs; wanted "
                "labels of every class that it knows"
            )
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities (N, C), the columns in the order of `classes_`."""
        probs = array([p.probs for p in self._predictions(X)])
        return np.concatenate([1 - probs, probs], 1) if probs.shape[1] == 1 else probs

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Logarithms of the class probabilities."""
        return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> np.ndarray:
        """The class of the largest probability."""
        check_is_fitted(self)
        return self.classes_[self.predict_proba(X).argmax(1)]


@final
class ScaLLARegressor(RegressorMixin, _ScaLLAEstimator):
    """A regressor with error bars and an out-of-distribution score; y has one column or several.

    Arguments and attributes are those of `ScaLLAClassifier`, `classes_` left out.

    Examples:
        >>> from sklearn.datasets import load_diabetes
        >>> from scalla.integrations.sklearn import ScaLLARegressor
        >>> X, y = load_diabetes(return_X_y=True)
        >>> regressor = ScaLLARegressor(num_epochs=5, num_steps=50, random_state=0).fit(X, y)
        >>> mean, std = regressor.predict(X[:5], return_std=True)
        >>> mean.shape, std.shape
        ((5,), (5,))
    """

    def fit(self, X: Any, y: Any) -> ScaLLARegressor:
        X, y = validate_data(
            self,
            X,
            y,
            dtype=[np.float64, np.float32],
            allow_nd=self.model is not None,
            multi_output=True,
            y_numeric=True,
        )
        self._is_one_column = y.ndim == 1
        y = np.asarray(y, dtype=np.float64).reshape(len(y), -1)
        self._y_mean, self._y_std = UNSCALED if isinstance(self.model, nn.Module) else mean_and_std(y)
        self._fit(X, torch.tensor((y - self._y_mean) / self._y_std), "regression", y.shape[1])
        return self

    def predict(
        self, X: Any, return_std: bool = False, *, with_noise: bool = True
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """The mean; with `return_std` also the standard deviation of an observation y.

        `with_noise=False` leaves the observation noise out: the standard deviation of the function alone.
        """
        predictions = list(self._predictions(X))
        mean = self._of_targets(array([p.mean for p in predictions]) * self._y_std + self._y_mean)
        if not return_std:
            return mean
        var = array([p.var_with_noise if with_noise else p.var for p in predictions])
        return mean, self._of_targets(np.sqrt(var) * self._y_std)

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Functions of the posterior at X, without noise: (N, n_samples), or (N, C, n_samples) for several targets."""
        blocks = list(self._blocks(X))
        seed = int(check_random_state(random_state).randint(np.iinfo(np.int32).max))
        functions = self.scalla_.function_sampler(n_samples, torch.Generator().manual_seed(seed))
        with torch.no_grad():
            samples = array([functions(x).transpose(0, 1) for x in blocks]) * self._y_std + self._y_mean
        return self._of_targets(samples.transpose(0, 2, 1))

    def _of_targets(self, values: np.ndarray) -> np.ndarray:
        """As y was given: without a second dimension where y had none."""
        return values[:, 0] if self._is_one_column else values

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def mean_and_std(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each column; a constant one has the standard deviation 1."""
    std = values.std(0)
    return values.mean(0), np.where(std > 0, std, 1.0)


def array(parts: Sequence[Tensor]) -> np.ndarray:
    return torch.cat(list(parts)).numpy(force=True)
