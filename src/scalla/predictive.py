"""From a Gaussian over the network's outputs to probabilities, error bars and scores.

At one input the posterior over the C outputs is N(mean, Σ) with Σ = A Aᵀ. Only the factor A ∈ R^{C×R}
is kept: variances, samples and scores need no C×C matrix, and Σ is formed when somebody asks for it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from scalla.types import InputError, Likelihood, Link, NumericalWarning

LINKS: tuple[Link, ...] = ("probit", "mc", "bridge", "bridge_norm")


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a network predicts for B inputs, and how sure it may be. Everything else is computed when read.

    `var` and `cov` speak of the network's output f(x); observation noise is in `var_with_noise` alone.
    """

    mean: Float[Tensor, "B C"]
    factor: Float[Tensor, "B C R"]
    likelihood: Likelihood = "classification"
    link: Link = "probit"
    #: standard normal draws in R dimensions, shared by all inputs: each column is one function
    noise: Float[Tensor, "R S"] | None = field(default=None, repr=False)
    #: draws of the outputs themselves, from a method whose predictive is not a Gaussian
    samples: Float[Tensor, "S B C"] | None = field(default=None, repr=False)
    noise_var: Float[Tensor, "#C"] | None = None

    def __post_init__(self) -> None:
        if self.link not in LINKS:
            raise InputError(f"got link_approx={self.link!r}; choose one of {', '.join(LINKS)}")

    @staticmethod
    def from_samples(samples: Float[Tensor, "S B C"], likelihood: Likelihood = "classification") -> Prediction:
        """The prediction of a method that can only sample: Σ is the sample covariance.

        The S centred draws A sum to zero. The reflection that takes 1/√S to the first axis makes the first column of
        A zero and adds a_1/(√S − 1) to the others: S − 1 columns with the same A Aᵀ, of full rank.
        """
        mean, root = samples.mean(0), math.sqrt(len(samples))
        centred = (samples - mean).permute(1, 2, 0) / math.sqrt(max(len(samples) - 1, 1))
        factor = centred[..., 1:] + centred[..., :1] / (root - 1)  # one draw: no column
        return Prediction(mean, factor, likelihood, "mc", samples=samples)

    @staticmethod
    def from_gaussian(
        mean: Float[Tensor, "B C"],
        cov: Float[Tensor, "B C C"],
        *,
        link: Link = "mc",
        noise: Float[Tensor, "C S"] | None = None,
        likelihood: Likelihood = "classification",
    ) -> Prediction:
        """The prediction of a method that gives Σ itself: its factor is the (lower) Cholesky factor."""
        return Prediction(mean, psd_cholesky(cov).to(mean.dtype), likelihood, link, noise=noise)

    def __len__(self) -> int:
        return len(self.mean)

    @cached_property
    def var(self) -> Float[Tensor, "B C"]:
        """Variance of each output, without observation noise."""
        return self.factor.square().sum(-1)

    @cached_property
    def cov(self) -> Float[Tensor, "B C C"]:
        """Covariance of the outputs, without observation noise."""
        return self.factor @ self.factor.mT

    @cached_property
    def var_with_noise(self) -> Float[Tensor, "B C"]:
        """Variance of an observation y: `var` plus the noise variance (regression)."""
        if self.noise_var is None:
            raise AttributeError("var_with_noise exists for likelihood='regression' only")
        return self.var + self.noise_var

    @cached_property
    def probs(self) -> Float[Tensor, "B C"]:
        """Class probabilities; for a single logit (C = 1) the probability of class 1."""
        return self._two_or_more_probs[:, 1:] if self.mean.shape[-1] == 1 else self._two_or_more_probs

    @cached_property
    def log_probs(self) -> Float[Tensor, "B C"]:
        """log of `probs`, finite where these round to 0."""
        return self._two_or_more_log_probs[:, 1:] if self.mean.shape[-1] == 1 else self._two_or_more_log_probs

    def log_prob(self, y: Shaped[Tensor, "B ..."]) -> Float[Tensor, " B"]:
        """log p(y | x) of class labels; for regression of observations, the noise included."""
        if self.likelihood == "regression":
            residual, var = y - self.mean, self.var_with_noise
            return -0.5 * (residual.square() / var + var.log() + math.log(2 * math.pi)).sum(-1)
        return self._two_or_more_log_probs.gather(-1, y[:, None])[:, 0]

    @cached_property
    def entropy(self) -> Float[Tensor, " B"]:
        """Shannon entropy of `probs`, in nats."""
        return torch.special.entr(self._two_or_more_probs).sum(-1)

    @cached_property
    def gaussian_entropy(self) -> Float[Tensor, " B"]:
        """Entropy of N(mean, Σ): ½ log det(2πe Σ)."""
        return gaussian_entropy(self.factor)

    @cached_property
    def gaussian_entropy_projected(self) -> Float[Tensor, " B"]:
        """The same with the common-logit direction taken out.

        Λ·1 = 0: no classification data ever inform the direction in which all logits move together.
        """
        return gaussian_entropy(self.factor, project_common=True)

    @cached_property
    def mutual_information(self) -> Float[Tensor, " B"]:
        """Entropy of the mean softmax minus mean entropy of the softmax, over function samples."""
        mean_probs, mean_entropy = self._monte_carlo
        return (torch.special.entr(mean_probs).sum(-1) - mean_entropy).clamp_min(0)

    @cached_property
    def max_prob(self) -> Float[Tensor, " B"]:
        """The largest class probability: the confidence."""
        return self._two_or_more_probs.amax(-1)

    @cached_property
    def _two_or_more_probs(self) -> Float[Tensor, "B K"]:
        self._check_classification()
        if self.link == "mc":
            return self._monte_carlo[0]
        return closed_form_probs(self.mean, self.factor, self.link)

    @cached_property
    def _two_or_more_log_probs(self) -> Float[Tensor, "B K"]:
        self._check_classification()
        if self.link == "mc":
            return log_mean_softmax(self._logit_blocks())
        return torch.log_softmax(closed_form_logits(self.mean, self.factor, self.link), -1)

    def _check_classification(self) -> None:
        if self.likelihood != "classification":
            raise AttributeError(
                "probabilities and what is made of them exist for likelihood='classification' only; "
                "a regression has mean, var, cov, var_with_noise and gaussian_entropy"
            )

    @cached_property
    def _monte_carlo(self) -> tuple[Float[Tensor, "B K"], Float[Tensor, " B"]]:
        self._check_classification()
        return mean_softmax(self._logit_blocks())

    def _logit_blocks(self) -> Iterator[Float[Tensor, "S B K"]]:
        """Samples of the logits, a few at a time."""
        if self.samples is not None:
            for block in self.samples.split(64):
                yield torch.cat([-block, block], -1) / 2 if self.mean.shape[-1] == 1 else block
            return
        if self.noise is None:
            raise InputError("this prediction holds no function samples: ask for it with n_samples > 0")
        mean, factor = two_or_more_logits(self.mean, self.factor)
        # The classes are the outermost in memory, so that a softmax over few of them runs along long rows.
        mean, factor = mean.mT[..., None], factor.transpose(0, 1).contiguous()
        # At most R samples at a time: no larger than the factor itself.
        for eps in self.noise.split(max(factor.shape[-1], 16), 1):
            yield (mean + torch.einsum("cbr,rs->cbs", factor, eps)).permute(2, 1, 0)


