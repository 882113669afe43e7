"""The surrogate's training: batch, probe, Jacobian-vector products, matching loss, step.

With directed targets the products are there already, for a pool of inputs from which the batches are then drawn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from tqdm.auto import tqdm

from scalla.batches import GroupedBatches
from scalla.device import check_autocast, in_autocast
from scalla.distributed import ALONE, Processes
from scalla.features import FeatureMap
from scalla.functional import batch_size, concatenate
from scalla.jvp import JacobianProduct
from scalla.kernel_error import KernelScore, blocks_of
from scalla.kernel_loss import gram_sums, matching_loss, reduce_sums
from scalla.probes import Probe, draw_probe, mix_seed
from scalla.targets import DirectedTargets
from scalla.types import InputError, Inputs

Schedule: TypeAlias = Literal["constant", "cosine"]
Targets: TypeAlias = Literal["probes", "directed"]


@dataclass(frozen=True)
class TrainingSettings:
    """Everything that decides what the trained surrogate is, besides data and network."""

    num_steps: int = 2000
    num_probes: int = 1
    probe: Probe = "rademacher"
    lr: float = 1e-3
    schedule: Schedule = "cosine"
    bias: bool = False
    seed: int = 0
    score_every: int = 100
    patience: int | None = None
    targets: Targets = "probes"
    pool_size: int = 5000
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        least_of = {"num_steps": 0, "num_probes": 1, "score_every": 1, "patience": 1, "pool_size": 1}
        for name, least in least_of.items():
            value = getattr(self, name)
            if (name, value) != ("patience", None) and (not isinstance(value, int) or value < least):
                raise InputError(f"got {name}={value!r}; wanted a whole number of at least {least}")
        if not isinstance(self.lr, float | int) or not 0 < self.lr < math.inf:
            raise InputError(f"got lr={self.lr!r}; wanted a positive learning rate, 1e-3 say")
        if self.schedule not in ("constant", "cosine"):
            raise InputError(f"got schedule={self.schedule!r}; choose 'cosine' or 'constant'")
        if self.targets not in ("probes", "directed"):
            raise InputError(f"got targets={self.targets!r}; choose 'probes' or 'directed'")
        check_autocast(self.autocast)


@dataclass(frozen=True)
class HistoryEntry:
    """One line of the fit's record; `loss` is the mean since the entry before."""

    step: int
    loss: float
    lr: float
    seconds: float
    kernel_score: float | None = None


@dataclass
class TrainingState:
    """What a fit needs to go on where it stopped."""

    step: int = 0
    position: list[tuple[int, int]] = field(default_factory=list)
    history: list[HistoryEntry] = field(default_factory=list)
    seconds: float = 0.0
    loss_sum: float = 0.0
    loss_count: int = 0
    best_score: float = math.inf
    scores_since_best: int = 0
    stopped: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(stored: dict[str, Any]) -> TrainingState:
        history = [HistoryEntry(**entry) for entry in stored["history"]]
        position = [(int(e), int(i)) for e, i in stored["position"]]
        return TrainingState(**{**stored, "history": history, "position": position})


