"""A fitted ScaLLA as one ONNX graph, or as an ExportedProgram: input → mean, probabilities, variance and score.

classification   logits (B, C), probs (B, C), variance (B, C), ood_score (B,)
regression       mean (B, C), variance (B, C), variance_with_noise (B, C), ood_score (B,)

Every score of `scalla.SCORES` can be exported (of a regression those two that it has). What is drawn at random in
PyTorch (`mutual_information`, link_approx="mc") is drawn once and lies in the graph as a constant. Inputs are named
"input", for a mapping by its keys, for a tuple "input_0", "input_1", …; the number of inputs in a batch is free.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scalla.checkpoint import replacing
from scalla.export_graph import OUTPUTS, PENDING, PredictiveGraph, append_log_det
from scalla.functional import batch_size, map_tensors, tensors_of
from scalla.ggn import check_inputs
from scalla.jvp import Route, switched
from scalla.predictive import ood_score
from scalla.types import InputError, Inputs, Link, ScallaError, UnsupportedModuleError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from scalla.predicting import LinearizedPredictive

#: which dimensions may vary besides the first, by input name: {"input_ids": {1: "sequence"}}
DynamicAxes = Mapping[str, Mapping[int, str]]
#: an ONNX file is one protobuf message, which may not be larger
MAX_BYTES = 2_000_000_000
#: fused kernels of attention and recurrent layers are no graph of ordinary operations
ORDINARY = Route("export", plain_attention=True, without_mkldnn=True)


@dataclass(frozen=True)
class Exported:
    """What a file holds: names, the score under `ood_score`, and how far ONNX Runtime is from PyTorch.

    `max_difference` is the largest |a − b| / max(1, |b|) over all outputs, None where it was not checked.
    """

    path: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    score: str
    max_difference: float | None


def export(
    la: LinearizedPredictive,
    path: str | os.PathLike[str],
    example_input: Inputs,
    *,
    score: str = "gaussian_entropy",
    link_approx: Link = "probit",
    n_samples: int = 100,
    dynamic_axes: DynamicAxes | None = None,
    opset_version: int | None = None,
    tolerance: float = 1e-4,
) -> Exported:
    """Write `path`, a single ONNX file, whole or not at all; with onnxruntime installed it is checked first.

    Args:
        la: a fitted ScaLLA.
        path: the file to write.
        example_input: a batch of inputs, of any size.
        score: what `ood_score` is, one of `scalla.SCORES`.
        link_approx: what `probs` are: "probit", "bridge", "bridge_norm", or "mc" with `n_samples` constant draws.
        n_samples: draws for "mc" and for the mutual information.
        dynamic_axes: further dimensions that may vary, as in torch.onnx.export: {"input_ids": {1: "sequence"}}.
        opset_version: ONNX operator set; by default the one that PyTorch prefers.
        tolerance: |a − b| / max(1, |b|) between ONNX Runtime and PyTorch that is still right.
    """
    _require("onnx", "onnxscript")
    if "dynamo" not in inspect.signature(torch.onnx.export).parameters:
        raise ScallaError(f"export needs PyTorch 2.6 or later, and this is {torch.__version__}: pip install -U torch")
    graph, example, names = _graph(la, example_input, score, link_approx, n_samples, dynamic_axes, pending=True)
    size = sum(t.numel() * t.element_size() for t in (*graph.parameters(), *graph.buffers()))
    if size > MAX_BYTES:
        raise InputError(
            f"network and surrogate hold {size / 1e9:.1f} GB, more than one ONNX file can ({MAX_BYTES / 1e9:.0f} GB); "
            "use a trunk surrogate, fewer features, or export_program"
        )
    outputs = OUTPUTS[graph.likelihood]
    if set(names) & set(outputs):
        raise InputError(f"the input {sorted(set(names) & set(outputs))} is called as an output is; rename it")
    written = (*outputs[:-1], *PENDING) if graph.pending else outputs
    shapes = _shapes(example, names, dynamic_axes)
    program, shapes = _traced(graph, example, shapes)
    with _quiet(), switched(ORDINARY):
        found = torch.onnx.export(
            program,
            dynamo=True,
            input_names=list(names),
            output_names=list(written),
            dynamic_shapes=shapes,
            opset_version=opset_version,
            verbose=False,
        )
    assert found is not None
    _make_unique(found.model.graph)
    model = found.model_proto
    if graph.pending:
        append_log_det(model, graph.factor.dtype)
    _describe(model, la, graph)
    with replacing(path) as temporary:
        temporary.write_bytes(model.SerializeToString())
        difference = _check(temporary, la, example, names, graph, tolerance) if _has_runtime() else None
    return Exported(Path(path), names, outputs, score, difference)


def export_program(
    la: LinearizedPredictive,
    example_input: Inputs,
    *,
    score: str = "gaussian_entropy",
    link_approx: Link = "probit",
    n_samples: int = 100,
    dynamic_axes: DynamicAxes | None = None,
) -> ExportedProgram:
    """The same as a torch.export.ExportedProgram: `program.module()(x)` gives the outputs by name."""
    graph, example, names = _graph(la, example_input, score, link_approx, n_samples, dynamic_axes, pending=False)
    return _traced(graph, example, _shapes(example, names, dynamic_axes))[0]


def _graph(
    la: LinearizedPredictive,
    example: Inputs,
    score: str,
    link: Link,
    n_samples: int,
    dynamic_axes: DynamicAxes | None,
    *,
    pending: bool,
) -> tuple[PredictiveGraph, Inputs, tuple[str, ...]]:
    """The module to trace, the example as the network wants it (two inputs at least), and the inputs' names."""
    features = la._fitted_map
    check_inputs(example, "example_input")
    prepared = map_tensors(features.plain.prepare(example), lambda t: t.detach().cpu())
    if any(t.dtype == torch.bfloat16 for t in (*tensors_of(prepared), *features.plain.twin.parameters())):
        raise InputError("the network is in bfloat16, which few ONNX kernels take; call la.float() before the export")
    drawn = n_samples if link == "mc" or score == "mutual_information" else 0
    prediction = la.predict(prepared, link_approx=link, n_samples=drawn)
    ood_score(prediction, score)  # a score that does not fit is refused here
    size = batch_size(prepared)
    prepared = _rows(prepared, [*range(size), 0] if size < 2 else list(range(size)))
    constants: dict[str, Any] = {}
    if isinstance(prepared, Mapping):
        constants = {k: v for k, v in prepared.items() if not isinstance(v, Tensor)}
        prepared = {k: v for k, v in prepared.items() if isinstance(v, Tensor)}
        names = tuple(prepared)
    elif isinstance(prepared, Tensor):
        names = ("input",)
    else:
        names = tuple(f"input_{i}" for i in range(len(prepared)))
        if not all(isinstance(v, Tensor) for v in prepared):
            raise InputError("got inputs that are not tensors in a tuple; give a mapping, in which they have names")
    if set(dynamic_axes or {}) - set(names):
        raise InputError(f"got dynamic_axes for {sorted(set(dynamic_axes or {}) - set(names))}; the inputs are {names}")
    graph = PredictiveGraph(la, prediction, constants, score=score, pending=pending)
    return graph.eval(), prepared, names