def two_or_more_logits(
    mean: Float[Tensor, "B C"], factor: Float[Tensor, "B C R"]
) -> tuple[Float[Tensor, "B K"], Float[Tensor, "B K R"]]:
    """A single logit f as two, (−f/2, f/2), whose softmax is (1 − σ(f), σ(f)); several as they are."""
    if mean.shape[-1] > 1:
        return mean, factor
    return torch.cat([-mean, mean], -1) / 2, torch.cat([-factor, factor], -2) / 2


def closed_form_probs(mean: Float[Tensor, "B C"], factor: Float[Tensor, "B C R"], link: Link) -> Float[Tensor, "B K"]:
    """Class probabilities without sampling: probit or Laplace bridge. A single logit gives two columns."""
    return torch.softmax(closed_form_logits(mean, factor, link), -1)


def closed_form_logits(mean: Float[Tensor, "B C"], factor: Float[Tensor, "B C R"], link: Link) -> Float[Tensor, "B K"]:
    """That of which the closed-form probabilities are the softmax."""
    if link != "probit":
        return laplace_bridge(*two_or_more_logits(mean, factor), normalise=link == "bridge_norm")
    # Probit sees each logit by itself, so a single one is scaled before it is made two.
    scaled = mean / (1 + math.pi / 8 * factor.square().sum(-1)).sqrt()
    return scaled if mean.shape[-1] > 1 else torch.cat([torch.zeros_like(scaled), scaled], -1)


