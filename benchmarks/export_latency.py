"""How long a prediction takes in ONNX Runtime and in PyTorch: `python benchmarks/export_latency.py`.

For each network, and batches of 1, 16 and 256: the network alone in PyTorch; `ScaLLA.predict` with everything that the
graph gives (probabilities or means, variances, Gaussian entropy); and the exported graph in ONNX Runtime. One thread.
The numbers are the processor's time of a call, the median of many, so that other work on the machine counts little.
Before it is timed a graph is compared with PyTorch on that very batch.

The networks are not trained and the surrogates for one step only: the time does not depend on the weights.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from pages import write_into
from torch import Tensor, nn

from scalla import ScaLLA
from scalla.benchmark import environment
from scalla.benchmark.network import build_network
from scalla.benchmark.records import write_json

BATCHES = (1, 16, 256)


class TextEncoder(nn.Module):
    """Two transformer layers over 32 tokens of a vocabulary of 1000, mean, four classes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(1000, 64), nn.Embedding(32, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.words(ids) + self.places.weight).mean(1))


@dataclass(frozen=True)
class Case:
    title: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    num_outputs: int
    likelihood: Any = "classification"


def images(num: int) -> Tensor:
    return torch.rand(num, 1, 28, 28)


def table(num: int) -> Tensor:
    return torch.randn(num, 10)


def texts(num: int) -> Tensor:
    return torch.randint(1000, (num, 32))


def regression() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


CASES = (
    Case("CNN of the benchmark, 10 classes", lambda: build_network(0), images, 10),
    Case("transformer, 4 classes", TextEncoder, texts, 4),
    Case("perceptron, 3 targets", regression, table, 3, "regression"),
)


def fitted(case: Case, surrogate: str) -> ScaLLA:
    torch.manual_seed(0)
    x = case.inputs(256)
    y = torch.randn(256, case.num_outputs) if case.likelihood == "regression" else torch.arange(256) % case.num_outputs
    la = ScaLLA(case.build().eval(), case.likelihood, num_features=100, surrogate=surrogate)
    return la.fit([(x[:32], y[:32])], num_steps=1).update([(x[32:], y[32:])])


def everything(la: ScaLLA, x: Tensor) -> dict[str, Tensor]:
    """What the graph gives, by its names."""
    with torch.no_grad():
        prediction = la.predict(x, n_samples=0)
        found = {"variance": prediction.var, "ood_score": prediction.gaussian_entropy}
        if la.likelihood == "regression":
            return found | {"mean": prediction.mean, "variance_with_noise": prediction.var_with_noise}
        return found | {"logits": prediction.mean, "probs": prediction.probs}


def milliseconds(call: Callable[[], Any], repeats: int) -> float:
    """The processor's time of one call: the median, after a few that do not count."""
    taken = []
    for _ in range(repeats + 3):
        began = time.process_time_ns()
        call()
        taken.append(time.process_time_ns() - began)
    return statistics.median(taken[3:]) / 1e6


def measure(case: Case, surrogate: str, repeats: int) -> list[dict[str, Any]]:
    la = fitted(case, surrogate)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        exported = la.export(Path(folder) / "model.onnx", case.inputs(4))
        session = onnxruntime.InferenceSession(str(exported.path), options, providers=["CPUExecutionProvider"])
        size = exported.path.stat().st_size
    rows = []
    for num in BATCHES:
        x = case.inputs(num)
        feed = {exported.inputs[0]: x.numpy()}
        wanted = everything(la, x)
        found = dict(zip(exported.outputs, session.run(list(exported.outputs), feed), strict=True))
        difference = max(
            float(((torch.from_numpy(found[k]) - v).abs() / v.abs().clamp_min(1)).max()) for k, v in wanted.items()
        )
        assert difference < 1e-4, (case.title, surrogate, num, difference)
        times = max(10, repeats // num)
        with torch.no_grad():
            alone = milliseconds(lambda x=x: la.model(x), times)
        rows.append(
            {
                "network": case.title,
                "surrogate": surrogate,
                "batch": num,
                "network_alone_ms": alone,
                "pytorch_ms": milliseconds(lambda x=x: everything(la, x), times),
                "onnxruntime_ms": milliseconds(lambda feed=feed: session.run(None, feed), times),
                "largest_difference": difference,
                "file_bytes": size,
            }
        )
    return rows


def markdown(content: dict[str, Any]) -> str:
    lines = [
        "| network | surrogate | batch | network alone, PyTorch | ScaLLA, PyTorch | ScaLLA, ONNX Runtime | file, MB |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in content["rows"]:
        times = " | ".join(f"{row[f'{name}_ms']:.2f}" for name in ("network_alone", "pytorch", "onnxruntime"))
        lines.append(
            f"| {row['network']} | {row['surrogate']} | {row['batch']} | {times} | {row['file_bytes'] / 1e6:.1f} |"
        )
    versions, worst = content["versions"], max(row["largest_difference"] for row in content["rows"])
    lines += [
        "",
        f"Milliseconds of the processor for a call with the whole batch, the median; one thread of "
        f"{content['hardware']['cpu']}, m = 100. ONNX Runtime {versions['onnxruntime']}, torch {versions['torch']}, "
        f"Python {versions['python']}. The two differ by {worst:.1g} at most, relative to values above 1.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/export_latency.json"))
    parser.add_argument("--page", type=Path, default=None, help="page that the table is written into")
    parser.add_argument("--repeats", type=int, default=200, help="calls with one input; fewer of larger batches")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for case in CASES for kind in ("mirror", "trunk") for row in measure(case, kind, options.repeats)]
    versions = environment.versions() | {"onnxruntime": onnxruntime.__version__}
    content = {"rows": rows, "versions": versions, "hardware": environment.hardware()}
    write_json(options.out, content)
    text = markdown(content)
    print(text)
    if options.page is not None:
        write_into(options.page, text, source="benchmarks/export_latency.py")


if __name__ == "__main__":
    main()