def _shapes(example: Inputs, names: Sequence[str], dynamic_axes: DynamicAxes | None) -> tuple[Any]:
    """For each dimension that may vary its name, in the form of the example."""
    size, further = batch_size(example), dynamic_axes or {}
    dims = {name: torch.export.Dim(name) for axes in further.values() for name in axes.values()}
    batch = torch.export.Dim("batch")
    shapes = [
        {axis: dims[name] for axis, name in further.get(of, {}).items()}
        | ({0: batch} if t.ndim and len(t) == size else {})
        for of, t in zip(names, tensors_of(example), strict=True)
    ]
    if isinstance(example, Tensor):
        return (shapes[0],)
    return (dict(zip(names, shapes, strict=True)) if isinstance(example, Mapping) else tuple(shapes),)


def _traced(graph: PredictiveGraph, example: Inputs, shapes: tuple[Any]) -> tuple[ExportedProgram, Any]:
    """The program, and the shapes within the bounds that the network itself sets (as many positions as it knows)."""
    try:
        with _quiet(), switched(ORDINARY), torch.no_grad():
            try:
                return torch.export.export(graph, (example,), dynamic_shapes=shapes), shapes
            except torch._dynamo.exc.UserError as error:
                bounded = _bounded(str(error), shapes)
                if bounded is None:
                    raise
                return torch.export.export(graph, (example,), dynamic_shapes=bounded), bounded
    except Exception as error:
        reason = str(error).strip().split("\n")[0][:300]
        raise UnsupportedModuleError(
            f"torch.export could not trace the prediction ({type(error).__name__}: {reason}). A network whose forward "
            "branches on values, or fixes the batch size, has to be rewritten before it can be exported"
        ) from error


