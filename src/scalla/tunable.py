"""δ, σ and T of a fitted method: checked when they are set, and tuned by the evidence or by held-out data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from scalla import tuning
from scalla.batches import EndlessBatches, inputs_of, labels_of
from scalla.ggn import check_inputs
from scalla.hidden import mark
from scalla.likelihoods import check_labels
from scalla.predicting import LinearizedPredictive, check_pred_type
from scalla.residual_fit import fitted_residual
from scalla.types import InputError, Link, Loader

if TYPE_CHECKING:
    from typing_extensions import Self


class TunablePredictive(LinearizedPredictive):
    """A predictive whose prior precision, noise and temperature can be set and tuned."""

    dict_key_y: str

    # ---------------------------------------------------------------- settings and what they decide

    @property
    def prior_precision(self) -> Float[Tensor, 1]:
        """δ, as a tensor of one entry."""
        return self._prior_precision.reshape(1)

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        found = _positive_tensor(value, "prior_precision")
        if found.numel() != 1:
            raise InputError(
                f"got a prior_precision of {found.numel()} entries; the features mix all weights, so a layer-wise or "
                "diagonal prior cannot exist here: give one number"
            )
        self._prior_precision = found.detach().reshape(())
        self._pass_on("prior_precision", self._prior_precision)

    @property
    def sigma_noise(self) -> Tensor:
        """σ of the observation noise, one or one for each output."""
        return self._sigma_noise

    @sigma_noise.setter
    def sigma_noise(self, value: float | Tensor) -> None:
        found = _positive_tensor(value, "sigma_noise").detach()
        if getattr(self, "feature_map", None) is not None:
            check_noise_levels(found, self._fitted_map.num_outputs)
        self._sigma_noise = found.reshape(()) if found.numel() == 1 else found
        self._pass_on("sigma_noise", self._sigma_noise)

    @property
    def temperature(self) -> float:
        """T of H/T + δI; lower is more concentrated."""
        return self._temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        found = _positive_tensor(value, "temperature")
        if found.numel() != 1:
            raise InputError(f"got a temperature of {found.numel()} entries; wanted one number")
        self._temperature = float(found)
        self._pass_on("temperature", self._temperature)

    def _pass_on(self, name: str, value: Any) -> None:
        if getattr(self, "posterior", None) is not None:
            self._posterior.configure(**{name: value})

    # ---------------------------------------------------------------- evidence and tuning

    def log_marginal_likelihood(
        self, prior_precision: Tensor | float | None = None, sigma_noise: Tensor | float | None = None
    ) -> Float[Tensor, ""]:
        """The Laplace evidence at these values (or the present ones); differentiable, mutates nothing."""
        if sigma_noise is not None and self.likelihood != "regression":
            raise InputError("got sigma_noise for a classification, which has no observation noise")
        delta = None if prior_precision is None else _positive_tensor(prior_precision, "prior_precision")
        sigma = None if sigma_noise is None else _positive_tensor(sigma_noise, "sigma_noise")
        return self._posterior.log_marginal_likelihood(delta, sigma)

    def optimize_prior_precision(
        self,
        pred_type: str = "glm",
        method: str = "marglik",
        n_steps: int = 100,
        init_prior_prec: float | Tensor = 1.0,
        prior_structure: str = "scalar",
        val_loader: Loader | None = None,
        loss: tuning.Loss | None = None,
        log_prior_prec_min: float = -4,
        log_prior_prec_max: float = 4,
        grid_size: int = 100,
        link_approx: Link = "probit",
        n_samples: int = 100,
        verbose: bool = False,
        progress_bar: bool = False,
        log_prior_prec_base: float = 10.0,
        *,
        tune: Sequence[str] = ("prior_precision",),
    ) -> Self:
        """Set the prior precision (and with `tune` the temperature or the noise) to what suits the data best.

        "marglik": the evidence, solved exactly. "gridsearch": the least held-out loss on a grid; `loss` takes a
        Prediction and labels and returns one number for each input (NLL by default), or is a torchmetrics metric
        of what a call returns. "gradient": the held-out NLL, minimised in any of prior_precision (from
        `init_prior_prec` on), temperature and sigma_noise.
        """
        if pred_type in tuning.METHODS:  # optimize_prior_precision("marglik") reads well, too
            pred_type, method = "glm", pred_type
        check_pred_type(pred_type)
        if method not in tuning.METHODS:
            raise InputError(f"got method={method!r}; choose one of {', '.join(tuning.METHODS)}")
        if prior_structure != "scalar":
            raise InputError(
                f"got prior_structure={prior_structure!r}; the features mix all weights, so a layer-wise or diagonal "
                "prior cannot exist here: use 'scalar'"
            )
        posterior = self._posterior
        init = _positive_tensor(init_prior_prec, "init_prior_prec")
        if method == "marglik":
            self._set(tuning.by_evidence(posterior, tune=tune, num_steps=n_steps))
        elif val_loader is None:
            raise InputError(f"got method={method!r} without val_loader; it needs held-out data (x, y)")
        elif method == "gradient":
            if link_approx != "probit" or loss is not None:
                raise InputError(
                    "method='gradient' minimises the NLL of the probit link; for another link_approx or loss use "
                    "method='gridsearch'"
                )
            held_out = self._held_out(val_loader, progress_bar=progress_bar)
            self._set(tuning.by_gradient(posterior, held_out, tune=tune, num_steps=n_steps, init_prior_precision=init))
        else:
            grid = torch.logspace(
                log_prior_prec_min, log_prior_prec_max, grid_size, base=log_prior_prec_base, dtype=torch.float64
            )
            self._set(
                tuning.by_grid(
                    posterior,
                    self._held_out(val_loader, progress_bar=progress_bar),
                    grid.tolist(),
                    link=link_approx,
                    noise=self._draw(self.num_features, n_samples, None),
                    loss=loss or tuning.held_out_nll,
                )
            )
        if verbose:
            print(f"prior precision {float(self._prior_precision):.4g}")
        return self

    def fit_residual(
        self,
        train_loader: Loader,
        val_loader: Loader,
        *,
        context: Any = "generated",
        context_weight: float = 0.01,
        layers: Sequence[str] | None = None,
        ridge: float = 0.1,
        progress_bar: bool = False,
    ) -> Self:
        """Add the variance v(x) that the kernel of rank m leaves out where an input is unfamiliar: `scalla.residual`.

        Everything that predicts has it from then on, without a further pass of the network.

        Args:
            train_loader: the training data (x, y), passed once through the network.
            val_loader: held-out data (x, y), on which v is calibrated by their likelihood; none of the training data.
            context: inputs that should be told apart: a loader, dataset, tensor or list of these, best others than
                those of the fit. "generated" makes them of the training inputs (`scalla.context.default`). With None,
                and for regression, the held-out likelihood alone decides.
            context_weight: what uniform labels there weigh against the labels of the held-out data.
            layers: names of the layers whose inputs tell what is familiar; by default the last convolution and the
                last three linear layers that are given one vector for each input.
            ridge: share of the mean variance that is added to each class's covariance.
            progress_bar: show progress.
        """
        residual = fitted_residual(
            self,
            train_loader,
            val_loader,
            context=context,
            context_weight=context_weight,
            layers=layers,
            ridge=ridge,
            dict_key_y=self.dict_key_y,
            progress_bar=progress_bar,
        )
        mark(self._fitted_map.network, residual.layers)
        self.residual = residual
        return self

    def _set(self, values: tuning.TunedValues) -> None:
        self.prior_precision = values.prior_precision
        self.temperature = values.temperature
        if self.likelihood == "regression":
            self.sigma_noise = values.sigma_noise

    def _held_out(self, loader: Loader, *, progress_bar: bool) -> list[tuning.HeldOut]:
        data = EndlessBatches(loader, seed=self.seed, name="val_loader")
        found = []
        for batch in tqdm(data.one_epoch(), disable=not progress_bar, desc="held-out data", unit="batch"):
            x = inputs_of(batch)
            check_inputs(x, "val_loader")
            with torch.no_grad():
                outputs, features = self._outputs_and_features(x)
            found.append(
                tuning.HeldOut(
                    outputs,
                    features,
                    check_labels(self.likelihood, outputs, labels_of(batch, self.dict_key_y)),
                )
            )
        return found


def check_noise_levels(sigma_noise: Tensor, num_outputs: int) -> None:
    if sigma_noise.numel() not in (1, num_outputs):
        raise InputError(
            f"got sigma_noise with {sigma_noise.numel()} entries for {num_outputs} outputs; give one, or one for each "
            "output"
        )


def _positive_tensor(value: float | Tensor, name: str) -> Float[Tensor, ...]:
    """`value` in float64, gradients kept; finite and positive."""
    try:
        found = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"got {name}={value!r}; wanted a positive number") from error
    if found.numel() == 0 or not bool((torch.isfinite(found) & (found > 0)).all()):
        raise InputError(f"got {name}={value!r}; wanted a positive number (1.0, say)")
    return found
