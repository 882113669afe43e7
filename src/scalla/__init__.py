"""ScaLLA: uncertainty for networks that are already trained."""

from scalla.kernel_error import KernelError
from scalla.method import ScaLLA
from scalla.predictive import SCORES, Prediction
from scalla.types import (
    FileFormatError,
    InputError,
    NotFittedError,
    NumericalWarning,
    ProcessError,
    ScallaError,
    UnsupportedModuleError,
)

__version__ = "0.1.0"

__all__ = [
    "SCORES",
    "FileFormatError",
    "InputError",
    "KernelError",
    "NotFittedError",
    "NumericalWarning",
    "Prediction",
    "ProcessError",
    "ScaLLA",
    "ScallaError",
    "UnsupportedModuleError",
    "__version__",
]
