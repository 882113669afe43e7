"""How far a hidden vector is from the training data: a Gaussian for each class.

d(h) = min_k (h − μ_k)ᵀ S_k⁻¹ (h − μ_k) + log det S_k − min_j log det S_j

with S_k the class's covariance plus a ridge; one covariance for all classes where there are too many of them.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

#: numbers in all covariances together, beyond which the classes share one
MAX_COVARIANCE_NUMBERS = 2**23


class ClassGaussians(nn.Module):
    """h → d(h) ≥ 0."""

    means: Float[Tensor, "K D"]
    whitening: Float[Tensor, "G D D"]
    log_dets: Float[Tensor, " G"]

    def __init__(self, num_classes: int, num_dims: int, *, shared: bool, like: Tensor) -> None:
        """`shared`: one covariance for all classes."""
        super().__init__()
        num_groups = 1 if shared else num_classes
        self.register_buffer("means", like.new_zeros(num_classes, num_dims))
        self.register_buffer("whitening", like.new_zeros(num_groups, num_dims, num_dims))
        self.register_buffer("log_dets", like.new_zeros(num_groups))

    def forward(self, h: Float[Tensor, "B D"]) -> Float[Tensor, " B"]:
        if len(self.whitening) == 1:
            whitened = h @ self.whitening[0]
            centres = self.means @ self.whitening[0]
            # ‖a − b‖² of each pair by its terms would cancel; K is small beside D, so the differences are formed
            return torch.stack([(whitened - centre).square().sum(-1) for centre in centres]).amin(0)
        distances = [
            ((h - mean) @ whitening).square().sum(-1) + log_det
            for mean, whitening, log_det in zip(self.means, self.whitening, self.log_dets, strict=True)
        ]
        return torch.stack(distances).amin(0)


class ClassMoments:
    """Counts, sums and scatters of the vectors of each class, streamed, in float64."""

    def __init__(self, num_classes: int, first: Float[Tensor, "B D"], *, shared: bool) -> None:
        # About the mean of the first batch, so that a scatter is no difference of large numbers.
        self.origin = first.double().mean(0)
        dims = first.shape[1]
        self.counts = self.origin.new_zeros(num_classes)
        self.sums = self.origin.new_zeros(num_classes, dims)
        self.squares = self.origin.new_zeros(1 if shared else num_classes, dims, dims)

    def add(self, h: Float[Tensor, "B D"], y: Int[Tensor, " B"]) -> None:
        centred = h.double() - self.origin
        self.counts.index_add_(0, y, torch.ones_like(centred[:, 0]))
        self.sums.index_add_(0, y, centred)
        if len(self.squares) == 1:
            self.squares[0] += centred.mT @ centred
        else:
            for k in y.unique().tolist():
                rows = centred[y == k]
                self.squares[k] += rows.mT @ rows

    @torch.no_grad()
    def write(self, gaussians: ClassGaussians, *, ridge: float) -> None:
        """Means and S_k^{-1/2}; a class that was never seen is nowhere near anything."""
        counts = self.counts.clamp_min(1)
        means = self.sums / counts[:, None]
        if len(self.squares) == 1:
            covs = (self.squares[0] - torch.einsum("k,kd,ke->de", self.counts, means, means))[None] / self.counts.sum()
            within = covs[0]
        else:
            covs = self.squares / counts[:, None, None] - torch.einsum("kd,ke->kde", means, means)
            within = torch.einsum("k,kde->de", self.counts / self.counts.sum(), covs)
        size = within.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
        eye = torch.eye(means.shape[1], dtype=means.dtype, device=means.device)
        factors = torch.linalg.cholesky((covs + covs.mT) / 2 + ridge * size * eye)
        log_dets = 2 * factors.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        seen = self.counts > 0
        if len(factors) > 1:
            log_dets = torch.where(seen, log_dets - log_dets[seen].min(), torch.inf)
        else:
            log_dets = torch.zeros_like(log_dets)
            means = torch.where(seen[:, None], means, means[seen][0])
        gaussians.means.copy_(means + self.origin)
        gaussians.whitening.copy_(torch.linalg.inv(factors).mT)
        gaussians.log_dets.copy_(log_dets)
