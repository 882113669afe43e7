from pathlib import Path

import pytest
from tiny_images import write_images

from scalla.benchmark import fmnist
from scalla.benchmark import images as image_data
from scalla.benchmark.methods import NUM_TRIALS, ROWS
from scalla.types import InputError


@pytest.fixture(autouse=True)
def _made_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan reads the data only to name it."""
    monkeypatch.setattr(image_data, "checksums", lambda root=None, *, allow_subset=False: {"MNIST/test": "00"})


def test_every_row_variant_and_seed_once() -> None:
    runs = fmnist.plan()
    rows = [run for run in runs if run.method != fmnist.NETWORK]
    expected = {
        (protocol, row.name, variant, seed)
        for protocol in fmnist.PROTOCOLS
        for row in ROWS.values()
        if protocol in row.protocols
        for variant in (row.variants if protocol == "paper" else {"": {}})
        for seed in range(1, row.num_seeds + 1)
    }
    assert len(rows) == len(expected)
    assert {(run.protocol, run.method, run.variant, run.seed) for run in rows} == expected
    assert len({run.name for run in runs}) == len(runs)


def test_networks_come_first_one_for_each_seed_that_is_used() -> None:
    runs = fmnist.plan()
    networks = [run for run in runs if run.method == fmnist.NETWORK]
    assert runs[: len(networks)] == networks
    most = max(row.num_seeds for row in ROWS.values())
    assert {(run.protocol, run.seed) for run in networks} == {
        (p, s) for p in fmnist.PROTOCOLS for s in range(1, most + 1)
    }


def test_rows_stand_in_the_order_of_the_table() -> None:
    runs = fmnist.plan(seeds=[1], protocols=["tuned"])
    names = [run.method for run in runs if run.method != fmnist.NETWORK]
    assert names == [name for name, row in ROWS.items() if "tuned" in row.protocols]


def test_at_least_three_seeds() -> None:
    assert all(row.num_seeds >= 3 for row in ROWS.values())


def test_quick_is_one_seed_of_everything_on_less() -> None:
    runs = fmnist.plan(quick=True)
    assert {run.seed for run in runs} == {1}
    assert all(run.quick and run.name.startswith("quick-") for run in runs)
    full = {(run.protocol, run.method, run.variant): run for run in fmnist.plan(seeds=[1])}
    assert {(run.protocol, run.method, run.variant) for run in runs} == set(full)
    for run in runs:
        other = full[run.protocol, run.method, run.variant]
        assert run.digest != other.digest
        assert run.settings["sizes"]["train"] < 60_000
        for key in ("num_steps", "num_epochs"):
            if key in run.settings.get("method", {}):
                assert run.settings["method"][key] < other.settings["method"][key]


def test_methods_and_seeds_given() -> None:
    runs = fmnist.plan(["map", "knn"], [7], ["paper"])
    assert [(run.method, run.seed) for run in runs] == [("network", 7), ("map", 7), ("knn", 7)]


def test_one_network_for_all_seeds() -> None:
    runs = fmnist.plan(["map"], [1, 2], ["paper"], network_seed=5)
    assert [(run.method, run.seed, run.network_seed) for run in runs] == [
        ("network", 5, None),
        ("map", 1, 5),
        ("map", 2, 5),
    ]


def test_settings_of_a_variant_and_of_the_trials_are_in_the_identity() -> None:
    prior, marglik = (run for run in fmnist.plan(["scalla"], [1], ["paper"]) if run.method == "scalla")
    assert (prior.variant, marglik.variant) == ("prior 1", "marglik")
    assert "marglik" not in prior.settings["method"]
    assert marglik.settings["method"]["marglik"] is True
    tuned = fmnist.plan(["mfvi"], [1], ["tuned"])[-1]
    assert tuned.settings["trials"] == list(ROWS["mfvi"].trials)
    assert tuned.settings["trial"] == {"num_steps": 2000}


def test_equal_budget() -> None:
    """As many trials for every method that has something to choose."""
    for row in ROWS.values():
        if row.kind == "method" and row.trials:
            assert len(row.trials) == NUM_TRIALS, row.name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["map", "lla"]}, r"got methods \['lla'\]; choose from map, "),
        ({"protocols": ["paper", "best"]}, r"got protocol \['best'\]; choose 'paper' or 'tuned'"),
        (
            {"methods": ["map_temperature"], "protocols": ["paper"]},
            "map_temperature is a row of the protocols tuned only",
        ),
    ],
)
def test_unknown_names_are_refused(options: dict[str, list[str]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fmnist.plan(**options)  # type: ignore[arg-type]


def test_a_row_of_one_protocol_is_left_out_of_the_other() -> None:
    runs = fmnist.plan(["map_temperature"], [1])
    assert [(run.protocol, run.method) for run in runs] == [("tuned", "network"), ("tuned", "map_temperature")]


def test_data_are_named_by_their_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    one = write_images(tmp_path / "one")
    run = fmnist.plan(["map"], quick=True, data_root=one)[0]
    assert set(run.data) == {"FashionMNIST/train", "FashionMNIST/test", "KMNIST/test", "MNIST/test", "MNIST/train"}
    assert all(len(sha) == 64 for sha in run.data.values())
    other = write_images(tmp_path / "other")
    assert fmnist.plan(["map"], quick=True, data_root=other)[0].digest == run.digest
    labels = other / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
    changed = bytearray(labels.read_bytes())
    changed[-1] ^= 1
    labels.write_bytes(bytes(changed))
    assert fmnist.plan(["map"], quick=True, data_root=other)[0].digest != run.digest
