"""ScaLLA: scalable linearized Laplace for a network that is already trained.

fit      probes → jvp → kernel_loss → surrogate → ggn → posterior
predict  features → push-forward → link
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm.auto import tqdm

from scalla import tuning
from scalla.batches import EndlessBatches, inputs_of, labels_of
from scalla.features import FeatureMap
from scalla.fitting import FitData, run_fit, sum_ggn
from scalla.functional import ParameterFilter, batch_size
from scalla.ggn import GGNSums, check_inputs
from scalla.kernel_error import KernelError, exact_kernel, kernel_error, without_cross_groups
from scalla.likelihoods import check_labels
from scalla.posterior import Posterior
from scalla.predictive import LINKS, Prediction, closed_form_probs, mean_softmax, ood_score
from scalla.probes import PROBES, Probe, mix_seed
from scalla.saving import CONSTRUCTOR_KEYS, load_tensors, read_posterior, save_posterior
from scalla.training import HistoryEntry, Schedule, TrainingSettings
from scalla.types import InputError, Inputs, Likelihood, Link, Loader, NotFittedError

_TUNING_METHODS = ("marglik", "gridsearch", "gradient")


class ScaLLA(nn.Module):
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
        self.prior_precision = prior_precision  # type: ignore[assignment]
        self.sigma_noise = sigma_noise  # type: ignore[assignment]
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
        if not override:
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
            features.check(features.raw(blocks[0]), batch_size(blocks[0]))
        else:
            self.surrogate = features.build(self.surrogate_kind, blocks[0], self.surrogate_options, self.seed)
        self.posterior, self.feature_map, self.history = None, features, []
        sums, self.history = run_fit(
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
        self._make_posterior(sums)
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

    def _make_posterior(self, sums: GGNSums) -> None:
        features = self._fitted_map
        shifted = [(p.double() - self.prior_mean).square().sum() for p in features.params.values()]
        self.posterior = Posterior(
            sums,
            self.likelihood,
            num_outputs=features.num_outputs,
            prior_precision=self._prior_precision,
            sigma_noise=self._sigma_noise,
            temperature=self._temperature,
            weights_sq_norm=float(torch.stack(shifted).sum()),
            num_params=sum(p.numel() for p in features.params.values()),
        )

    # ---------------------------------------------------------------- features and prediction

    def features(self, x: Inputs) -> Float[Tensor, "B C m"]:
        """g(x), in the scale of the kernel: features(x) @ features(x').T ≈ K_NTK(x, x')."""
        return self._outputs_and_features(x)[1]

    def _outputs_and_features(self, x: Inputs) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B C m"]]:
        with torch.set_grad_enabled(self.enable_backprop and torch.is_grad_enabled()):
            return self._fitted_map(x)

    def predict(
        self,
        x: Inputs,
        *,
        link_approx: Link = "probit",
        n_samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """Mean, variances, probabilities and scores at x; each is computed when it is read."""
        if link_approx not in LINKS:
            raise InputError(f"got link_approx={link_approx!r}; choose one of {', '.join(LINKS)}")
        posterior = self._posterior
        outputs, features = self._outputs_and_features(x)
        factor = features @ posterior.factor.to(features)
        noise = self._draw(self.num_features, n_samples, generator).to(factor) if n_samples else None
        noise_var = self._sigma_noise.reshape(-1).square().to(factor) if self.likelihood == "regression" else None
        return Prediction(outputs, factor, self.likelihood, link_approx, noise=noise, noise_var=noise_var)

    def forward(
        self,
        x: Inputs,
        pred_type: str = "glm",
        joint: bool = False,
        link_approx: Link = "probit",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Probabilities (B, C); for regression (mean, variance) of f, observation noise left out.

        As laplace-torch's call: `joint=True` gives one covariance over all inputs and outputs (regression),
        `diagonal_output=True` variances instead of covariances (regression) or independent draws ("mc").
        """
        _check_pred_type(pred_type)
        by_samples = self.likelihood == "classification" and link_approx == "mc"
        prediction = self.predict(
            x, link_approx=link_approx, n_samples=n_samples if by_samples else 0, generator=generator
        )
        if self.likelihood == "regression":
            if joint:
                flat = prediction.factor.flatten(0, 1)
                return prediction.mean.flatten(), flat @ flat.mT
            if diagonal_output:
                return prediction.mean, prediction.factor.square().sum(-1)
            return prediction.mean, prediction.factor @ prediction.factor.mT
        if not by_samples:
            probs = closed_form_probs(prediction.mean, prediction.factor, link_approx)
            return probs[:, 1:] if prediction.mean.shape[-1] == 1 else probs
        if diagonal_output:
            return _mean_probs(self._diagonal_samples(prediction, n_samples, generator))
        return prediction.probs

    def ood_score(self, x: Inputs, score: str = "gaussian_entropy", **options: Any) -> Float[Tensor, " B"]:
        """One number for each input, larger = more out of distribution."""
        return ood_score(self.predict(x, **options), score)

    def functional_variance(self, x: Inputs) -> Float[Tensor, "B C C"]:
        """Σ(x) = g(x) (H/T + δI)⁻¹ g(x)ᵀ."""
        return self.predict(x, n_samples=0).cov

    def functional_covariance(self, x: Inputs, other: Inputs | None = None) -> Float[Tensor, "BC DC"]:
        """Σ(x, x'), jointly over all inputs and outputs; x' = x where none is given."""
        left = self.predict(x, n_samples=0).factor.flatten(0, 1)
        right = left if other is None else self.predict(other, n_samples=0).factor.flatten(0, 1)
        return left @ right.mT

    def functional_samples(
        self,
        x: Inputs,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        *,
        pred_type: str = "glm",
        diagonal_output: bool = False,
    ) -> Float[Tensor, "S B C"]:
        """f(x) + g(x) w for draws w of the posterior.

        Without a generator the draws are a function of the seed: every call sees the same S functions, so that
        samples are coherent across batches. `function_sampler` gives coherent functions of a generator.
        """
        _check_pred_type(pred_type)
        if diagonal_output:
            return self._diagonal_samples(self.predict(x, n_samples=0), n_samples, generator)
        return self.function_sampler(n_samples, generator)(x)

    def predictive_samples(
        self,
        x: Inputs,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        *,
        pred_type: str = "glm",
        diagonal_output: bool = False,
    ) -> Float[Tensor, "S B C"]:
        """Function samples through the link: class probabilities; for regression the samples themselves."""
        samples = self.functional_samples(x, n_samples, generator, pred_type=pred_type, diagonal_output=diagonal_output)
        if self.likelihood == "regression":
            return samples
        return torch.softmax(samples, -1) if samples.shape[-1] > 1 else torch.sigmoid(samples)

    def function_sampler(
        self, n_samples: int = 100, generator: torch.Generator | None = None
    ) -> Callable[[Inputs], Float[Tensor, "S B C"]]:
        """S functions drawn once, to be evaluated on any number of batches: x → (S, B, C)."""
        weights = self.sample(n_samples, generator)

        def functions(x: Inputs) -> Tensor:
            outputs, features = self._outputs_and_features(x)
            return outputs + torch.einsum("bcm,sm->sbc", features, weights.to(features))

        return functions

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Float[Tensor, "S m"]:
        """Draws w ~ N(0, (H/T + δI)⁻¹) of the feature weights."""
        factor = self._posterior.factor
        return (factor @ self._draw(self.num_features, n_samples, generator).to(factor)).mT

    def _draw(self, rows: int, n_samples: int, generator: torch.Generator | None) -> Float[Tensor, "R S"]:
        if not isinstance(n_samples, int) or n_samples < 0:
            raise InputError(f"got n_samples={n_samples!r}; wanted a whole number")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise InputError(f"got a generator of type {type(generator).__name__}; wanted a torch.Generator")
        if generator is None:
            generator = torch.Generator().manual_seed(mix_seed(self.seed, 104))
        # One row a sample: the first functions are the same however many are asked for.
        return torch.randn(n_samples, rows, dtype=torch.float64, generator=generator, device=generator.device).mT

    def _diagonal_samples(
        self, prediction: Prediction, n_samples: int, generator: torch.Generator | None
    ) -> Float[Tensor, "S B C"]:
        noise = self._draw(prediction.mean.shape[-1], n_samples, generator).to(prediction.mean)
        return prediction.mean + prediction.var.sqrt() * noise.mT[:, None, :]

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
        init_prior_prec: float | Tensor | None = None,
        prior_structure: str = "scalar",
        val_loader: Loader | None = None,
        loss: Callable[[Prediction, Tensor], Tensor] | None = None,
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
        Prediction and labels and returns one number for each input (NLL by default). "gradient": the held-out
        NLL, minimised in any of prior_precision, temperature and sigma_noise.
        """
        if pred_type in _TUNING_METHODS:  # optimize_prior_precision("marglik") reads well, too
            pred_type, method = "glm", pred_type
        _check_pred_type(pred_type)
        if method not in _TUNING_METHODS:
            raise InputError(f"got method={method!r}; choose one of {', '.join(_TUNING_METHODS)}")
        if prior_structure != "scalar":
            raise InputError(
                f"got prior_structure={prior_structure!r}; the features mix all weights, so a layer-wise or diagonal prior "
                "cannot exist here: use 'scalar'"
            )
        posterior = self._posterior
        if init_prior_prec is not None:
            self.prior_precision = init_prior_prec  # type: ignore[assignment]
        if method == "marglik":
            if "sigma_noise" in tune:
                delta, sigma = tuning.evidence_prior_and_noise(posterior, num_steps=max(n_steps, 1))
                self.prior_precision, self.sigma_noise = delta, sigma  # type: ignore[assignment]
            else:
                self.prior_precision = tuning.evidence_prior_precision(posterior)  # type: ignore[assignment]
        else:
            if val_loader is None:
                raise InputError(f"got method={method!r} without val_loader; it needs held-out data (x, y)")
            held_out = self._held_out(val_loader, progress_bar=progress_bar)
            if method == "gridsearch":
                grid = torch.logspace(
                    log_prior_prec_min,
                    log_prior_prec_max,
                    grid_size,
                    base=log_prior_prec_base,
                    dtype=torch.float64,
                )
                noise = self._draw(self.num_features, n_samples, None)
                chosen, _ = tuning.grid_prior_precision(
                    posterior,
                    held_out,
                    grid.tolist(),
                    link=link_approx,
                    noise=noise,
                    loss=loss or tuning.held_out_nll,
                )
                self.prior_precision = chosen  # type: ignore[assignment]
            else:
                values = tuning.gradient_on_held_out(posterior, held_out, tune=tune, num_steps=n_steps)
                self.prior_precision, self.temperature = values.prior_precision, values.temperature  # type: ignore[assignment]
                if self.likelihood == "regression":
                    self.sigma_noise = values.sigma_noise  # type: ignore[assignment]
        if verbose:
            print(f"prior precision {float(self._prior_precision):.4g}")
        return self

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
        self.sigma_noise = tensors["sigma_noise"]  # type: ignore[assignment]
        device = features.plain.device
        self._make_posterior(
            GGNSums(tensors["posterior.ggn"].to(device), tensors["posterior.loss"].to(device), meta["num_data"])
        )

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

    @property
    def _fitted_map(self) -> FeatureMap:
        if self.feature_map is None:
            raise NotFittedError("this ScaLLA has no features yet; call fit(train_loader) first")
        return self.feature_map

    @property
    def _posterior(self) -> Posterior:
        if self.posterior is None:
            raise NotFittedError("this ScaLLA has no posterior yet; call fit(train_loader) first")
        return self.posterior

    @property
    def n_data(self) -> int:
        """Training inputs in the posterior."""
        return self._posterior.num_data

    @property
    def n_outputs(self) -> int:
        """C."""
        return self._posterior.num_outputs

    @property
    def n_params(self) -> int:
        """P, the weights that the kernel is taken over."""
        return self._posterior.num_params

    @property
    def posterior_precision(self) -> Float[Tensor, "m m"]:
        """H/T + δI."""
        return self._posterior.precision

    @property
    def posterior_covariance(self) -> Float[Tensor, "m m"]:
        """(H/T + δI)⁻¹."""
        return self._posterior.covariance

    @property
    def log_likelihood(self) -> Float[Tensor, ""]:
        """log p(D | θ*)."""
        return self._posterior.log_likelihood()

    @property
    def scatter(self) -> Float[Tensor, ""]:
        """δ ‖θ* − μ0‖²."""
        return self._posterior.scatter()

    @property
    def log_det_ratio(self) -> Float[Tensor, ""]:
        """log det(I + H/(Tδ))."""
        return self._posterior.log_det_ratio()

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


def _mean_probs(samples: Float[Tensor, "S B C"]) -> Float[Tensor, "B C"]:
    """Mean probabilities of logit samples; of class 1 where there is a single logit."""
    if samples.shape[-1] > 1:
        return mean_softmax([samples])[0]
    return torch.sigmoid(samples).mean(0)


def _check_pred_type(pred_type: str) -> None:
    if pred_type == "nn":
        raise InputError(
            "got pred_type='nn': the posterior is over m feature weights, not over the network's weights, so there are no "
            "networks to sample; use pred_type='glm'"
        )
    if pred_type != "glm":
        raise InputError(f"got pred_type={pred_type!r}; the only one here is 'glm'")


def _positive_tensor(value: float | Tensor, name: str) -> Float[Tensor, ...]:
    """`value` in float64, gradients kept; finite and positive."""
    try:
        found = torch.as_tensor(value).double()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"got {name}={value!r}; wanted a positive number") from error
    if not bool((torch.isfinite(found) & (found > 0)).all()):
        raise InputError(f"got {name}={value!r}; wanted a positive number (1.0, say)")
    return found
