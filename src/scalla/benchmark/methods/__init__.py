"""The registry: every row of the table by name, in the order of the table."""

from scalla.benchmark.methods import controls, detectors, ella, fmgp, lla, map, mfvi, scalla, sngp, valla
from scalla.benchmark.methods.row import NUM_TRIALS, Problem, Row, Settings, seeded_fit

ROWS: dict[str, Row] = {
    row.name: row
    for module in (map, lla, ella, valla, fmgp, mfvi, sngp, scalla, controls, detectors)
    for row in module.ROWS
}

__all__ = ["NUM_TRIALS", "ROWS", "Problem", "Row", "Settings", "seeded_fit"]