def _bounded(message: str, shapes: tuple[Any]) -> Any:
    """The shapes with the ranges that torch.export suggests, where these are all that it asks for."""
    asked = [line.strip() for line in message.partition("Suggested fixes:")[2].strip().split("\n\n")[0].splitlines()]
    if not asked or any(re.fullmatch(r"\w+ = Dim\('\w+', .*\)", line) is None for line in asked):
        return None
    fixes = "\n".join(["Suggested fixes:", *asked])
    return torch.export.dynamic_shapes.refine_dynamic_shapes_from_suggested_fixes(fixes, shapes)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what PyTorch's exporter says about itself and its optional parts."""

    def wanted(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(("torchvision is not installed", "Skipping constant folding"))

    talkative = ("torch.onnx._internal.exporter._registration", "onnxscript.optimizer._constant_folding")
    loggers = [logging.getLogger(name) for name in talkative]
    for logger in loggers:
        logger.addFilter(wanted)
    try:
        with warnings.catch_warnings():
            # Recurrent layers and weight norm set attributes of their own when they run, to what they were.
            warnings.filterwarnings("ignore", r"The tensor attributes? .* assigned during export", UserWarning)
            # An axis that several inputs share has one name.
            warnings.filterwarnings("ignore", r"# The axis name: .* shares the same shape constraints", UserWarning)
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(wanted)


def _make_unique(graph: Any) -> None:
    """Inner values that are called as an output is ("mean", after torch.mean) get another name."""
    outputs = {value.name for value in graph.outputs}
    for node in graph.all_nodes():
        for value in node.outputs:
            if value.name in outputs and not value.is_graph_output():
                value.name = f"{value.name}.inner"


def _describe(model: Any, la: LinearizedPredictive, graph: PredictiveGraph) -> None:
    """What the numbers mean, in the file's own metadata."""
    from scalla import __version__

    model.producer_name, model.producer_version = "scalla", __version__
    facts = {
        "likelihood": graph.likelihood,
        "score": graph.score,
        "link_approx": graph.link,
        "num_data": la.n_data,
        "num_features": la.num_features,
        "prior_precision": float(la._posterior.prior_precision),
        "temperature": la._posterior.temperature,
    }
    entry = model.metadata_props.add()
    entry.key, entry.value = "scalla", json.dumps(facts, sort_keys=True)


def _check(
    path: Path,
    la: LinearizedPredictive,
    example: Inputs,
    names: Sequence[str],
    graph: PredictiveGraph,
    tolerance: float,
) -> float:
    """Run the file on three sizes of batch beside PyTorch's own prediction."""
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:
        raise UnsupportedModuleError(f"ONNX Runtime cannot read the graph: {_first_line(error)}") from error
    size, worst = batch_size(example), 0.0
    for rows in ([0], list(range(size)), [*range(size), *range(size), 0]):
        x = _rows(example, rows)
        feed = {name: t.numpy() for name, t in zip(names, tensors_of(x), strict=True)}
        try:
            outputs = session.run(None, {i.name: feed[i.name] for i in session.get_inputs()})
        except Exception as error:
            raise UnsupportedModuleError(f"ONNX Runtime cannot run the graph: {_first_line(error)}") from error
        wanted = _expected(la, {**x, **graph.constants} if isinstance(x, Mapping) else x, graph)
        for output, array in zip(session.get_outputs(), outputs, strict=True):
            b = wanted[output.name].double().cpu()
            a = torch.from_numpy(array).double()
            difference = float(((a - b).abs() / b.abs().clamp_min(1)).max()) if a.shape == b.shape else float("inf")
            if not difference <= tolerance:  # NaN is no agreement
                raise UnsupportedModuleError(
                    f"ONNX Runtime's {output.name} differs from PyTorch's by {difference:.2g} for a batch of "
                    f"{len(rows)}, more than tolerance={tolerance:g}; no file was written. (The Gaussian entropy of a "
                    "covariance close to singular magnifies rounding: another score, or a larger tolerance)"
                )
            worst = max(worst, difference)
    return worst


def _expected(la: LinearizedPredictive, x: Inputs, graph: PredictiveGraph) -> dict[str, Tensor]:
    """What PyTorch says, by the method itself and not by the module that was traced."""
    with torch.no_grad():
        prediction = la.predict(x, link_approx=graph.link, n_samples=0 if graph.noise is None else graph.noise.shape[1])
        found = {"variance": prediction.var, "ood_score": ood_score(prediction, graph.score)}
        if graph.likelihood == "regression":
            return found | {"mean": prediction.mean, "variance_with_noise": prediction.var_with_noise}
        return found | {"logits": prediction.mean, "probs": prediction.probs}


def _rows(x: Inputs, rows: Sequence[int]) -> Inputs:
    size = batch_size(x)
    return map_tensors(x, lambda t: t[list(rows)] if t.ndim and len(t) == size else t)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:300]


def _has_runtime() -> bool:
    return importlib.util.find_spec("onnxruntime") is not None


def _require(*packages: str) -> None:
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ScallaError(
                f"export to ONNX needs the package {package}, which could not be imported ({error}): "
                'pip install "scalla[export]"'
            ) from error
