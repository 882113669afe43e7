"""The page as a whole: complete, self-contained, honest about what was not run, and right in a browser."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import Browser, browser, find_chromium
from made_runs import fail, run_of, write_results

from scalla.benchmark.methods import ROWS
from scalla.report import __main__ as command
from scalla.report import page as page_module
from scalla.report import write_report
from scalla.report.results import load_results

VOID = {"meta", "link", "br", "hr", "img", "input", "image", "use", "line", "rect", "circle", "polyline", "polygon"}


class Structure(HTMLParser):
    """Ids, links, and whether every element is closed in its order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: Counter[str] = Counter()
        self.targets: set[str] = set()
        self.headings: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("id"):
            self.ids[given["id"]] += 1
        if (given.get("href") or "").startswith("#"):
            self.targets.add(given["href"][1:])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h2", "h3"):
            self.headings.append(data)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "results"
    write_results(folder, seeds=(1, 2))
    fail(folder, run_of("fmgp", "", "paper", 3))
    return folder


@pytest.fixture(scope="module")
def page(made: Path) -> Path:
    return write_report(made, made.parent / "page" / "report.html")


def test_every_part_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = Structure(text)
    assert found.open == []
    assert set(found.headings) >= {
        "Where ScaLLA leads, and where it does not", "The paper protocol", "The tuned protocol", "Regression",
        "How good the kernel is", "How it was run", "Against the published numbers", "Other sets",
        "Quality against cost", "ROC curves and rejection", "Growing shift", "Reliability", "Scores",
        "The least and the most uncertain inputs", "Failed runs", "Networks", "Versions and hardware", "Data",
    }  # fmt: skip
    for row in ROWS.values():
        for protocol in row.protocols:
            for variant in row.variants_in(protocol):
                assert f"note-{run_slug(protocol, row.name, variant)}" in found.ids


def run_slug(protocol: str, method: str, variant: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", "-".join(p for p in ("fmnist", protocol, method, variant) if p).lower())


def test_ids_are_unique_and_links_lead_somewhere(page: Path) -> None:
    found = Structure(page.read_text(encoding="utf-8"))
    assert max(found.ids.values()) == 1
    assert found.targets <= set(found.ids)


def test_page_needs_nothing_else(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:|//|file:|/)""", text)
    assert "http" not in re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", text)
    assert len(text) < 5_000_000


def test_failed_and_missing_runs_are_said(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert '<span class="bad">1 failed</span>' in text
    assert "LinAlgError: matrix is &lt;not&gt; positive &amp; definite" in text
    assert "ella.py:12 in fit" in text
    assert '<span class="bad">1 missing</span>' in text


def test_a_single_run_makes_a_page_without_invented_numbers(tmp_path: Path) -> None:
    write_results(tmp_path / "results", protocols=["paper"], methods=["map"], seeds=[1], with_regression=False)
    text = write_report(tmp_path / "results", tmp_path / "report.html").read_text(encoding="utf-8")
    found = Structure(text)
    assert found.open == []
    assert "The tuned protocol" not in found.headings
    assert "Regression" not in found.headings
    assert "How good the kernel is" not in found.headings
    assert "No run of ScaLLA is among the results yet" in text
    planned = sum(len(r.variants) for r in ROWS.values() if "paper" in r.protocols)
    main_table = text.partition("<caption>Paper protocol")[2].partition("</table>")[0]
    assert main_table.count("missing: not run") == planned - 1


def test_only_failures_make_a_page(tmp_path: Path) -> None:
    fail(tmp_path, run_of("map", "", "paper", 1))
    text = write_report(tmp_path, tmp_path / "report.html").read_text(encoding="utf-8")
    assert Structure(text).open == []
    assert "LinAlgError" in text
    assert '<span class="num">' not in text


def test_a_write_that_breaks_off_leaves_the_old_page(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report.html"
    out.write_text("old")

    def broken(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(page_module.os, "replace", broken)
    with pytest.raises(OSError, match="no space"):
        write_report(made, out)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("report.html", "old")]


def test_command_line(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.html"
    assert command.main([str(made), str(out)]) == 0
    assert out.is_file()
    assert command.main([str(made), "--markdown", "tuned"]) == 0
    assert "| MAP, temperature scaled" in capsys.readouterr().out
    assert command.main([str(tmp_path / "none")]) == 2
    assert "found no run below" in capsys.readouterr().err


def test_same_runs_same_page(made: Path, page: Path) -> None:
    assert page_module.render(load_results(made)) == page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = find_chromium()
    if executable is None:
        pytest.skip("no Chromium on this machine")
    with browser(executable, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_in_a_browser(page: Path, tab: Browser, width: int, dark: bool) -> None:
    tab.errors.clear()
    tab.requests.clear()
    tab.open(page, width, dark=dark)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate("innerWidth") == width
    # Nothing but the boxes that scroll by themselves is wider than the page.
    wide = """[...document.querySelectorAll("main > *, section > *:not(.scroll), figure, svg.plot")]
        .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"""
    assert tab.evaluate(wide) == []
    # Every chart and picture has an extent, where it is not folded away.
    flat = """[...document.querySelectorAll("svg.plot, svg.picture")].filter(e => e.checkVisibility())
        .filter(e => e.getBoundingClientRect().width < 20).length"""
    assert tab.evaluate(flat) == 0
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(20, 22, 26)" if dark else "rgb(255, 255, 255)"
    )
    assert tab.errors == []
    assert [url for url in tab.requests if not url.startswith(("file:", "data:"))] == []


def test_page_answers(page: Path, tab: Browser) -> None:
    """The legend switches a row off and on; a link opens the notes; the pointer reads a value from a chart."""
    tab.errors.clear()
    tab.open(page, 1280)
    chip = """document.querySelector('[data-switch="fmnist-paper-map"]')"""
    hidden = """[...document.querySelectorAll('[data-row="fmnist-paper-map"]')].every(e => e.matches('.off'))"""
    assert tab.evaluate(hidden) is False
    tab.evaluate(f"{chip}.click()")
    assert tab.evaluate(hidden) is True
    assert tab.evaluate(f"{chip}.getAttribute('aria-pressed')") == "false"
    tab.evaluate(f"{chip}.click()")
    assert tab.evaluate(hidden) is False

    note = "document.getElementById('note-fmnist-paper-scalla-prior-1')"
    assert tab.evaluate(f"{note}.open") is False
    tab.evaluate("location.hash = 'note-fmnist-paper-scalla-prior-1'; new Promise(r => setTimeout(r, 100))")
    assert tab.evaluate(f"{note}.open && {note}.checkVisibility()") is True

    chart = "document.querySelector('.charts svg.plot .mark').closest('svg')"
    tab.evaluate(f"{chart}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    for _ in range(50):  # a busy browser may still be laying the page out
        box = tab.evaluate(
            f"(() => {{ const b = {chart}.querySelector('.s:not(.off) .mark').getBoundingClientRect();"
            " return [b.x + b.width / 2, b.y + b.height / 2] })()"
        )
        tab.move_to(*box)
        if not tab.evaluate("new Promise(r => setTimeout(r, 100, document.getElementById('tip').hidden))"):
            break
    assert tab.evaluate("document.getElementById('tip').hidden") is False
    assert re.match(r".+: µs / prediction [\d.,e-]+, NLL, FashionMNIST 0\.\d+", tab.evaluate(
        "document.getElementById('tip').textContent"
    ))  # fmt: skip
    assert tab.errors == []
