"""HTML tables: they scroll within a box of their own, and every cell has its row's and its column's header."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from scalla.report.columns import Column, Mark, marks
from scalla.report.results import ReportRow
from scalla.report.spread import Spread

KIND_TITLES = {
    "method": "Methods",
    "control": "Controls: what a score must beat before it says anything",
    "detector": "Post-hoc detectors on the same network",
}


@dataclass(frozen=True)
class Heading:
    """A column's head; columns of one group stand under a common one."""

    title: str
    group: str = ""
    help: str = ""


@dataclass(frozen=True)
class Line:
    """Row header and cells, as HTML; a line of one `spanning` cell says what happened instead."""

    header: str
    cells: Sequence[str] = ()
    spanning: str = ""
    css: str = ""


def table(caption: str, headings: Sequence[Heading], groups: Sequence[tuple[str, Sequence[Line]]]) -> str:
    """`groups` are (title or "", lines); `caption` is HTML."""
    body = "".join(_group(title, lines, len(headings)) for title, lines in groups)
    label = escape(_plain(caption))
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{label}"><table><caption>{caption}</caption>'
        f"<thead>{_head(headings)}</thead>{body}</table></div>"
    )


def results_table(caption: str, rows: Sequence[ReportRow], columns: Sequence[Column]) -> str:
    """Mean ± standard deviation of every row, the best of each kind marked."""
    groups = []
    for kind, members in groupby(rows, key=lambda row: row.kind):
        of_kind = [*members]
        marked = [marks(of_kind, c) for c in columns]
        lines = [_result_line(row, columns, [m.get(row.slug, "") for m in marked]) for row in of_kind]
        groups.append((KIND_TITLES.get(kind, kind), lines))
    headings = [Heading(c.title, c.group, c.help) for c in columns]
    return table(caption, headings, groups if len(groups) > 1 else [("", groups[0][1])])


def value_cell(found: Spread | None, column: Column, mark: Mark = "", published: float | None = None) -> str:
    """A <td> of its own."""
    if found is None:
        text = '<td class="none">–'
    else:
        css = f' class="{mark}"' if mark else ""
        hidden = {"best": '<span class="sr"> best</span>', "near": '<span class="sr"> within one std of best</span>'}
        std = f" <small>±\u2009{column.text(found.std)}</small>" if found.std is not None else ""
        text = f'<td{css}><span class="num">{column.text(found.mean)}</span>{std}{hidden.get(mark, "")}'
    if published is not None:
        text += f'<span class="pub"><span class="sr">published </span>{column.published_text(published)}</span>'
    return text + "</td>"


def row_header(row: ReportRow) -> str:
    """The row's name, which leads to its settings and notes, and how many seeds it stands on."""
    link = f'<a href="#note-{row.slug}">{escape(row.label)}</a>'
    if not row.records:
        return link
    count = len(row.records)
    parts = [f"{count} seed{'s' * (count != 1)}"]
    parts += [f'<span class="bad">{len(row.failures)} failed</span>'] * bool(row.failures)
    parts += [f'<span class="bad">{len(row.missing)} missing</span>'] * bool(row.missing)
    return f'{link} <small class="seeds">{", ".join(parts)}</small>'


def what_happened(row: ReportRow) -> str:
    """For a row without a number: its error, or that it was not run."""
    if not row.failures:
        return '<span class="missing">missing: not run</span>'
    error = next(iter(row.failures.values())).get("error", {})
    message = escape(f"{error.get('type', 'error')}: {error.get('message', '')}"[:300])
    return f'<span class="bad">failed</span> <code>{message}</code>'


def _result_line(row: ReportRow, columns: Sequence[Column], marked: Sequence[Mark]) -> Line:
    css = "ours" if row.method.startswith("scalla") else ""
    if not row.records:
        return Line(row_header(row), spanning=what_happened(row), css=css)
    cells = [value_cell(c.spread(row), c, m, c.published_for(row)) for c, m in zip(columns, marked, strict=True)]
    return Line(row_header(row), cells, css=css)


def _head(headings: Sequence[Heading]) -> str:
    def cell(h: Heading) -> str:
        hint = f' title="{escape(h.help)}"' if h.help else ""
        return f'<th scope="col"{hint}>{escape(h.title)}</th>'

    if not any(h.group for h in headings):
        return f'<tr><th scope="col">Row</th>{"".join(map(cell, headings))}</tr>'
    spans = [(group, len([*members])) for group, members in groupby(headings, key=lambda h: h.group)]
    over = "".join(f'<th scope="colgroup" colspan="{n}">{escape(group)}</th>' for group, n in spans)
    return f'<tr><th scope="col" rowspan="2">Row</th>{over}</tr><tr>{"".join(map(cell, headings))}</tr>'


def _group(title: str, lines: Sequence[Line], num_columns: int) -> str:
    head = f'<tr class="kind"><th scope="rowgroup" colspan="{num_columns + 1}"><span>{escape(title)}</span></th></tr>'
    return f"<tbody>{head if title else ''}{''.join(_line(line, num_columns) for line in lines)}</tbody>"


def _line(line: Line, num_columns: int) -> str:
    css = f' class="{line.css}"' if line.css else ""
    cells = f'<td colspan="{num_columns}" class="span">{line.spanning}</td>' if line.spanning else "".join(line.cells)
    return f'<tr{css}><th scope="row">{line.header}</th>{cells}</tr>'


def _plain(html: str) -> str:
    """Without tags, for a label."""
    inside = False
    kept = []
    for character in html:
        inside = character == "<" or (inside and character != ">")
        if not inside and character != ">":
            kept.append(character)
    return "".join(kept)
