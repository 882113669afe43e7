"""ScaLLA: scalable linearized Laplace for a network that is already trained.

fit      probes → jvp → kernel_loss → surrogate → ggn → posterior
predict  features → push-forward → link
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm.auto import tqdm

from scalla import tuning
from scalla.batches import EndlessBatches, inputs_of, labels_of
from scalla.features import FeatureMap, undone_on_error
from scalla.fitting import FitData, run_fit, sum_ggn
from scalla.functional import ParameterFilter, batch_size
from scalla.ggn import GGNSums, check_inputs
from scalla.kernel_error import KernelError, exact_kernel, kernel_error, without_cross_groups
from scalla.likelihoods import check_labels
from scalla.posterior import Posterior
from scalla.predicting import LinearizedPredictive, check_pred_type
from scalla.predictive import Prediction
from scalla.probes import PROBES, Probe
from scalla.saving import CONSTRUCTOR_KEYS, load_tensors, read_posterior, save_posterior
from scalla.training import HistoryEntry, Schedule, TrainingSettings
from scalla.types import InputError, Inputs, Likelihood, Link, Loader


@final
class ScaLLA(LinearizedPredictive):
    """Calibrated probabilities, error bars and an out-of-distribution score for a trained network.

    Args:
        model: the trained network, x → (B, C). It is never changed.
        likelihood: "classification" (logits; C = 1 is a single logit) or "regression".
        num_features: m, the rank of the kernel.
        surrogate: "mirror", "trunk", or a module of your own, x → (B, C, m), trained in place.
        probe: "rademacher" or "gaussian".
        prior_precision: δ of the prior θ ~ N(prior_mean, δ⁻¹ I).
        sigma_noise: σ of the regression noise, one or one for each output.
        temperature: T; lower is more concentrated.
        seed: decides everything random.
        prior_mean: the prior's mean, one number for all weights.
        parameters: the weights of the kernel: "trainable", "all", "last_layer", name patterns or a function.
        surrogate_options: options of the surrogate (mirror: start; trunk: hidden).
        dict_key_y: where a mapping holds the labels.
        enable_backprop: keep gradients with respect to x in predictions.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from scalla import ScaLLA
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> data = TensorDataset(torch.randn(64, 2), torch.randint(3, (64,)))
        >>> la = ScaLLA(model, "classification", num_features=10)
        >>> la = la.fit(DataLoader(data, batch_size=16), num_steps=20)
        >>> la(torch.randn(5, 2)).shape
        torch.Size([5, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood = "classification",
        *,
        num_features: int = 100,
        surrogate: str | nn.Module = "mirror",
        probe: Probe = "rademacher",
        prior_precision: float | Tensor = 1.0,
        sigma_noise: float | Tensor = 1.0,
        temperature: float = 1.0,
        seed: int = 0,
        prior_mean: float = 0.0,
        parameters: ParameterFilter = "trainable",
        surrogate_options: Mapping[str, Any] | None = None,
        dict_key_y: str = "labels",
        enable_backprop: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise InputError(f"got a model of type {type(model).__name__}; wanted a torch.nn.Module")
        if likelihood not in ("classification", "regression"):
            raise InputError(f"got likelihood={likelihood!r}; choose 'classification' or 'regression'")
        if not isinstance(num_features, int) or num_features < 1:
            raise InputError(f"got num_features={num_features!r}; wanted a whole number of at least 1")
        if probe not in PROBES:
            raise InputError(f"got probe={probe!r}; choose one of {', '.join(PROBES)}")
        if not isinstance(surrogate, nn.Module) and surrogate not in ("mirror", "trunk"):
            raise InputError(f"got surrogate={surrogate!r}; choose 'mirror', 'trunk' or give a module x -> (B, C, m)")
        self.model = model
        self.likelihood: Likelihood = likelihood
        self.num_features = num_features
        self.surrogate_kind = "custom" if isinstance(surrogate, nn.Module) else surrogate
        self.surrogate: nn.Module | None = surrogate if isinstance(surrogate, nn.Module) else None
        self.surrogate_options = dict(surrogate_options or {})
        self.probe: Probe = probe
        self.prior_mean = float(prior_mean)
        self.parameters_filter = parameters
        self.seed = seed
        self.dict_key_y = dict_key_y
        self.enable_backprop = enable_backprop
        self.history: list[HistoryEntry] = []
        self.posterior: Posterior | None = None
        self.feature_map: FeatureMap | None = None
        if (
            sigma_noise is not None
            and likelihood == "classification"
            and bool((torch.as_tensor(sigma_noise) != 1).any())
        ):
            raise InputError(f"got sigma_noise={sigma_noise} for a classification, which has no observation noise")
        self.prior_precision = prior_precision
        self.sigma_noise = sigma_noise
        self.temperature = temperature

    # ---------------------------------------------------------------- fit

    def fit(
        self,
        train_loader: Loader,
        context: Any = None,
        bias: bool = False,
        num_steps: int = 2000,
        num_probes: int = 1,
        context_batch_size: int | None = None,
        lr: float = 1e-3,
        progress_bar: bool = False,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        resume: bool = False,
        override: bool = True,
        *,
        schedule: Schedule = "cosine",
        val_loader: Loader | None = None,
        score_every: int = 100,
        patience: int | None = None,
        callback: Callable[[HistoryEntry], bool | None] | None = None,
        checkpoint_every: float = 30.0,
    ) -> ScaLLA:
        """Train the surrogate on the kernel, then sum the precision over the training data.

        Args:
            train_loader: batches (x, y) or mappings, more than once if need be.
            context: inputs without labels: a loader, dataset, tensor, or a list of these (a group each).
            bias: zero the kernel between training data and each context group, so that the posterior falls
                back to the prior away from the training data.
            num_steps: training steps of the surrogate; 0 leaves it as it is.
            num_probes: directions averaged at each step.
            context_batch_size: inputs of each context at each step; by default as many as of the training data.
            lr: learning rate of Adam.
            progress_bar: show progress with loss and rate.
            checkpoint_dir: folder for a checkpoint; a fit that was stopped goes on with resume=True.
            resume: go on from the checkpoint, if there is one.
            override: False adds the data to the present posterior (as `update`).
            schedule: "cosine" or "constant".
            val_loader: held-out inputs on which the kernel is scored, for the history and early stopping.
            score_every: steps between two such scores.
            patience: stop after so many scores without improvement.
            callback: called with every HistoryEntry; returning True stops the training.
            checkpoint_every: seconds between two checkpoints.
        """
        if not override and self.posterior is not None:
            return self.update(train_loader, progress_bar=progress_bar)
        settings = TrainingSettings(
            num_steps=num_steps,
            num_probes=num_probes,
            probe=self.probe,
            lr=lr,
            schedule=schedule,
            bias=bias,
            seed=self.seed,
            score_every=score_every,
            patience=patience,
        )
        if patience is not None and val_loader is None:
            raise InputError("got patience without val_loader; early stopping needs held-out inputs")
        data = FitData.of(train_loader, context, context_batch_size, bias, val_loader, self.seed)
        features = FeatureMap.of_data(
            self.model,
            data.train,
            likelihood=self.likelihood,
            num_features=self.num_features,
            parameters=self.parameters_filter,
            dict_key_y=self.dict_key_y,
        )
        self._check_noise_levels(features.num_outputs)
        blocks = data.check(self.likelihood, features)
        if self.surrogate_kind == "custom":
            assert self.surrogate is not None
            features.install(self.surrogate)
        else:
            features.build(self.surrogate_kind, blocks[0], self.surrogate_options, self.seed)
        surrogate = features.surrogate
        assert surrogate is not None
        # Until everything has worked, this object and a surrogate of the user's own are what they were.
        with undone_on_error(surrogate) if self.surrogate_kind == "custom" else contextlib.nullcontext():
            features.set_training(False)
            with torch.no_grad():
                features.check(features.raw(blocks[0]), batch_size(blocks[0]))
            sums, history = run_fit(
                features,
                data,
                blocks,
                settings,
                self.likelihood,
                identity={
                    "num_features": self.num_features,
                    "surrogate": self.surrogate_kind,
                    "surrogate_options": repr(sorted(self.surrogate_options.items())),
                    "likelihood": self.likelihood,
                },
                checkpoint_dir=checkpoint_dir,
                checkpoint_every=checkpoint_every,
                resume=resume,
                progress_bar=progress_bar,
                callback=callback,
            )
            posterior = self._posterior_of(features, sums)
        self.surrogate, self.feature_map, self.posterior, self.history = surrogate, features, posterior, history
        return self

    def update(self, loader: Loader, *, progress_bar: bool = False) -> ScaLLA:
        """Add data to the posterior, exactly as if they had been in the fit's precision from the start."""
        self._posterior.plus(self._sums_of(loader, progress_bar), +1)
        return self

    def forget(self, loader: Loader, *, progress_bar: bool = False) -> ScaLLA:
        """Take data out of the posterior again, exactly."""
        self._posterior.plus(self._sums_of(loader, progress_bar), -1)
        return self

    def _sums_of(self, loader: Loader, progress_bar: bool) -> GGNSums:
        data = EndlessBatches(loader, seed=self.seed, name="loader")
        return sum_ggn(self._fitted_map, data, self.likelihood, progress_bar=progress_bar)

    def _posterior_of(self, features: FeatureMap, sums: GGNSums) -> Posterior:
        shifted = [(p.double() - self.prior_mean).square().sum() for p in features.params.values()]
        return Posterior(
            sums,
            self.likelihood,
            num_outputs=features.num_outputs,
            prior_precision=self._prior_precision,
            sigma_noise=self._sigma_noise,
            temperature=self._temperature,
            weights_sq_norm=float(torch.stack(shifted).sum()),
            num_params=sum(p.numel() for p in features.params.values()),
        )

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
    ) -> ScaLLA:
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
            held_out = self._held_out(val_loader, progress_bar=progress_bar)
            if "prior_precision" in tune:
                self.prior_precision = init
            self._set(tuning.by_gradient(posterior, held_out, tune=tune, num_steps=n_steps))
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

    def kernel_error(self, x: Inputs, context: Inputs | None = None) -> KernelError:
        """Relative error of g gᵀ against the exact NTK at x, and the floor of rank m.

        With `context`, the biased target: the kernel of x and context with the blocks between them zeroed.
        """
        features = self._fitted_map
        if context is None:
            return kernel_error(self.features(x), exact_kernel(features.plain, features.params, x))
        if not isinstance(x, Tensor) or not isinstance(context, Tensor):
            raise InputError("kernel_error with context takes tensors")
        kernel = exact_kernel(features.plain, features.params, torch.cat([x, context.to(x)]))
        biased = without_cross_groups(kernel, [len(x) * features.num_outputs, len(context) * features.num_outputs])
        return kernel_error(torch.cat([self.features(x), self.features(context)]), biased)

    # ---------------------------------------------------------------- files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write surrogate and posterior to one safetensors file (no pickle, no training data, not the network)."""
        save_posterior(self, self._posterior, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module, surrogate: nn.Module | None = None) -> ScaLLA:
        """Read what `save` wrote, for the same network; `surrogate` where the fit used one of your own."""
        tensors, meta = read_posterior(path, model, custom=surrogate is not None)
        la = cls(model, surrogate=surrogate or meta["surrogate"], **{k: meta[k] for k in CONSTRUCTOR_KEYS})
        la._restore(tensors, meta, path)
        return la

    def _restore(self, tensors: dict[str, Tensor], meta: dict[str, Any], path: object) -> None:
        """Network, surrogate and posterior as they were when saved."""
        chosen = set(meta["parameters"])
        params = {k: p.detach() for k, p in self.model.named_parameters() if k in chosen}
        features = FeatureMap(
            self.model,
            params,
            num_outputs=meta["num_outputs"],
            num_features=self.num_features,
            dict_key_y=self.dict_key_y,
        )
        if meta["head"] is not None:
            self.surrogate = features.rebuild(self.surrogate_kind, meta["head"], self.surrogate_options)
        assert self.surrogate is not None
        features.install(self.surrogate)
        features.scale = meta["feature_scale"]
        load_tensors(self.surrogate, tensors, path)
        self.surrogate.eval()
        self.feature_map = features
        self.history = [HistoryEntry(**entry) for entry in meta["history"]]
        self.sigma_noise = tensors["sigma_noise"]
        device = features.plain.device
        sums = GGNSums(tensors["posterior.ggn"].to(device), tensors["posterior.loss"].to(device), meta["num_data"])
        self.posterior = self._posterior_of(features, sums)

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
        self._sigma_noise = found.reshape(()) if found.numel() == 1 else found
        if getattr(self, "feature_map", None) is not None:
            self._check_noise_levels(self._fitted_map.num_outputs)
        self._pass_on("sigma_noise", self._sigma_noise)

    @property
    def temperature(self) -> float:
        """T of H/T + δI; lower is more concentrated."""
        return self._temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        self._temperature = float(_positive_tensor(value, "temperature"))
        self._pass_on("temperature", self._temperature)

    def _pass_on(self, name: str, value: Any) -> None:
        if getattr(self, "posterior", None) is not None:
            self._posterior.configure(**{name: value})

    def _check_noise_levels(self, num_outputs: int) -> None:
        if self._sigma_noise.numel() not in (1, num_outputs):
            raise InputError(
                f"got sigma_noise with {self._sigma_noise.numel()} entries for {num_outputs} outputs; give one, or one "
                "for each output"
            )

    # ---------------------------------------------------------------- as a module

    def train(self, mode: bool = True) -> ScaLLA:
        """Predictions are always those of the evaluation mode; the network's own mode is left alone."""
        self.training = mode
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ScaLLA:
        super()._apply(fn, recurse)
        if self.feature_map is not None:
            self.feature_map.sync()
        return self

    def extra_repr(self) -> str:
        fitted = f"{self.posterior.num_data} inputs" if self.posterior is not None else "not fitted"
        return f"likelihood={self.likelihood!r}, num_features={self.num_features}, {fitted}"


def _positive_tensor(value: float | Tensor, name: str) -> Float[Tensor, ...]:
    """`value` in float64, gradients kept; finite and positive."""
    try:
        found = torch.as_tensor(value).double()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"got {name}={value!r}; wanted a positive number") from error
    if not bool((torch.isfinite(found) & (found > 0)).all()):
        raise InputError(f"got {name}={value!r}; wanted a positive number (1.0, say)")
    return found
