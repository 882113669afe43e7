"""What is shipped: the two distributions, what they ask for, and that the core alone is enough to fit and predict."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import scalla

ROOT = Path(__file__).resolve().parent.parent
CORE = {"torch", "numpy", "safetensors", "tqdm", "jaxtyping"}
EXTRAS = {"cli", "plots", "metrics", "bench", "export", "hub", "sklearn", "lightning", "docs", "dev"}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution, the wheel built from the latter as pip would."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def unpacked(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an installation of the wheel puts beside other packages."""
    folder = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def metadata(unpacked: Path) -> Message:
    return Parser().parsestr(next(unpacked.glob("*.dist-info/METADATA")).read_text(encoding="utf-8"))


def requirements(metadata: Message, extra: str | None) -> set[str]:
    found = set()
    for line in metadata.get_all("Requires-Dist") or []:
        requirement, _, marker = str(line).partition(";")
        name = re.match(r"[\w.-]+(\[[\w,-]+\])?", requirement.strip())
        of = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        if name and (of[1] if of else None) == extra:
            found.add(name[0])
    return found


def test_the_core_asks_for_five_packages(metadata: Message) -> None:
    assert requirements(metadata, None) == CORE
    assert set(metadata.get_all("Provides-Extra") or []) == EXTRAS
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.10"


def test_every_requirement_has_a_lower_bound(metadata: Message) -> None:
    for line in metadata.get_all("Requires-Dist") or []:
        requirement = str(line).partition(";")[0].strip()
        assert ">=" in requirement or requirement.startswith("scalla["), requirement


def test_extras_that_messages_and_pages_name_exist() -> None:
    texts = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    named = {e for path in texts for group in re.findall(r"scalla\[([\w,]+)\]", path.read_text("utf-8"))
             for e in group.split(",")}  # fmt: skip
    assert "plots" in named
    assert named <= EXTRAS


def test_the_wheel_holds_the_package_and_nothing_else(unpacked: Path) -> None:
    assert {p.name for p in unpacked.iterdir()} == {"scalla", f"scalla-{scalla.__version__}.dist-info"}
    assert (unpacked / "scalla" / "py.typed").is_file()
    for asset in (p for p in (ROOT / "src" / "scalla").rglob("*") if p.suffix in (".css", ".js", ".html", ".json")):
        assert (unpacked / asset.relative_to(ROOT / "src")).read_bytes() == asset.read_bytes()
    info = next(unpacked.glob("*.dist-info"))
    assert "MIT License" in (info / "licenses" / "LICENSE").read_text("utf-8")
    assert "scalla = scalla.cli:main" in (info / "entry_points.txt").read_text("utf-8")
    assert not list(unpacked.rglob("__pycache__"))


def test_the_source_distribution_can_be_tested_and_documented(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = (
        "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "Makefile",
        "mkdocs.yml", "docs/index.md", "docs/scripts/pages.py", "src/scalla/py.typed", "tests/test_packaging.py",
        "constraints/py310.txt",
    )  # fmt: skip
    assert set(wanted) <= names
    assert not [name for name in names if name.startswith((".venv", "runs/", "site/", "demo_output/"))]


def test_the_version_is_said_once_everywhere(metadata: Message) -> None:
    assert metadata["Version"] == scalla.__version__
    assert f"\nversion: {scalla.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\n## [{scalla.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


ALONE = """
import sys
import scalla
assert scalla.__file__.startswith(sys.argv[1]), scalla.__file__
for absent in ("sklearn", "matplotlib", "rich", "torchmetrics", "onnx"):
    try:
        __import__(absent)
    except ModuleNotFoundError:
        continue
    raise AssertionError(absent)

import torch
from scalla import ScaLLA, context, metrics, plots
torch.manual_seed(0)
x = torch.randn(40, 2)
data = [(x[:20], (x[:20, 0] > 0).long()), (x[20:], (x[20:, 0] > 0).long())]
model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
la = ScaLLA(model, num_features=5).fit(data, context=context.default(x), bias=True, num_steps=5)
la.save(sys.argv[1] + "/posterior.safetensors")
again = ScaLLA.load(sys.argv[1] + "/posterior.safetensors", model)
probs = la.predict(x).probs
assert torch.equal(again.predict(x).probs, probs)
print(f"{metrics.nll(probs, (x[:, 0] > 0).long()):.3f} {float(la.ood_score(x).mean()):.3f}")
for call, extra in (
    (lambda: plots.roc([0.0], [1.0]), "scalla[plots]"),
    (lambda: la.export(sys.argv[1] + "/model.onnx", x), "scalla[export]"),
    (lambda: __import__("scalla.data").data.digits(), "scalla[sklearn]"),
):
    try:
        call()
    except Exception as error:
        assert extra in str(error), error
    else:
        raise AssertionError(extra)
"""


def closure(names: set[str]) -> dict[str, importlib.metadata.Distribution]:
    """Packages and whatever they need of what is installed here."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = sorted(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # for another system or an older Python
            continue
        waiting += [re.split(r"[^\w.-]", r)[0] for r in found[name].requires or [] if "extra ==" not in r]
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site-packages of the core's five packages and what these need, by links to the ones installed."""
    folder = tmp_path_factory.mktemp("bare")
    for distribution in closure(CORE).values():
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder


def test_fit_and_predict_with_the_core_alone(unpacked: Path, bare: Path) -> None:
    # -S: nothing of the environment that the tests run in
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(unpacked), str(bare)))}
    command = [sys.executable, "-S", "-c", ALONE, str(unpacked)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    nll, score = map(float, done.stdout.split())
    assert 0 < nll < 5
    assert -20 < score < 20
