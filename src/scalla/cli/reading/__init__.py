"""Data of the command line: a folder of images, an .npz, a CSV, IDX files, or a data set by name."""

from scalla.cli.reading.choice import read_data
from scalla.cli.reading.data import Data, InputOptions

__all__ = ["Data", "InputOptions", "read_data"]
