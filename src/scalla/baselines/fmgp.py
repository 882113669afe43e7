"""FMGP: a sparse GP whose mean is the trained network and whose kernel is learned (Ortega et al. 2025)."""

from __future__ import annotations

import copy
import math
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from tqdm.auto import tqdm

from scalla.baselines.minibatch import check_settings, endless, one_pass, pointwise_nll
from scalla.baselines.protocol import function_noise
from scalla.functional import FrozenNetwork, call, find_head
from scalla.predictive import Prediction, psd_cholesky
from scalla.types import InputError, Inputs, Likelihood, Link, Loader, NotFittedError


@final
class FMGP:
    """f ~ GP(network, Σ), Σ(x) = K_xx − K_xz A K_zx, from M inducing pairs (z_m, c_m), one output each.

    With L ∈ R^{M×M} lower triangular (A depends on L Lᵀ alone, so nothing is lost), started at I,

        H = I + Lᵀ K_z L = R Rᵀ,   T = L R⁻ᵀ,   A = T Tᵀ = L H⁻¹ Lᵀ,
        KL = ½ log|H| − ½ tr(K_z A),   tr(K_z A) = tr(Tᵀ K_z T).

    H ≥ I, so its Cholesky factor, the one M×M factorisation of a step, needs no jitter, and K_z is never
    inverted. The kernel is learned: B = L_o L_oᵀ over the outputs, a length scale for each input dimension,

        K((x, c), (x', c')) = B_cc' · exp(−½ Σ_d (x_d − x'_d)²/ℓ_d²) [ · (φ(x)·φ(x') + 1) ],

    the last factor with `last_layer_kernel=True`: φ is what goes into the network's last layer, and the
    factor multiplies all pairs of outputs, so that B keeps its say in how they covary.

    The energy is the log predictive density, −(N/|batch|) Σ log p(y | mean, Σ), where p is
    softmax(f/√(1 + π/8 diag Σ))_y for classes and N(y | f, diag Σ + σ²) for regression, σ learned. (With a
    fixed mean an expected log-density would be of no use: a kernel of zero maximises it, and the −KL too.)

        loss = energy(network, Σ) + KL  +  energy(Q, Σ) + KL + ½ q_μᵀ K_z⁻¹ q_μ,   Q = K_xz K_z⁻¹ q_μ.

    The second sparse GP shares everything with the first but the mean: it ties the kernel to one with which
    the labels could have been learned. Its mean is q_μ = K_z T s with s free, a bijection, which makes
    Q = K_xz T s and the penalty ½ sᵀ Tᵀ K_z T s: as good as whitened, without a factor of K_z.

    Length scales start at the median distance of training inputs / √2 (the logarithm taken once), the
    inducing inputs at k-means centres within each class, each with the output of its class; with regression,
    at k-means centres for each output. All are trained, with Adam at a constant rate, on the loader's own
    batches (published: 100). Inputs must be one tensor. The GP is in `dtype`, float64 by default.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood = "classification",
        *,
        seed: int = 0,
        num_inducing: int = 200,
        num_steps: int = 50_000,
        lr: float = 1e-4,
        last_layer_kernel: bool = False,
        sigma_noise: float = 1.0,
        num_kmeans_inputs: int = 10_000,
        link: Link = "mc",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        check_settings(likelihood, sigma_noise=sigma_noise)
        self.network = FrozenNetwork(copy.deepcopy(model).requires_grad_(False))
        self.likelihood = likelihood
        self.seed = seed
        self.num_inducing = num_inducing
        self.num_steps = num_steps
        self.lr = lr
        self.last_layer_kernel = last_layer_kernel
        self.sigma_noise = sigma_noise
        self.num_kmeans_inputs = num_kmeans_inputs
        self.link = link
        self.dtype = dtype
        self.gp: SparseGP | None = None
        #: the loss at every step, in nats an input
        self.history: list[float] = []
        self._head = ""
        self._input_shape = torch.Size()

    def fit(self, train_loader: Loader, *, context: Loader | None = None, progress_bar: bool = False) -> FMGP:
        """Choose the inducing pairs, then train; `context` is no business of this method."""
        generator = torch.Generator().manual_seed(self.seed)
        x, y, num_inputs = sample_inputs(train_loader, self.num_kmeans_inputs, generator)
        self._input_shape = x.shape[1:]
        if self.last_layer_kernel:
            self._head = find_head(self.network, x)
        outputs = self.network(x[:2])
        flat = x.flatten(1).to(outputs.device, self.dtype)
        gp = self.gp = SparseGP(
            *inducing_pairs(flat, self._classes(y), outputs.shape[-1], self.num_inducing, generator),
            num_outputs=outputs.shape[-1],
            length_scale=median_distance(flat[:1000]) / math.sqrt(2),
            sigma_noise=self.sigma_noise if self.likelihood == "regression" else None,
        )
        self.history = []
        optimizer = torch.optim.Adam(gp.parameters(), lr=self.lr)
        batches = endless(train_loader, seed=self.seed)
        for _ in tqdm(range(self.num_steps), desc="FMGP", disable=not progress_bar):
            loss = self._loss(gp, *next(batches), num_inputs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            self.history.append(loss.item())
        gp.requires_grad_(False)
        return self

    def _loss(self, gp: SparseGP, x: Inputs, y: Tensor, num_inputs: int) -> Float[Tensor, ""]:
        """Both sparse GPs' bounds, divided by N."""
        flat, phi, mean = self._look(x)
        phi_z = self._last_layer_features(gp.inducing)
        transform, gram, kl = gp.solve(phi_z)
        kernel = gp.kernel(flat, gp.inducing, phi, phi_z)
        var = gp.variance(gp.project(kernel, transform), phi)
        second = gp.second_mean(kernel, transform)
        energy = self._energy(mean, var, y) + self._energy(second, var, y)
        penalty = 0.5 * torch.einsum("m,mn,n->", gp.second_weights, gram, gp.second_weights)
        return energy + (2 * kl + penalty) / num_inputs

    def _energy(self, mean: Float[Tensor, "B C"], var: Float[Tensor, "B C"], y: Tensor) -> Float[Tensor, ""]:
        if self.likelihood == "regression":
            assert self.gp is not None
            return pointwise_nll(mean, y, "regression", var + self.gp.noise_var).mean()
        return pointwise_nll(mean / (1 + math.pi / 8 * var).sqrt(), y, "classification").mean()

    @torch.no_grad()
    def predict(self, x: Inputs, *, n_samples: int = 100, generator: torch.Generator | None = None) -> Prediction:
        """N(network(x), Σ(x)): the standard normal draws are shared by all inputs."""
        gp = self.gp
        if gp is None:
            raise NotFittedError("FMGP has no posterior yet: call fit(train_loader) first")
        flat, phi, mean = self._look(x)
        phi_z = self._last_layer_features(gp.inducing)
        transform, _, _ = gp.solve(phi_z)
        cov = gp.covariance(gp.project(gp.kernel(flat, gp.inducing, phi, phi_z), transform), phi)
        mean = mean.to(self.network.dtype)
        noise = function_noise(mean.shape[-1], n_samples, seed=self.seed, generator=generator, like=mean)
        return Prediction(
            mean,
            psd_cholesky(cov).to(mean),
            self.likelihood,
            self.link,
            noise=noise if n_samples else None,
            noise_var=gp.noise_var.to(mean).reshape(1) if self.likelihood == "regression" else None,
        )

    def _look(self, x: Inputs) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B F"] | None, Float[Tensor, "B C"]]:
        """x flattened, φ(x) where the kernel wants it, and the network's outputs, from one pass."""
        x = _one_tensor(x)
        flat = x.flatten(1).to(self.network.device, self.dtype)
        with torch.no_grad():
            if not self.last_layer_kernel:
                return flat, None, self.network(x).to(self.dtype)
            seen: list[Tensor] = []
            head = self.network.twin.get_submodule(self._head)
            handle = head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
            outputs = self.network(x)
            handle.remove()
        return flat, seen[-1].flatten(1).to(self.dtype), outputs.to(self.dtype)

    def _last_layer_features(self, flat: Float[Tensor, "M D"]) -> Float[Tensor, "M F"] | None:
        """φ of the inducing inputs, differentiable in them."""
        if not self.last_layer_kernel:
            return None
        seen: list[Tensor] = []
        head = self.network.twin.get_submodule(self._head)
        handle = head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        call(self.network.twin, flat.reshape(-1, *self._input_shape).to(self.network.dtype))
        handle.remove()
        return seen[-1].flatten(1).to(self.dtype)

    def _classes(self, y: Tensor) -> Int[Tensor, " N"] | None:
        return y.reshape(-1).long() if self.likelihood == "classification" else None


