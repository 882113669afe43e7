"""Digits and patches as small pictures, with what the methods take them for."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

import torch
from jaxtyping import Float32
from torch import Tensor

from scalla.demo.row import Row
from scalla.report.gallery import png

#: in a gallery: a line of a wide screen
NUM_SHOWN = 8


def picture(image: Float32[Tensor, "1 side side"], description: str) -> str:
    """An image in grey, enlarged without smoothing."""
    pixels = (image[0] * 255).round().clamp(0, 255).to(torch.uint8)
    encoded = base64.b64encode(png(bytes(pixels.flatten().tolist()), pixels.shape[-1])).decode()
    text = escape(description)
    return f'<img src="data:image/png;base64,{encoded}" alt="{text}" title="{text}" width="56" height="56">'


def strip(name: str, images: Tensor, words: str) -> str:
    """A row of pictures with its name before it."""
    shown = "".join(picture(image, name) for image in images)
    return f'<div class="sample"><p><b>{escape(name)}</b><br><small>{escape(words)}</small></p><div>{shown}</div></div>'


def digit_gallery(row: Row, images: Tensor, indices: Tensor) -> str:
    """Digits with what they are and what they are read as."""
    cards = []
    for i in indices.tolist():
        label, read = int(row.labels[i]), int(row.digits.probs[i].argmax())
        sure = float(row.digits.max_prob[i])
        words = f"a {label}" if read == label else f"a {label}, read as {read}"
        css = "" if read == label else ' class="wrong"'
        card = picture(images[i], f"test digit {i}: {words}, {sure:.0%}")
        cards.append(f"<figure{css}>{card}<figcaption>{words}<br>{100 * sure:.0f}%</figcaption></figure>")
    return f'<div class="cards">{"".join(cards)}</div>'


def patch_gallery(rows: Sequence[Row], images: Tensor, indices: Tensor) -> str:
    """Patches with each method's answer, how sure it is of it, and a mark where its alarm goes off."""
    cards = []
    for i in indices.tolist():
        answers = "".join(_answer(row, i) for row in rows)
        words = "; ".join(f"{row.title}: {_read(row, i)}, {float(row.ood.max_prob[i]):.0%}" for row in rows)
        shown = picture(images[i], f"patch {i}: {words}")
        cards.append(f"<figure>{shown}<figcaption>{answers}</figcaption></figure>")
    return f'<div class="cards">{"".join(cards)}</div>'


def _answer(row: Row, index: int) -> str:
    sure = 100 * float(row.ood.max_prob[index])
    return (
        f'<span class="answer m-{row.name}{" flagged" * bool(row.flagged[index])}"><b>{_read(row, index)}</b>'
        f'<span><i style="width:{sure:.0f}%"></i></span>{sure:.0f}%<em></em></span>'
    )


def _read(row: Row, index: int) -> int:
    return int(row.ood.probs[index].argmax())


def extremes(scores: Tensor, *, largest: bool, num: int = NUM_SHOWN) -> Tensor:
    """The inputs with the largest or the smallest scores, the most extreme first."""
    return scores.argsort(descending=largest, stable=True)[:num]