def mean_softmax(logit_blocks: Iterable[Float[Tensor, "S B C"]]) -> tuple[Float[Tensor, "B C"], Float[Tensor, " B"]]:
    """Mean softmax and mean entropy of the softmax over blocks of samples."""
    sums: tuple[Tensor, Tensor] | None = None
    count = 0
    for logits in logit_blocks:
        # Not torch.softmax, which would first copy a block whose classes are the outermost in memory.
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        probs = weights / weights.sum(-1, keepdim=True)
        block = probs.sum(0), torch.special.entr(probs).sum((0, -1))
        sums = block if sums is None else (sums[0] + block[0], sums[1] + block[1])
        count += len(logits)
    if sums is None or count == 0:
        raise InputError("got no samples to average; ask for n_samples > 0")
    return sums[0] / count, sums[1] / count


def log_mean_softmax(logit_blocks: Iterable[Float[Tensor, "S B C"]]) -> Float[Tensor, "B C"]:
    """Logarithm of the mean softmax, without a probability that rounds to 0 on the way."""
    total: Tensor | None = None
    count = 0
    for logits in logit_blocks:
        block = torch.logsumexp(torch.log_softmax(logits, -1), 0)
        total = block if total is None else torch.logaddexp(total, block)
        count += len(logits)
    if total is None or count == 0:
        raise InputError("got no samples to average; ask for n_samples > 0")
    return total - math.log(count)


def laplace_bridge(
    mean: Float[Tensor, "B C"], factor: Float[Tensor, "B C R"], *, normalise: bool = False
) -> Float[Tensor, "B C"]:
    """log α of the Dirichlet whose softmax-basis Laplace approximation is N(mean, Σ), Σ projected on Σ 1 = 0.

    α_k = (1 − 2/C + e^{f_k} Σ_l e^{−f_l} / C²) / Σ_kk; `normalise` first scales Σ to a fixed mean variance.
    """
    num_classes = mean.shape[-1]
    tiny = torch.finfo(mean.dtype).tiny
    # Σ − Σ11ᵀΣ / 1ᵀΣ1 = A (I − uuᵀ) Aᵀ with u = Aᵀ1 / ‖Aᵀ1‖: by its factor, as the difference of variances cancels.
    common = factor.sum(-2)
    length = common.norm(dim=-1, keepdim=True)
    # Where Aᵀ1 is rounding alone, Σ 1 = 0 already: nothing to project, and a constant moves no softmax.
    rounding = num_classes * torch.finfo(factor.dtype).eps * factor.square().sum((-2, -1)).sqrt()[:, None]
    moves, length = length > rounding, length.clamp_min(tiny)
    direction = torch.where(moves, common / length, 0.0)
    along = torch.einsum("bcr,br->bc", factor, direction)
    mean = mean - torch.where(moves, along / length, 1 / num_classes) * mean.sum(-1, keepdim=True)
    projected = factor - along[..., None] * direction[:, None]
    var = projected.square().sum(-1).clamp_min(tiny)
    if normalise:
        scale = var.mean(-1, keepdim=True) / math.sqrt(num_classes / 2)
        mean, var = mean / scale.sqrt(), var / scale
    log_ratio = mean + torch.logsumexp(-mean, -1, keepdim=True) - 2 * math.log(num_classes)
    base = torch.as_tensor(1 - 2 / num_classes, dtype=mean.dtype, device=mean.device).clamp_min(tiny).log()
    return torch.logaddexp(base, log_ratio) - var.log()


def gaussian_entropy(factor: Float[Tensor, "B C R"], *, project_common: bool = False) -> Float[Tensor, " B"]:
    """½ log det(2πe A Aᵀ) on the support of the Gaussian, in float64, from the smaller Gram matrix of A.

    With R < C the covariance has rank R for every input, and the entropy is that of the R dimensions.
    """
    gram, offset = entropy_gram(factor, project_common=project_common)
    return 0.5 * psd_logdet(gram) + offset