class SparseGP(nn.Module):
    """What FMGP trains: the kernel, the inducing pairs sorted by output, L, and the second mean."""

    def __init__(
        self,
        inducing: Float[Tensor, "M D"],
        inducing_output: Int[Tensor, " M"],
        *,
        num_outputs: int,
        length_scale: float,
        sigma_noise: float | None = None,
    ) -> None:
        super().__init__()
        order = inducing_output.argsort(stable=True)
        like = inducing.detach()
        self.inducing = nn.Parameter(like[order].clone())
        self.variational_factor = nn.Parameter(torch.eye(len(like), dtype=like.dtype, device=like.device))
        self.second_weights = nn.Parameter(like.new_zeros(len(like)))
        self.log_length_scale = nn.Parameter(like.new_full((like.shape[1],), math.log(length_scale)))
        self.output_factor = nn.Parameter(torch.eye(num_outputs, dtype=like.dtype, device=like.device))
        self.log_sigma_noise = None if sigma_noise is None else nn.Parameter(like.new_tensor(math.log(sigma_noise)))
        self.register_buffer("inducing_output", inducing_output[order])
        outputs, sizes = inducing_output[order].unique_consecutive(return_counts=True)
        self.register_buffer("outputs_present", outputs)
        self.sizes: list[int] = sizes.tolist()
        self.inducing_output: Tensor
        self.outputs_present: Tensor

    @property
    def noise_var(self) -> Float[Tensor, ""]:
        assert self.log_sigma_noise is not None
        return (2 * self.log_sigma_noise).exp()

    @property
    def output_cov(self) -> Float[Tensor, "C C"]:
        """B = L_o L_oᵀ."""
        factor = self.output_factor.tril()
        return factor @ factor.mT

    def kernel(
        self, x: Float[Tensor, "B D"], z: Float[Tensor, "M D"], phi_x: Tensor | None, phi_z: Tensor | None
    ) -> Float[Tensor, "B M"]:
        """The kernel without its factor B_cc'."""
        inverse = (-self.log_length_scale).exp()
        centre = z.detach().mean(0)  # distances do not change; the cancellation in them does
        x, z = (x - centre) * inverse, (z - centre) * inverse
        squared = x.square().sum(1)[:, None] + z.square().sum(1) - 2 * x @ z.mT
        rbf = (-0.5 * squared.clamp_min(0)).exp()
        return rbf if phi_x is None or phi_z is None else rbf * (phi_x @ phi_z.mT + 1)

    def solve(
        self, phi_z: Tensor | None = None
    ) -> tuple[Float[Tensor, "M M"], Float[Tensor, "M M"], Float[Tensor, ""]]:
        """T = L R⁻ᵀ, Tᵀ K_z T and the KL, from the one Cholesky factor R of H."""
        outputs = self.inducing_output
        gram_z = self.kernel(self.inducing, self.inducing, phi_z, phi_z) * self.output_cov[outputs][:, outputs]
        factor = self.variational_factor.tril()
        eye = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
        root = torch.linalg.cholesky(eye + factor.mT @ gram_z @ factor)
        transform = torch.linalg.solve_triangular(root, factor.mT, upper=False).mT
        gram = transform.mT @ gram_z @ transform
        return transform, gram, root.diagonal().log().sum() - 0.5 * gram.trace()

    def project(self, kernel: Float[Tensor, "B M"], transform: Float[Tensor, "M M"]) -> Float[Tensor, "B C M"]:
        """K_xz T. An inducing pair has one output, so B M² operations do for all C outputs."""
        blocks = zip(kernel.split(self.sizes, 1), transform.split(self.sizes, 0), strict=True)
        by_output = torch.stack([k @ t for k, t in blocks], 1)
        return torch.einsum("cg,bgm->bcm", self.output_cov[:, self.outputs_present], by_output)

    def second_mean(self, kernel: Float[Tensor, "B M"], transform: Float[Tensor, "M M"]) -> Float[Tensor, "B C"]:
        """Q = K_xz T s."""
        weights = transform @ self.second_weights
        return (kernel * weights) @ self.output_cov[:, self.inducing_output].mT

    def variance(self, projected: Float[Tensor, "B C M"], phi: Tensor | None = None) -> Float[Tensor, "B C"]:
        """diag Σ."""
        prior = self._scale(projected, phi)[:, None] * self.output_cov.diagonal()
        return (prior - projected.square().sum(-1)).clamp_min(0)

    def covariance(self, projected: Float[Tensor, "B C M"], phi: Tensor | None = None) -> Float[Tensor, "B C C"]:
        """Σ = K_xx − K_xz A K_zx."""
        return self._scale(projected, phi)[:, None, None] * self.output_cov - projected @ projected.mT

    def _scale(self, projected: Tensor, phi: Tensor | None) -> Float[Tensor, " B"]:
        return projected.new_ones(len(projected)) if phi is None else phi.square().sum(1) + 1


