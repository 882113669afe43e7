"""The whole prediction as one module, x → logits, probabilities, variance and score, that can be traced.

ONNX has no Cholesky and no log-determinant. The m×m factor of the posterior is a constant of the graph; what
remains is ½ log det M of an n×n matrix for each input (n the smaller of C and m), and Gaussian elimination gives it
exactly: with pivots d_k = M_kk and M ← M − M_·k M_k·/d_k for k = 1 … n, log det M = Σ_k log d_k. As an ONNX `Scan`
that is a dozen nodes, whatever n.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scalla.functional import call, logits_of, make_twin
from scalla.hidden import recorded
from scalla.predictive import Prediction, entropy_gram, ood_score
from scalla.residual import Residual
from scalla.surrogate import Mirror, Trunk
from scalla.types import Inputs, Likelihood

if TYPE_CHECKING:
    from scalla.predicting import LinearizedPredictive

#: pivots and eigenvalues of M, its mean variance being one, are not taken for smaller: rounding, or no rank
FLOOR = 1e-15
OUTPUTS: dict[Likelihood, tuple[str, ...]] = {
    "classification": ("logits", "probs", "variance", "ood_score"),
    "regression": ("mean", "variance", "variance_with_noise", "ood_score"),
}
#: in the place of `ood_score`, where the log-determinant is still to come
PENDING = ("log_det.gram", "log_det.offset")


class PredictiveGraph(nn.Module):
    """f and g beside each other, and the posterior's factor: a copy on the CPU that shares nothing with the user's."""

    factor: Float[Tensor, "m m"]
    noise: Tensor | None
    noise_var: Tensor | None

    def __init__(
        self,
        la: LinearizedPredictive,
        prediction: Prediction,
        constants: Mapping[str, Any],
        *,
        score: str,
        pending: bool = False,
    ) -> None:
        """As `prediction` was made: its link, draws and noise; `constants` are what is no tensor in an input.

        With `pending`, a Gaussian entropy is left as (M, c), the score being ½ log det M + c.
        """
        super().__init__()
        features = la._fitted_map
        assert features.surrogate is not None
        parts = nn.ModuleList([features.network.twin, features.surrogate, la.residual or nn.Identity()])
        self.parts = make_twin(parts, share=False).cpu().requires_grad_(False)
        self.constants = dict(constants)
        self.likelihood, self.link, self.score = prediction.likelihood, prediction.link, score
        self.num_outputs = features.num_outputs
        self.pending = pending and score.startswith("gaussian_entropy")

        def constant(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.detach().to("cpu", prediction.mean.dtype).clone()

        # features(x) = scale · surrogate(x), and A = features(x) R with R Rᵀ = (H/T + δI)⁻¹
        self.register_buffer("factor", constant(features.scale * la._posterior.factor))
        self.register_buffer("noise", constant(prediction.noise))
        self.register_buffer("noise_var", constant(prediction.noise_var))

    def forward(self, x: Inputs) -> dict[str, Tensor]:
        prediction = self._prediction(x)
        if self.likelihood == "regression":
            found = {"mean": prediction.mean, "variance": prediction.var}
            found["variance_with_noise"] = prediction.var_with_noise
        else:
            found = {"logits": prediction.mean, "probs": prediction.probs, "variance": prediction.var}
        if not self.score.startswith("gaussian_entropy"):
            return found | {"ood_score": ood_score(prediction, self.score).to(prediction.mean.dtype)}
        gram, offset = _of_unit_size(
            *entropy_gram(prediction.factor, project_common=self.score == "gaussian_entropy_projected")
        )
        if self.pending:
            return found | dict(zip(PENDING, (gram, offset), strict=True))
        score = 0.5 * torch.linalg.eigvalsh(gram).clamp_min(FLOOR).log().sum(-1) + offset
        return found | {"ood_score": score.to(prediction.mean.dtype)}

    def _prediction(self, x: Inputs) -> Prediction:
        if isinstance(x, Mapping):
            x = {**x, **self.constants}
        network, surrogate, residual = self.parts.children()
        with recorded() as hidden:
            outputs = logits_of(call(network, x))
        if isinstance(surrogate, Trunk):
            outputs, shared = outputs[:, : self.num_outputs], outputs[:, self.num_outputs :]
            features = surrogate(shared)
        else:
            features = surrogate(x) if isinstance(surrogate, Mirror) else call(surrogate, x)
        factor = features @ self.factor.to(features)
        if isinstance(residual, Residual):
            outputs, factor = residual.beside(outputs, factor, hidden)
        return Prediction(
            outputs.to(features.dtype), factor, self.likelihood, self.link, noise=self.noise, noise_var=self.noise_var
        )


def _of_unit_size(
    gram: Float[Tensor, "B n n"], offset: Float[Tensor, " B"]
) -> tuple[Float[Tensor, "B n n"], Float[Tensor, " B"]]:
    """M/s with s its mean diagonal entry, and c + n/2 log s: the same ½ log det M + c."""
    size = gram.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(gram.dtype).tiny)
    return gram / size[:, None, None], offset + 0.5 * gram.shape[-1] * size.log()


def append_log_det(model: Any, dtype: torch.dtype) -> None:
    """Give an ONNX model that ends in (M, c) the output ood_score = c + Σ_k ½ log d_k, in their place."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    # Names of a body must differ from those of the graph around it, some of which are the user's.
    def node(op: str, inputs: str, outputs: str, **attributes: Any) -> Any:
        takes, gives = ([f"log_det.{name}" for name in part.split()] for part in (inputs, outputs))
        return helper.make_node(op, takes, gives, **attributes)

    def value(name: str, *shape: int | str | None) -> Any:
        return helper.make_tensor_value_info(f"log_det.{name}", TensorProto.DOUBLE, shape)

    graph = model.graph
    shapes = {o.name: o.type.tensor_type.shape.dim for o in graph.output}
    gram, offset = PENDING
    size, batch = shapes[gram][1].dim_value, shapes[offset][0].dim_param or None
    constants = {
        "unit_vectors": np.eye(size),
        "floor": np.array(FLOOR),
        "half": np.array(0.5),
        "vector_axes": np.array([1]),
        "matrix_axes": np.array([1, 2]),
    }
    graph.initializer.extend(numpy_helper.from_array(array, f"log_det.{name}") for name, array in constants.items())
    step = helper.make_graph(
        [
            node("Unsqueeze", "unit vector_axes", "unit_column"),
            node("Transpose", "unit_column", "unit_row"),
            node("MatMul", "matrix unit_column", "column"),  # M_·k
            node("MatMul", "unit_row column", "diagonal"),  # M_kk
            node("Max", "diagonal floor", "pivot"),  # d_k
            node("Div", "column pivot", "scaled"),
            node("Transpose", "column", "row", perm=[0, 2, 1]),
            node("MatMul", "scaled row", "outer"),
            node("Sub", "matrix outer", "new_matrix"),
            node("Log", "pivot", "log_pivot"),
            node("Squeeze", "log_pivot matrix_axes", "log_d"),
            node("Mul", "log_d half", "half_log_d"),
            node("Add", "total half_log_d", "new_total"),
        ],
        "elimination",
        [value("total", None), value("matrix", None, size, size), value("unit", size)],
        [value("new_total", None), value("new_matrix", None, size, size)],
    )
    element = helper.np_dtype_to_tensor_dtype(np.dtype(str(dtype).removeprefix("torch.")))
    first = [offset, gram, "log_det.unit_vectors"]
    graph.node.extend(
        [
            helper.make_node("Scan", first, ["log_det.sum", "log_det.rest"], body=step, num_scan_inputs=1),
            helper.make_node("Cast", ["log_det.sum"], ["ood_score"], to=element),
        ]
    )
    kept = [o for o in graph.output if o.name not in PENDING]
    del graph.output[:]
    graph.output.extend([*kept, helper.make_tensor_value_info("ood_score", element, [batch])])
