"""The published table, as data.

Source: the table of the ScaLLA paper's FashionMNIST experiment (in distribution FashionMNIST, out of distribution
KMNIST, context MNIST), one seed of the authors' own run. ELLA is not printed there: its numbers are the output of the
same published code. Each stands beside the row whose settings are closest to the published ones.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """Fields are named as the columns of `columns.py` name them; None where the table has a dash."""

    title: str
    accuracy: float
    nll: float
    ece: float
    auc: float
    gaussian_auc: float | None


#: (method, variant) of ours → what was published
PUBLISHED: dict[tuple[str, str], Published] = {
    ("map", ""): Published("MAP", 0.9101, 0.2539, 0.010, 0.773, None),
    # Called last-layer in the text; all layers in Kronecker factors in the published settings.
    ("lla_all_kron", "marglik"): Published("LLA", 0.9092, 0.2714, 0.023, 0.841, 0.992),
    ("ella", ""): Published("ELLA (not printed, same code)", 0.9099, 0.2530, 0.007, 0.787, 0.740),
    ("valla", ""): Published("VaLLA", 0.9098, 0.2516, 0.005, 0.677, 0.939),
    ("fmgp", ""): Published("FMGP", 0.9100, 0.2623, 0.036, 0.890, 0.866),
    ("mfvi", "published rates"): Published("MFVI", 0.9106, 0.2541, 0.012, 0.783, None),
    ("sngp", ""): Published("SNGP", 0.9036, 0.2674, 0.011, 0.927, None),
    ("scalla", "prior 1"): Published("ScaLLA", 0.9103, 0.2528, 0.008, 0.789, 0.784),
    ("scalla_biased", "prior 1"): Published("ScaLLA biased", 0.9099, 0.2530, 0.008, 0.821, 0.982),
}
#: decimals as printed (the accuracy in percent), and half a unit of the last of them
DIGITS = {"accuracy": 2, "nll": 4, "ece": 3, "auc": 3, "gaussian_auc": 3}
ROUNDING = {"accuracy": 5e-5, "nll": 5e-5, "ece": 5e-4, "auc": 5e-4, "gaussian_auc": 5e-4}
