"""The runs' JSON files → rows: the seeds of one method with one set of settings, done, failed and missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from scalla.benchmark import fmnist, regression
from scalla.benchmark.methods import ROWS
from scalla.benchmark.records import digest_of, read_json
from scalla.report.spread import Spread, spread
from scalla.types import InputError

Record: TypeAlias = Mapping[str, Any]
KIND_ORDER = ("method", "control", "detector")


@dataclass(frozen=True, eq=False)
class ReportRow:
    """One line of a table. `records` and `failures` are by seed; `missing` are seeds that the benchmark plans."""

    task: str
    protocol: str
    method: str
    variant: str
    title: str
    kind: str
    note: str
    records: Mapping[int, Record]
    failures: Mapping[int, Record]
    missing: tuple[int, ...]

    @property
    def label(self) -> str:
        """With its variant; in the regression that is the data set, which the table's caption names."""
        return f"{self.title} · {self.variant}" if self.variant and self.task == fmnist.NAME else self.title

    @property
    def slug(self) -> str:
        """For ids and classes of the page."""
        parts = (self.task, self.protocol, self.method, self.variant)
        return re.sub(r"[^a-z0-9]+", "-", "-".join(p for p in parts if p).lower())

    @property
    def first(self) -> Record | None:
        """The record of the lowest seed: the one whose pictures are shown."""
        return self.records[min(self.records)] if self.records else None

    def by_seed(self, path: Iterable[str]) -> dict[int, float]:
        """The numbers at `path`, where there are any."""
        path = tuple(path)
        found = {seed: value_at(record, path) for seed, record in self.records.items()}
        return {seed: float(v) for seed, v in found.items() if isinstance(v, int | float)}

    def spread(self, path: Iterable[str]) -> Spread | None:
        return spread(self.by_seed(path).values())


@dataclass(frozen=True, eq=False)
class Results:
    """Everything that the page shows."""

    rows: Mapping[tuple[str, str], tuple[ReportRow, ...]]
    networks: Mapping[str, ReportRow]
    records: tuple[Record, ...]
    failures: tuple[Record, ...]
    quick: bool
    #: what lies in the folder and is not shown, and why
    set_aside: tuple[str, ...]

    def of(self, protocol: str, *kinds: str) -> list[ReportRow]:
        """The rows of a protocol of the published table; of some kinds only, if any are given."""
        return [row for row in self.rows.get((fmnist.NAME, protocol), ()) if not kinds or row.kind in kinds]


@dataclass(frozen=True)
class Expected:
    """A row that the benchmark plans."""

    method: str
    variant: str
    title: str
    kind: str
    note: str
    num_seeds: int


def value_at(record: Record, path: Iterable[str]) -> Any:
    """What stands there, None if nothing does."""
    value: Any = record
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def load_results(folder: Path) -> Results:
    """Read every run below `folder`, as the benchmark lays them out."""
    done = [read_json(path) for task in TASK_NAMES for path in sorted((folder / task).glob("*.json"))]
    failures = [read_json(path) for path in sorted((folder / "failed").glob("*.json"))]
    failures = [record for record in failures if record["run"]["task"] in TASK_NAMES]
    if not done and not failures:
        raise InputError(
            f"found no run below {folder}; wanted JSON files in {folder / fmnist.NAME}: "
            f"run `scalla benchmark {fmnist.NAME}` first, or give the folder that it wrote to"
        )
    set_aside: list[str] = []
    rows: dict[tuple[str, str], tuple[ReportRow, ...]] = {}
    networks: dict[str, ReportRow] = {}
    shown: list[Record] = []
    kept_failures: list[Record] = []
    quick = all(record["run"]["quick"] for record in [*done, *failures])
    for task in TASK_NAMES:
        of_task = [r for r in [*done, *failures] if r["run"]["task"] == task]
        full = [r for r in of_task if not r["run"]["quick"]]
        if full and len(full) < len(of_task):
            set_aside.append(f"{len(of_task) - len(full)} quick runs of {task}, since there are full ones")
        of_task = full or of_task
        for protocol in TASK_PROTOCOLS[task]:
            groups: dict[tuple[str, str], list[Record]] = {}
            for record in (r for r in of_task if r["run"]["protocol"] == protocol):
                groups.setdefault((record["run"]["method"], record["run"]["variant"]), []).append(record)
            if not groups:
                continue
            is_quick = all(r["run"]["quick"] for members in groups.values() for r in members)
            found = []
            for expected in _expected(task, protocol, groups):
                members = groups.get((expected.method, expected.variant), [])
                chosen = _one_configuration(members)
                if len(chosen) < len(members):
                    label = " ".join(p for p in (protocol, expected.method, expected.variant) if p)
                    set_aside.append(f"{len(members) - len(chosen)} runs of {label} with other settings or data")
                row = _row(task, protocol, expected, chosen, is_quick)
                shown += row.records.values()
                kept_failures += row.failures.values()
                if expected.kind == "network":
                    networks[protocol] = row
                else:
                    found.append(row)
            rows[task, protocol] = tuple(sorted(found, key=lambda row: KIND_ORDER.index(row.kind)))
    return Results(rows, networks, tuple(shown), tuple(kept_failures), quick, tuple(set_aside))


