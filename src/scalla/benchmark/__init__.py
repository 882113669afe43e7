"""The published table, every method in it, by one command: `python -m scalla.benchmark fmnist --quick`."""

from scalla.benchmark.runner import Summary, add_arguments, main, run_benchmark

__all__ = ["Summary", "add_arguments", "main", "run_benchmark"]
