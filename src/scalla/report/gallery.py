"""The least and the most uncertain inputs of each set, as small PNG, each image once in the page."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from scalla.report.columns import MAIN_SETS, OTHER_SETS
from scalla.report.curves import SCORE_NAMES
from scalla.report.results import ReportRow

SIDE = 28
CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")


@dataclass(frozen=True)
class Pictures:
    """The images of the page, by content."""

    ids: dict[str, str] = field(default_factory=dict)

    def use(self, encoded: str, description: str) -> str:
        """A place where the image is shown; the same image again costs a line."""
        name = self.ids.setdefault(encoded, f"p{len(self.ids)}")
        text = escape(description)
        return f'<svg class="picture" role="img" aria-label="{text}"><title>{text}</title><use href="#{name}"/></svg>'

    def symbols(self) -> str:
        """The images themselves; to stand once in the page."""
        return '<svg class="symbols" aria-hidden="true">{}</svg>'.format(
            "".join(
                f'<symbol id="{name}" viewBox="0 0 {SIDE} {SIDE}"><image width="{SIDE}" height="{SIDE}" '
                f'href="data:image/png;base64,{base64.b64encode(png(decode_image(encoded))).decode()}"/></symbol>'
                for encoded, name in self.ids.items()
            )
        )


def decode_image(encoded: str) -> bytes:
    """The 28×28 grey bytes that `measure.encode_image` packed."""
    return zlib.decompress(base64.b64decode(encoded))


def png(pixels: bytes, side: int = SIDE) -> bytes:
    """A grey PNG of 8 bits: signature, header, rows each after a zero (no filter), end."""
    rows = b"".join(b"\0" + pixels[i : i + side] for i in range(0, side * side, side))
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows, 9)) + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def galleries(rows: Sequence[ReportRow], pictures: Pictures) -> str:
    """One for each method, folded but for the first of ours; detectors show theirs by numbers alone."""
    shown = [row for row in rows if row.kind == "method" and row.first is not None and "gallery" in row.first]
    opened = next((row.slug for row in shown if row.method == "scalla_biased"), shown[0].slug if shown else "")
    return "".join(_gallery(row, pictures, row.slug == opened) for row in shown)


def _gallery(row: ReportRow, pictures: Pictures, opened: bool) -> str:
    assert row.first is not None
    gallery = row.first["gallery"]
    known = [name for name in ("FashionMNIST", *MAIN_SETS, *OTHER_SETS) if name in gallery["sets"]]
    names = [*known, *(name for name in gallery["sets"] if name not in known)]
    sets = "".join(_set(name, gallery["sets"][name], pictures) for name in names)
    return (
        f'<details class="gallery"{" open" * opened}><summary>{escape(row.label)}, by {SCORE_NAMES[gallery["score"]]}'
        f'</summary><div class="sets">{sets}</div></details>'
    )


def _set(name: str, ends: Mapping[str, Sequence[Mapping[str, Any]]], pictures: Pictures) -> str:
    strips = ""
    for end in ("least", "most"):
        shown = "".join(pictures.use(item["image"], _describe(name, item)) for item in ends[end])
        strips += f'<div class="strip"><span>{end}</span>{shown}</div>'
    return f"<section><h4>{escape(name)}</h4>{strips}</section>"


def _describe(name: str, item: Mapping[str, Any]) -> str:
    text = (
        f"{name} {item['index']}, score {item['score']:.3g}" if item["score"] is not None else f"{name} {item['index']}"
    )
    if item.get("label") is not None:
        text += f", label {CLASSES[item['label']]}"
    if item.get("predicted") is not None:
        text += f", predicted {CLASSES[item['predicted']]}"
    return text