def _row(task: str, protocol: str, expected: Expected, members: list[Record], quick: bool) -> ReportRow:
    records = {r["run"]["seed"]: r for r in members if r["status"] == "done"}
    failures = {r["run"]["seed"]: r for r in members if r["status"] == "failed" and r["run"]["seed"] not in records}
    wanted = range(1, min(expected.num_seeds, 1 if quick else expected.num_seeds) + 1)
    own: Record = next(iter(records.values()), {})
    return ReportRow(
        task,
        protocol,
        expected.method,
        expected.variant,
        own.get("title", expected.title),
        expected.kind,
        own.get("note", expected.note),
        dict(sorted(records.items())),
        dict(sorted(failures.items())),
        tuple(seed for seed in wanted if seed not in records and seed not in failures),
    )


def _one_configuration(members: list[Record]) -> list[Record]:
    """Seeds with the same settings and data belong together: those of which most are done, and then the newest."""
    groups: dict[str, list[Record]] = {}
    for record in members:
        run = record["run"]
        shared = {name: sha for name, sha in run["data"].items() if "/seed" not in name}
        key = digest_of([run["settings"], run["network_seed"], run["quick"], shared])
        groups.setdefault(key, []).append(record)
    if not groups:
        return []
    return max(groups.values(), key=lambda g: (sum(r["status"] == "done" for r in g), max(r["started"] for r in g)))


def _expected(task: str, protocol: str, groups: Mapping[tuple[str, str], list[Record]]) -> list[Expected]:
    """What the benchmark plans, in its order, then what else was found."""
    planned = _planned_regression() if task == regression.NAME else _planned_fmnist(protocol)
    known = {(row.method, row.variant) for row in planned}
    for (method, variant), members in groups.items():
        if (method, variant) not in known:
            first = members[0]
            # A failed run has no title: it failed before there was anything to say.
            kind, note = first.get("kind", "method"), first.get("note", "")
            if method == fmnist.NETWORK:
                kind = "network"
            planned.append(Expected(method, variant, first.get("title", method), kind, note, 0))
    return planned


def _planned_fmnist(protocol: str) -> list[Expected]:
    return [
        Expected(row.name, variant, row.title, row.kind, row.note, row.num_seeds)
        for row in ROWS.values()
        if protocol in row.protocols
        for variant in row.variants_in(protocol)
    ]


def _planned_regression() -> list[Expected]:
    return [
        Expected(name, table, title, "method", "", regression.NUM_SEEDS)
        for table in regression.TABLES
        for name, title in regression.TITLES.items()
    ]


TASK_PROTOCOLS: dict[str, tuple[str, ...]] = {
    fmnist.NAME: fmnist.PROTOCOLS,
    regression.NAME: regression.PROTOCOLS,
}
TASK_NAMES = tuple(TASK_PROTOCOLS)