def _one_tensor(x: Inputs) -> Tensor:
    if isinstance(x, tuple | list) and len(x) == 1:
        x = x[0]
    if not isinstance(x, Tensor) or not x.is_floating_point():
        given = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise InputError(
            f"got inputs that are {given}; FMGP measures distances between inputs and needs one tensor of "
            "floating-point numbers. Take another method, or give it embeddings and the rest of the network"
        )
    return x


def sample_inputs(loader: Loader, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, int]:
    """At most `count` of the loader's pairs (x, y), uniformly chosen in one pass, and N."""
    kept_x, kept_y, kept_key, num_inputs = [], [], torch.empty(0, dtype=torch.float64), 0
    for x, y in one_pass(loader):
        x = _one_tensor(x)
        num_inputs += len(x)
        keys = torch.rand(len(x), generator=generator, dtype=torch.float64)
        kept_x.append(x)
        kept_y.append(y)
        kept_key = torch.cat([kept_key, keys])
        if len(kept_key) > 2 * count:  # the largest keys of all seen: a uniform sample
            kept_key, index = kept_key.topk(count)
            kept_x, kept_y = [torch.cat(kept_x)[index]], [torch.cat(kept_y)[index]]
    index = kept_key.topk(min(count, len(kept_key))).indices
    return torch.cat(kept_x)[index], torch.cat(kept_y)[index], num_inputs


