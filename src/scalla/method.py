"""ScaLLA: scalable linearized Laplace for a network that is already trained.

fit      probes → jvp → kernel_loss → surrogate → ggn → posterior
predict  features → push-forward → link
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from scalla import export as exporting
from scalla import hub
from scalla.batches import EndlessBatches
from scalla.distributed import Distributed, Processes
from scalla.features import FeatureMap, undone_on_error
from scalla.fitting import FitData, run_fit, sum_ggn
from scalla.functional import ParameterFilter, batch_size
from scalla.ggn import GGNSums
from scalla.kernel_error import KernelError, exact_kernel, kernel_error, without_cross_groups
from scalla.posterior import Posterior
from scalla.probes import PROBES, Probe
from scalla.saving import (
    CONSTRUCTOR_KEYS,
    check_same_kind,
    load_tensors,
    read_posterior,
    restore,
    save_posterior,
    settings_of,
)
from scalla.training import HistoryEntry, Schedule, Targets, TrainingSettings
from scalla.tunable import TunablePredictive, check_noise_levels
from scalla.types import FileFormatError, InputError, Inputs, Likelihood, Loader
from scalla.wrapped import plain_network

if TYPE_CHECKING:
    from torch.export import ExportedProgram


@final
class ScaLLA(TunablePredictive):
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
        surrogate_options: options of the surrogate (mirror: start; trunk: hidden; both: class_rank).
        dict_key_y: where a mapping holds the labels.
        enable_backprop: keep gradients with respect to x in predictions.

    Examples:
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
        self.model = plain_network(model)
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
        self.residual = None
        if (
            sigma_noise is not None
            and likelihood == "classification"
            and bool((torch.as_tensor(sigma_noise) != 1).any())
        ):
            raise InputError(f"got sigma_noise={sigma_noise} for a classification, which has no observation noise")
        self.prior_precision = prior_precision
        self.sigma_noise = sigma_noise
        self.temperature = temperature
        self.register_load_state_dict_post_hook(_follow_state)

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
        distributed: Distributed = "auto",
        targets: Targets = "probes",
        pool_size: int = 5000,
        autocast: torch.dtype | None = None,
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
            distributed: "auto" fits together with the other processes of torch.distributed, if there are any; True
                insists on them, False does not; "shards" where every process has loaders of its own share of the data.
            targets: "probes" draws a new random direction for every step; "directed" finds the m best directions first
                and computes the products with all of them once, for a pool of inputs on which it then trains: a
                smaller kernel error for the same time. See `scalla.targets`.
            pool_size: inputs of that pool, of the training data and of every context each.
            autocast: torch.bfloat16 runs the products and the surrogate in it while training; all else is in float32.
        """
        if not override and self.posterior is not None:
            return self.update(train_loader, progress_bar=progress_bar, distributed=distributed)
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
            targets=targets,
            pool_size=pool_size,
            autocast=autocast,
        )
        if patience is not None and val_loader is None:
            raise InputError("got patience without val_loader; early stopping needs held-out inputs")
        processes = Processes.of(distributed)
        with processes.together():
            data = FitData.of(train_loader, context, context_batch_size, bias, val_loader, self.seed, processes)
            features = FeatureMap.of_data(
                self.model,
                data.train,
                likelihood=self.likelihood,
                num_features=self.num_features,
                parameters=self.parameters_filter,
                dict_key_y=self.dict_key_y,
            )
            check_noise_levels(self._sigma_noise, features.num_outputs)
            blocks = data.check(self.likelihood, features)
        blocks = data.of_all(blocks, processes)
        with processes.together():
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
                processes=processes,
            )
            posterior = self._posterior_of(features, sums)
        self.surrogate, self.feature_map, self.posterior, self.history = surrogate, features, posterior, history
        self.residual = None
        return self

    def update(self, loader: Loader, *, progress_bar: bool = False, distributed: Distributed = "auto") -> ScaLLA:
        """Add data to the posterior, exactly as if they had been in the fit's precision from the start."""
        self._posterior.plus(self._sums_of(loader, progress_bar, distributed), +1)
        return self

    def forget(self, loader: Loader, *, progress_bar: bool = False, distributed: Distributed = "auto") -> ScaLLA:
        """Take data out of the posterior again, exactly."""
        self._posterior.plus(self._sums_of(loader, progress_bar, distributed), -1)
        return self

    def _sums_of(self, loader: Loader, progress_bar: bool, distributed: Distributed) -> GGNSums:
        data = EndlessBatches(loader, seed=self.seed, name="loader")
        processes = Processes.of(distributed)
        return sum_ggn(self._fitted_map, data, self.likelihood, progress_bar=progress_bar, processes=processes)

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

    # ---------------------------------------------------------------- kernel

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
        for name, given in (("model", model), ("surrogate", surrogate)):
            if not isinstance(given, nn.Module) and (name, given) != ("surrogate", None):
                raise InputError(f"got a {name} of type {type(given).__name__}; wanted a torch.nn.Module")
        tensors, meta = read_posterior(path, model, custom=surrogate is not None)
        try:
            la = cls(model, surrogate=surrogate or meta["surrogate"], **{k: meta[k] for k in CONSTRUCTOR_KEYS})
            restore(la, meta, GGNSums(tensors["posterior.ggn"], tensors["posterior.loss"], meta["num_data"]))
        except (InputError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise FileFormatError(f"{path} is not whole: its settings make no ScaLLA ({error})") from error
        assert la.surrogate is not None
        load_tensors(la.surrogate, "surrogate.", tensors, path)
        if la.residual is not None:
            load_tensors(la.residual, "residual.", tensors, path)
        return la

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> None:
        """Write network, surrogate, posterior and a model card as the Hugging Face Hub has them; see `scalla.hub`."""
        hub.save_pretrained(self, save_directory, **options)

    def push_to_hub(self, repo_id: str, **options: Any) -> Any:
        """Commit what `save_pretrained` writes to a repository of the Hub; see `scalla.hub.push_to_hub`."""
        return hub.push_to_hub(self, repo_id, **options)

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str],
        model: nn.Module | None = None,
        *,
        surrogate: nn.Module | None = None,
        **options: Any,
    ) -> ScaLLA:
        """Read a folder that `save_pretrained` wrote, or a repository "owner/name" of the Hub.

        Args:
            source: the folder or the repository.
            model: the network with any weights: those of the repository go into a copy of it. A transformers network
                is built from its configuration where none is given.
            surrogate: where the fit used one of your own.
            options: revision, token, cache_dir, local_files_only, … of huggingface_hub.snapshot_download.
        """
        folder = hub.fetched(source, **options)
        return cls.load(folder / hub.POSTERIOR, hub.read_network(folder, model), surrogate)

    def export(self, path: str | os.PathLike[str], example_input: Inputs, **options: Any) -> exporting.Exported:
        """Write one ONNX graph, input → mean, probabilities, variance and score; see `scalla.export.export`."""
        return exporting.export(self, path, example_input, **options)

    def export_program(self, example_input: Inputs, **options: Any) -> ExportedProgram:
        """The same as a torch.export.ExportedProgram; see `scalla.export.export_program`."""
        return exporting.export_program(self, example_input, **options)

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

    def get_extra_state(self) -> Tensor:
        """The settings of a fitted ScaLLA, as bytes of JSON: state dicts hold tensors only."""
        settings = None if self.posterior is None else settings_of(self, self.posterior)
        return torch.frombuffer(bytearray(json.dumps(settings).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Build what a fit would have built, so that the state dict finds its modules."""
        settings = json.loads(state.cpu().numpy().tobytes())
        if settings is not None:
            check_same_kind(self, settings)
            restore(self, settings)

    def extra_repr(self) -> str:
        fitted = f"{self.posterior.num_data} inputs" if self.posterior is not None else "not fitted"
        return f"likelihood={self.likelihood!r}, num_features={self.num_features}, {fitted}"


def _follow_state(la: ScaLLA, _: object) -> None:
    """What was computed from network and precision is computed again once a state dict is in place."""
    if la.posterior is not None and la.feature_map is not None:
        la.feature_map.sync()
        sums = GGNSums(la.posterior.ggn, la.posterior.loss, la.posterior.num_data)
        la.posterior = la._posterior_of(la.feature_map, sums)
