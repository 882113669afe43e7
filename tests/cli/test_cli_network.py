"""module:factory and weights → a network; nothing but tensors is unpickled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from scalla import FileFormatError, InputError
from scalla.cli.network import read_network, read_weights

CODE = """
from torch import nn
def make(width=4):
    return nn.Sequential(nn.Linear(2, width), nn.Dropout(), nn.Linear(width, 3))
class Inner:
    network = nn.Linear(2, 3)
number = 3
def words():
    return "no network"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "made_nets.py"
    path.write_text(CODE)
    return path


def test_a_factory_in_a_file(file: Path) -> None:
    network = read_network(f"{file}:make", options='{"width": 7}')
    assert network[0].out_features == 7
    assert not network.training


def test_a_factory_in_a_module_of_the_present_folder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    monkeypatch.setattr("sys.path", ["elsewhere"])
    monkeypatch.delitem(__import__("sys").modules, "made_nets", raising=False)
    assert read_network("made_nets:make")[0].out_features == 4


def test_a_network_itself(file: Path) -> None:
    assert isinstance(read_network(f"{file}:Inner.network"), nn.Linear)
    with pytest.raises(InputError, match="a network already"):
        read_network(f"{file}:Inner.network", options='{"a": 1}')


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("", None, "wanted module:factory"),
        (":missing", None, "has no 'missing'"),
        (":number", None, "is a int; wanted a function"),
        (":words", None, "made a str; wanted a torch.nn.Module"),
        (":make", '{"depth": 2}', "cannot be called with"),
        (":make", "{width: 2}", "is no JSON"),
        (":make", "[1]", "wanted keyword arguments"),
    ],
)
def test_wrong_factories(file: Path, name: str, options: str | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_network(f"{file}{name}", options=options)


def test_modules_that_cannot_be_imported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no_such_module cannot be imported: ModuleNotFoundError"):
        read_network("no_such_module:make")
    with pytest.raises(InputError, match="found no file"):
        read_network(f"{tmp_path}/none.py:make")
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(InputError, match="cannot be imported: ZeroDivisionError"):
        read_network(f"{tmp_path}/broken.py:make")


@pytest.mark.parametrize("kind", ["safetensors", "pt", "nested", "parallel"])
def test_weights(file: Path, tmp_path: Path, kind: str) -> None:
    trained = read_network(f"{file}:make")
    state = trained.state_dict()
    path = tmp_path / ("w.safetensors" if kind == "safetensors" else "w.pt")
    if kind == "safetensors":
        save_file(state, path)
    else:
        wrapped = {"module." + k: v for k, v in state.items()} if kind == "parallel" else state
        torch.save({"epoch": 3, "state_dict": wrapped} if kind == "nested" else wrapped, path)
    network = read_network(f"{file}:make", path)
    for name, t in network.state_dict().items():
        assert torch.equal(t, state[name])


class Evil:
    def __reduce__(self):
        return (print, ("run by the pickle",))


def test_wrong_weights(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w.pt"
    with pytest.raises(InputError, match="found no file of weights"):
        read_weights(path)
    torch.save({"w": Evil()}, path)
    with pytest.raises(FileFormatError, match="holds no state dict that can be read safely"):
        read_weights(path)
    assert "run by the pickle" not in capsys.readouterr().out
    torch.save([1, 2], path)
    with pytest.raises(FileFormatError, match="holds a list; wanted a state dict"):
        read_weights(path)
    (tmp_path / "w.safetensors").write_bytes(b"no")
    with pytest.raises(FileFormatError, match="can be read safely"):
        read_weights(tmp_path / "w.safetensors")
    torch.save({"other": torch.ones(2)}, path)
    with pytest.raises(InputError, match="are not those of this network"):
        read_network(f"{file}:make", path)