@torch.enable_grad()  # a user's no_grad around the fit is for something else
def train_surrogate(
    features_of: Callable[[Inputs], Tensor],
    batches: GroupedBatches,
    product: JacobianProduct,
    settings: TrainingSettings,
    *,
    target_scale: float,
    optimizer: torch.optim.Optimizer,
    state: TrainingState,
    progress_bar: bool = False,
    score: Callable[[], float] | None = None,
    callback: Callable[[HistoryEntry], bool | None] | None = None,
    checkpoint_due: Callable[[], bool] | None = None,
    write_checkpoint: Callable[[], None] | None = None,
    processes: Processes = ALONE,
    directed: DirectedTargets | None = None,
    batch_sizes: Sequence[int] = (),
) -> None:
    """Minimise E_v ‖GGᵀ − Z_v Z_vᵀ‖² over the surrogate's weights, Z_v = J v / target_scale. `state` follows.

    With `directed`, ‖GGᵀ − TTᵀ‖² on batches of `batch_sizes` from its pool instead. With `settings.autocast` features
    are computed in that dtype, as the products are by a `product` of the same; all else is in float32 and float64.
    """
    features_of = in_autocast(features_of, settings.autocast, product.network.device)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    log_every = max(1, min(50, settings.num_steps // 40))
    running = torch.tensor(state.loss_sum, dtype=torch.float64, device=product.network.device)
    start = time.perf_counter() - state.seconds
    with tqdm(
        total=settings.num_steps, initial=state.step, disable=not progress_bar, desc="kernel", unit="step"
    ) as bar:
        while state.step < settings.num_steps and not state.stopped:
            lr = learning_rate(state.step, settings)
            for group in optimizer.param_groups:
                group["lr"] = lr

            with processes.together():
                if directed is not None:
                    blocks, targets = directed.batch(batch_sizes, seed=settings.seed, step=state.step)
                    features = in_one_pass(features_of, blocks)
                    targets = [
                        t.to(g) * (t.shape[-1] ** 0.5 / target_scale) for g, t in zip(features, targets, strict=True)
                    ]
                else:
                    directions = [
                        draw_probe(product.params, kind=settings.probe, seed=settings.seed, step=state.step, index=s)
                        for s in range(settings.num_probes)
                    ]
                    blocks, rows = own_rows(batches, processes)
                    features, targets = forward_all(blocks, features_of, product, directions, target_scale)
                    features, targets = ([t[:n] for t, n in zip(ts, rows, strict=True)] for ts in (features, targets))
                sums = gram_sums(blocks_of(features, targets, bias=settings.bias))
            loss = matching_loss(sums if processes.count == 1 else reduce_sums(sums, processes.add))

            if not loss.requires_grad:
                raise InputError(
                    "the surrogate's features do not depend on its weights (is its forward detached, or under "
                    "no_grad?); mend it, or give num_steps=0 to use it as it is"
                )
            optimizer.zero_grad(set_to_none=True)
            loss.backward(inputs=parameters)  # none goes to weights that a surrogate shares with the network
            processes.add_gradients(parameters)
            optimizer.step()

            running += loss.detach()
            state.loss_count += 1
            state.step += 1
            bar.update()
            if state.step % log_every == 0 or state.step == settings.num_steps:
                # The only place where the loop waits for the device.
                state.seconds = time.perf_counter() - start
                due = score is not None and (
                    state.step % settings.score_every < log_every or state.step == settings.num_steps
                )
                entry = _record(state, float(running), lr, score() if due and score is not None else None)
                running.zero_()
                bar.set_postfix_str(f"loss {entry.loss:.3g}, rate {lr:.2g}", refresh=False)
                _note_score(state, entry, settings.patience)
                if callback is not None and callback(entry):
                    state.stopped = True
            state.position = batches.position
            if checkpoint_due is not None and write_checkpoint is not None and checkpoint_due():
                state.loss_sum = float(running) if state.loss_count else 0.0
                _check_loss(state.loss_sum, state.step, lr)  # the last good checkpoint stays
                state.seconds = time.perf_counter() - start
                write_checkpoint()


def own_rows(batches: GroupedBatches, processes: Processes) -> tuple[list[Inputs], list[int]]:
    """This process's rows of the next batch of every source, and how many of them count."""
    shared = [
        processes.rows(x, own=processes.own_share(source.loader))
        for x, source in zip(batches.next(), batches.sources, strict=True)
    ]
    return [x for x, _ in shared], [n for _, n in shared]


def forward_all(
    blocks: Sequence[Inputs],
    features_of: Callable[[Inputs], Tensor],
    product: JacobianProduct,
    directions: Sequence[dict[str, Tensor]],
    target_scale: float,
) -> tuple[list[Tensor], list[Tensor]]:
    """Features and normalised J(x) v of every block; tensors of one shape go through in one pass."""
    blocks = [product.network.prepare(x, pin=True) for x in blocks]
    targets = in_one_pass(lambda x: product(x, directions), blocks)
    features = in_one_pass(features_of, blocks)
    return features, [z.to(features[0].dtype) / target_scale for z in targets]


def in_one_pass(function: Callable[[Inputs], Tensor], blocks: Sequence[Inputs]) -> list[Tensor]:
    """function(x) of every block; tensors of one shape go through together."""
    joined = concatenate(blocks)
    if joined is None or len(blocks) == 1:
        return [function(x) for x in blocks]
    return list(function(joined).split([batch_size(x) for x in blocks]))


def learning_rate(step: int, settings: TrainingSettings) -> float:
    """Constant, or a cosine from lr down to lr/100, after a short linear rise."""
    warmup = min(100, settings.num_steps // 20)
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    if settings.schedule == "constant":
        return settings.lr
    progress = (step - warmup) / max(1, settings.num_steps - warmup)
    return settings.lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def estimate_target_scale(blocks: Sequence[Inputs], product: JacobianProduct, settings: TrainingSettings) -> float:
    """√ of the mean of diag K over these inputs, from a few probes: E_v z² = K(x, x)."""
    directions = [
        draw_probe(product.params, kind=settings.probe, seed=mix_seed(settings.seed, 17), step=s) for s in range(8)
    ]
    total = torch.stack([product(x, directions).double().square().mean() for x in blocks]).mean()
    scale = float(total.sqrt())
    if not math.isfinite(scale):
        raise InputError("the Jacobian-vector products are NaN or infinite; check the network's weights and inputs")
    if scale == 0:
        raise InputError(
            "the network's outputs do not depend on the chosen weights at the first inputs: the kernel is zero there; "
            "check parameters=..."
        )
    return scale


def held_out_score(
    blocks: Sequence[Inputs],
    surrogate: FeatureMap,
    product: JacobianProduct,
    settings: TrainingSettings,
    target_scale: float,
    num_probes: int = 64,
) -> Callable[[], float]:
    """A function that estimates the kernel error on held-out inputs now; probes are drawn once."""
    blocks = [product.network.prepare(x) for x in blocks]
    directions = [
        draw_probe(product.params, kind=settings.probe, seed=mix_seed(settings.seed, 23), step=s)
        for s in range(num_probes)
    ]
    targets = [product(x, directions) / target_scale for x in blocks]
    if not settings.bias:
        targets = [torch.cat(targets)]
    estimator = KernelScore(targets)

    def score() -> float:
        surrogate.set_training(False)
        with torch.no_grad():
            features = [surrogate.raw(x) for x in blocks]
        surrogate.set_training(True)
        return estimator.relative_error(features if settings.bias else [torch.cat(features)])

    return score


def _record(state: TrainingState, loss_sum: float, lr: float, kernel_score: float | None) -> HistoryEntry:
    loss = loss_sum / max(1, state.loss_count)
    _check_loss(loss, state.step, lr)
    entry = HistoryEntry(state.step, loss, lr, state.seconds, kernel_score)
    state.history.append(entry)
    state.loss_count = 0
    state.loss_sum = 0.0
    return entry


def _check_loss(loss: float, step: int, lr: float) -> None:
    if not math.isfinite(loss):
        raise InputError(
            f"the matching loss became {loss} by step {step}: the inputs, the Jacobian-vector products or the "
            f"features are not finite. Check the data for NaN, or lower lr (now {lr:.2g})"
        )


def _note_score(state: TrainingState, entry: HistoryEntry, patience: int | None) -> None:
    if entry.kernel_score is None:
        return
    if entry.kernel_score < state.best_score:
        state.best_score, state.scores_since_best = entry.kernel_score, 0
    else:
        state.scores_since_best += 1
    if patience is not None and state.scores_since_best >= patience:
        state.stopped = True