def inducing_pairs(
    x: Float[Tensor, "N D"],
    classes: Int[Tensor, " N"] | None,
    num_outputs: int,
    num_inducing: int,
    generator: torch.Generator,
) -> tuple[Float[Tensor, "M D"], Int[Tensor, " M"]]:
    """M pairs, shared out evenly: k-means centres within each class (of all inputs for regression)."""
    share = [num_inducing // num_outputs + (c < num_inducing % num_outputs) for c in range(num_outputs)]
    centres, outputs = [], []
    for output, size in enumerate(share):
        own = x if classes is None or num_outputs == 1 else x[classes.to(x.device) == output]
        if size == 0 or len(own) == 0:
            continue
        centres.append(kmeans(own, size, generator))
        outputs += [output] * len(centres[-1])
    return torch.cat(centres), torch.tensor(outputs, device=x.device)


def kmeans(
    x: Float[Tensor, "N D"], num_centres: int, generator: torch.Generator, *, num_iterations: int = 20
) -> Float[Tensor, "K D"]:
    """Lloyd's algorithm from randomly chosen inputs; a centre that loses all its inputs stays where it is."""
    start = torch.randperm(len(x), generator=generator)[:num_centres]
    centres = x[start.to(x.device)].clone()
    for _ in range(num_iterations):
        nearest = torch.cdist(x, centres).argmin(1)
        one_hot = torch.nn.functional.one_hot(nearest, len(centres)).to(x)
        counts = one_hot.sum(0)
        centres = torch.where(counts[:, None] > 0, one_hot.mT @ x / counts[:, None].clamp_min(1), centres)
    return centres


def median_distance(x: Float[Tensor, "N D"]) -> float:
    distances = torch.pdist(x)
    distances = distances[distances > 0]
    return float(distances.median()) if len(distances) else 1.0
