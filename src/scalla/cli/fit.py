"""`scalla fit`"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scalla.cli.common import (
    DATA_HELP,
    Network,
    NetworkOptions,
    device_named,
    image_size,
    numbers,
    words,
)
from scalla.cli.console import guarded, out
from scalla.types import InputError

if TYPE_CHECKING:
    from scalla.cli.reading import Data

DATA, METHOD, TRAINING, RUNNING = "Data", "Method", "Training of the surrogate", "Running"


class Likelihood(str, Enum):
    classification = "classification"
    regression = "regression"


class Surrogate(str, Enum):
    mirror = "mirror"
    trunk = "trunk"


class Probe(str, Enum):
    rademacher = "rademacher"
    gaussian = "gaussian"


class Schedule(str, Enum):
    cosine = "cosine"
    constant = "constant"


class Tuning(str, Enum):
    none = "none"
    marglik = "marglik"
    gridsearch = "gridsearch"
    gradient = "gradient"


@guarded
def fit(
    data: Annotated[str, typer.Argument(help=f"Training data. {DATA_HELP}")],
    network: Network,
    folder: Annotated[Path, typer.Option("--out", "-o", help="Folder to write: weights, posterior, model card.")],
    weights: Annotated[
        Path | None, typer.Option("--weights", "-w", help="The trained weights: .safetensors, or .pt of tensors only.")
    ] = None,
    network_options: NetworkOptions = None,
    labels: Annotated[
        Path | None, typer.Option(help="IDX file of the labels, if its name does not follow.", rich_help_panel=DATA)
    ] = None,
    val: Annotated[
        str | None,
        typer.Option(
            help="Held-out data: for tuning, and for the calibration in the model card.", rich_help_panel=DATA
        ),
    ] = None,
    context: Annotated[
        list[str] | None,
        typer.Option(
            help="Inputs unlike the training data: data as above, or a generator from the training data: default, "
            "PatchShuffle, Textures+Strokes, … (repeat for several groups)",
            rich_help_panel=DATA,
        ),
    ] = None,
    size: Annotated[str | None, typer.Option(help="Resize images: 28 or HEIGHT,WIDTH.", rich_help_panel=DATA)] = None,
    grey: Annotated[bool, typer.Option("--grey", help="Images in one channel.", rich_help_panel=DATA)] = False,
    mean: Annotated[str, typer.Option(help="Taken off the inputs: 0.5 or one a channel.", rich_help_panel=DATA)] = "0",
    std: Annotated[str, typer.Option(help="What they are divided by then.", rich_help_panel=DATA)] = "1",
    target: Annotated[
        str | None, typer.Option(help="Columns of a CSV to predict (label, target, y, …).", rich_help_panel=DATA)
    ] = None,
    likelihood: Annotated[Likelihood, typer.Option(rich_help_panel=METHOD)] = Likelihood.classification,
    bias: Annotated[
        bool,
        typer.Option(
            "--bias",
            help="Zero the kernel against the context, for out-of-distribution scores.",
            rich_help_panel=METHOD,
        ),
    ] = False,
    num_features: Annotated[int, typer.Option(help="m, the rank.", min=1, rich_help_panel=METHOD)] = 100,
    surrogate: Annotated[
        Surrogate,
        typer.Option(help="mirror: a network of its own. trunk: a head on yours.", rich_help_panel=METHOD),
    ] = Surrogate.mirror,
    parameters: Annotated[
        str, typer.Option(help="Weights of the kernel: trainable, all, last_layer.", rich_help_panel=METHOD)
    ] = "trainable",
    prior_precision: Annotated[float, typer.Option(help="δ.", rich_help_panel=METHOD)] = 1.0,
    sigma_noise: Annotated[float, typer.Option(help="σ of a regression's noise.", rich_help_panel=METHOD)] = 1.0,
    temperature: Annotated[float, typer.Option(help="Of the posterior.", rich_help_panel=METHOD)] = 1.0,
    tune: Annotated[
        Tuning,
        typer.Option(
            help="The prior precision: by marginal likelihood, or on --val by a grid or by gradient.",
            rich_help_panel=METHOD,
        ),
    ] = Tuning.none,
    residual: Annotated[
        bool,
        typer.Option(
            "--residual",
            help="Add the variance of unfamiliar inputs, calibrated on --val and a context made of the training data.",
            rich_help_panel=METHOD,
        ),
    ] = False,
    steps: Annotated[int, typer.Option(min=0, rich_help_panel=TRAINING)] = 2000,
    probe: Annotated[Probe, typer.Option(rich_help_panel=TRAINING)] = Probe.rademacher,
    num_probes: Annotated[int, typer.Option(help="At each step.", min=1, rich_help_panel=TRAINING)] = 1,
    batch_size: Annotated[int, typer.Option(min=1, rich_help_panel=TRAINING)] = 64,
    context_batch_size: Annotated[int | None, typer.Option(min=1, rich_help_panel=TRAINING)] = None,
    lr: Annotated[float, typer.Option(help="Of Adam.", rich_help_panel=TRAINING)] = 1e-3,
    schedule: Annotated[Schedule, typer.Option(rich_help_panel=TRAINING)] = Schedule.cosine,
    patience: Annotated[
        int | None,
        typer.Option(help="Stop after so many scores on --val without gain.", min=1, rich_help_panel=TRAINING),
    ] = None,
    bfloat16: Annotated[
        bool,
        typer.Option("--bfloat16", help="Run the steps in bfloat16, by autocast.", rich_help_panel=TRAINING),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, rich_help_panel=RUNNING)] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …", rich_help_panel=RUNNING)] = "cpu",
    checkpoint_dir: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints of the fit.", rich_help_panel=RUNNING)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint, if there is one.", rich_help_panel=RUNNING)
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.", rich_help_panel=RUNNING)] = False,
) -> None:
    """Fit ScaLLA to a trained network, and save it in a folder that predict, export and info understand.

    [bold]A folder of images[/], a folder for each class in the order of the network's outputs:

    [dim]$[/] scalla fit photos/train -n nets.py:make -w net.safetensors --val photos/val --tune gridsearch -o fitted

    [bold]To detect inputs of another kind[/], with a context made from the training images alone:

    [dim]$[/] scalla fit photos/train -n nets.py:make -w net.safetensors --context default --bias -o fitted

    [bold]Several processes[/] share the work when torchrun starts them:

    [dim]$[/] torchrun --nproc-per-node 4 -m scalla.cli fit …
    """
    import torch

    from scalla.cli.contexts import read_context
    from scalla.cli.network import read_network
    from scalla.cli.reading import InputOptions, read_data
    from scalla.cli.store import Fitted
    from scalla.distributed import process_group
    from scalla.method import ScaLLA

    if val is None and (residual or tune in (Tuning.gridsearch, Tuning.gradient) or patience is not None):
        raise InputError(
            "got --tune gridsearch, --tune gradient, --residual or --patience without --val; they need held-out data"
        )
    options = InputOptions(
        size=image_size(size), grey=grey, mean=numbers(mean, "--mean"), std=numbers(std, "--std"), targets=words(target)
    )
    train = _labelled(read_data(data, options, likelihood=likelihood.value, labels=labels), data)
    if train.columns:
        options = InputOptions(**{**vars(options), "columns": train.columns})
    held_out = None if val is None else _labelled(read_data(val, options, likelihood=likelihood.value), val)
    _same_classes(train, held_out)
    groups = [read_context(source, train, options, likelihood=likelihood.value, seed=seed) for source in context or ()]
    model = read_network(network, weights, network_options).to(device_named(device))
    with process_group():
        first = _is_first()
        la = ScaLLA(
            model,
            likelihood.value,
            num_features=num_features,
            surrogate=surrogate.value,
            probe=probe.value,
            prior_precision=prior_precision,
            sigma_noise=sigma_noise,
            temperature=temperature,
            seed=seed,
            parameters=parameters,
        )
        val_loader = None if held_out is None else held_out.loader(batch_size)
        la.fit(
            train.loader(batch_size, shuffle=True),
            context=groups or None,
            bias=bias,
            num_steps=steps,
            num_probes=num_probes,
            context_batch_size=context_batch_size,
            lr=lr,
            schedule=schedule.value,
            val_loader=val_loader if patience is not None else None,
            patience=patience,
            progress_bar=first and not quiet,
            checkpoint_dir=checkpoint_dir,
            resume=resume,
            autocast=torch.bfloat16 if bfloat16 else None,
        )
        if tune is not Tuning.none:
            la.optimize_prior_precision(method=tune.value, val_loader=val_loader)
        if residual:
            assert val_loader is not None
            la.fit_residual(train.loader(batch_size), val_loader, progress_bar=first and not quiet)
        if first:
            la.save_pretrained(folder, val_loader=val_loader, dataset=val or "")
            example = train.first_input()
            Fitted(
                network=network,
                options=network_options,
                inputs=options,
                input_shape=tuple(example.shape),
                input_dtype=str(example.dtype).removeprefix("torch."),
                classes=train.classes,
            ).write(folder)
            console = out()
            console.print(f"fitted to {la.n_data:,} inputs, prior precision {float(la.prior_precision):.4g}")
            console.print(f"written: {folder}", markup=False, soft_wrap=True)


def _labelled(data: Data, source: str) -> Data:
    if not data.labelled:
        raise InputError(
            f"{source} holds inputs without labels, and the fit needs both (of a CSV, --target names them)"
        )
    return data


def _same_classes(train: Data, held_out: Data | None) -> None:
    if held_out is not None and held_out.classes != train.classes:
        raise InputError(
            f"got the classes {', '.join(held_out.classes)} in --val and {', '.join(train.classes)} in the training "
            "data; wanted the same"
        )


def _is_first() -> bool:
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
