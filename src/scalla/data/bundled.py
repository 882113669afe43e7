"""scikit-learn's folder of data, and the random numbers that split them the same way for ever."""

from __future__ import annotations

from typing import Any

import numpy as np


def sklearn_datasets() -> Any:
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError(
            'these data come inside scikit-learn, which is not installed: pip install "scalla[sklearn]"'
        ) from error
    return datasets


def frozen_rng(seed: int) -> np.random.RandomState:
    """numpy promises that this stream never changes; for its newer generators it promises nothing."""
    return np.random.RandomState(seed)