def entropy_gram(
    factor: Float[Tensor, "B C R"], *, project_common: bool = False
) -> tuple[Float[Tensor, "B n n"], Float[Tensor, " B"]]:
    """The matrix M and the number c of each input for which the entropy is ½ log det M + c, in float64."""
    factor64 = factor.double()
    num_outputs, rank = factor.shape[-2:]
    dims = min(num_outputs, rank)
    if project_common:
        factor64 = factor64 - factor64.mean(-2, keepdim=True)
        dims = min(num_outputs - 1, rank)
        if dims == 0:
            raise InputError("a single output has no direction left once the common one is projected out")
    by_outputs = num_outputs <= rank or (project_common and num_outputs - 1 <= rank)
    gram = factor64 @ factor64.mT if by_outputs else factor64.mT @ factor64
    offset = factor64.new_full(factor.shape[:1], 0.5 * dims * math.log(2 * math.pi * math.e))
    if project_common and by_outputs:
        # PΣP + s·uuᵀ with u = 1/√C: adds one factor s to the determinant, taken off again by c.
        size = gram.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(torch.float64).tiny)
        gram, offset = gram + (size / num_outputs)[:, None, None], offset - 0.5 * size.log()
    return gram, offset


def psd_cholesky(matrix: Float[Tensor, "*B n n"]) -> Float[Tensor, "*B n n"]:
    """Lower Cholesky factor in float64; a matrix that is not positive definite gets jitter, with a warning."""
    matrix = matrix.double()
    size = matrix.shape[-1]
    factor, info = torch.linalg.cholesky_ex(matrix)
    if not bool((info != 0).any()):
        return factor
    if not bool(torch.isfinite(matrix).all()):
        raise InputError("got a covariance or precision with NaN or infinite entries; features must be finite")
    tiny = torch.finfo(torch.float64).tiny
    scale = matrix.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(tiny)
    eye = torch.eye(size, dtype=matrix.dtype, device=matrix.device)
    jitter = torch.zeros_like(scale)
    for exponent in range(-15, 1):
        # Each matrix gets the least that helps it, whatever stands beside it in the batch.
        jitter = torch.where(info != 0, (scale * 10.0**exponent).clamp_min(tiny), jitter)
        factor, info = torch.linalg.cholesky_ex(matrix + jitter[..., None, None] * eye)
        if not bool((info != 0).any()):
            warnings.warn(
                f"a covariance of {size} dimensions was not positive definite: added jitter of up to "
                f"{float(jitter.max()):.1e}, 1e{exponent} times its mean variance, to {int((jitter > 0).sum())} of "
                f"{jitter.numel()} matrices",
                NumericalWarning,
                stacklevel=3,
            )
            return factor
    raise InputError("no jitter made this matrix positive definite; it is not a covariance")


def psd_logdet(matrix: Float[Tensor, "*B n n"]) -> Float[Tensor, "*B"]:
    """log det by Cholesky in float64."""
    return 2 * psd_cholesky(matrix).diagonal(dim1=-2, dim2=-1).log().sum(-1)


#: every out-of-distribution score by name; larger = more out of distribution
SCORES: dict[str, Callable[[Prediction], Tensor]] = {
    "predictive_entropy": lambda p: p.entropy,
    "gaussian_entropy": lambda p: p.gaussian_entropy,
    "gaussian_entropy_projected": lambda p: p.gaussian_entropy_projected,
    "mutual_information": lambda p: p.mutual_information,
    "max_prob": lambda p: 1 - p.max_prob,
    "variance": lambda p: p.var.sum(-1),
}


def ood_score(prediction: Prediction, score: str = "gaussian_entropy") -> Float[Tensor, " B"]:
    """One number for each input, larger = more out of distribution."""
    if score not in SCORES:
        raise InputError(f"got score={score!r}; choose one of {', '.join(SCORES)}")
    if prediction.likelihood == "regression" and score not in ("gaussian_entropy", "variance"):
        raise InputError(
            f"got score={score!r} for a regression, which has no class probabilities; "
            "choose 'gaussian_entropy' or 'variance'"
        )
    return SCORES[score](prediction)
