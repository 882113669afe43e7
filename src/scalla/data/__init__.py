"""The data of the experiments: images in IDX form, and small sets that come inside scikit-learn.

`load("FashionMNIST", "train")` looks on this machine first and downloads only what is not found.
`digits`, `photo_patches` and `regression_table` need scikit-learn and no network at all.
"""

from scalla.data.digits import Digits, digits, photo_patches
from scalla.data.idx import read_idx
from scalla.data.images import ImageData, SourceFile, load
from scalla.data.npz import read_npz
from scalla.data.tabular import RegressionTable, Table, Toy1D, regression_table, toy_1d

__all__ = [
    "Digits",
    "ImageData",
    "RegressionTable",
    "SourceFile",
    "Table",
    "Toy1D",
    "digits",
    "load",
    "photo_patches",
    "read_idx",
    "read_npz",
    "regression_table",
    "toy_1d",
]
