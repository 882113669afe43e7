import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalla.benchmark import records
from scalla.benchmark.records import Run, digest_of, jsonable, read_json, without_paths, write_json
from scalla.types import FileFormatError

RUN = Run(
    "fmnist",
    "lla_last_full",
    "prior 1",
    "paper",
    seed=2,
    settings={"method": {"prior_precision": 1.0}, "network": {"lr": 1e-3}},
    data={"MNIST/test": "ab" * 32},
)


def test_identity_does_not_drift() -> None:
    """The names of runs that are done: another digest of the same run would make all of them run again."""
    assert RUN.digest == "84f154bcae94bff3135e30cf1ce703109dea05928b4f02b4c6348268b4929419"
    assert RUN.name == f"paper-lla_last_full-prior 1-seed2-{RUN.digest[:10]}"
    assert replace(RUN, quick=True).name.startswith("quick-paper-")
    assert RUN.label == "paper lla_last_full prior 1 seed 2"


@pytest.mark.parametrize(
    "change",
    [
        {"task": "regression"},
        {"method": "map"},
        {"variant": "marglik"},
        {"protocol": "tuned"},
        {"seed": 3},
        {"quick": True},
        {"network_seed": 2},
        {"settings": {"method": {"prior_precision": 2.0}, "network": {"lr": 1e-3}}},
        {"data": {"MNIST/test": "ac" * 32}},
    ],
)
def test_everything_that_decides_the_numbers_is_in_the_digest(change: dict[str, Any]) -> None:
    assert replace(RUN, **change).digest != RUN.digest


def test_digest_is_of_the_content_and_not_of_its_order() -> None:
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    assert Run.from_json(json.loads(json.dumps(RUN.to_json()))).digest == RUN.digest


def test_done_and_failed_are_kept_apart(tmp_path: Path) -> None:
    assert RUN.done_path(tmp_path) == tmp_path / "fmnist" / f"{RUN.name}.json"
    assert RUN.failed_path(tmp_path) == tmp_path / "failed" / f"fmnist-{RUN.name}.json"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.json"
    write_json(path, {"schema": 1, "number": 1.23456789e-5, "list": [1, 2.5, None], "text": "δ"})
    assert read_json(path) == {"schema": 1, "number": 1.23457e-5, "list": [1, 2.5, None], "text": "δ"}
    assert '"list": [1, 2.5, null]' in path.read_text(encoding="utf-8")  # a curve is one line of a diff


def test_nan_and_infinity_become_null(tmp_path: Path) -> None:
    write_json(
        tmp_path / "run.json", {"schema": 1, "a": math.nan, "b": [math.inf, -math.inf, 1.0], "c": {"d": math.nan}}
    )
    assert read_json(tmp_path / "run.json") == {"schema": 1, "a": None, "b": [None, None, 1], "c": {"d": None}}
    assert jsonable({1: (math.nan, 0.1 + 0.2)}) == {"1": [None, 0.3]}


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
def test_a_write_that_breaks_off_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "run.json"
    write_json(path, {"schema": 1, "value": "old"})

    def broken(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, step, broken)
    with pytest.raises(OSError, match="no space"):
        write_json(path, {"schema": 1, "value": "new"})
    assert read_json(path)["value"] == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_content_that_is_no_json_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_json(tmp_path / "run.json", {"schema": 1, "value": object()})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 1, "cut', "cannot be read as a run's JSON"),
        ("[1, 2]", "no run of this benchmark"),
        ('{"schema": 999}', "no run of this benchmark"),
        ("", "cannot be read"),
    ],
)
def test_a_file_that_is_no_run_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(FileFormatError, match=message):
        read_json(tmp_path / "run.json")


def test_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="delete it and run the benchmark again"):
        read_json(tmp_path / "none.json")


def test_messages_lose_the_folders_of_the_machine() -> None:
    text = "no file at /home/someone/data/MNIST/train.gz; see https://example.org/a/b and a/b or 1/2"
    assert without_paths(text) == "no file at train.gz; see https://example.org/a/b and a/b or 1/2"


def test_schema_version_is_part_of_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    before = RUN.digest
    monkeypatch.setattr(records, "SCHEMA_VERSION", records.SCHEMA_VERSION + 1)
    assert RUN.digest != before
