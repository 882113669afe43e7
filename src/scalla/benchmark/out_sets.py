"""Further images that are no clothes, made here. No choice in this project looks at `glyphs`, `automata` and `noise`.

digits    scikit-learn's 8×8 digits, enlarged
photos    patches of one of scikit-learn's photographs
glyphs    letters in the fonts that come inside matplotlib
automata  space-time diagrams of elementary cellular automata
noise     independent uniform pixels

The first two may serve when a context is chosen (docs/context.md); they are test sets of how far that choice carries.
"""

from __future__ import annotations

import string

import torch
from jaxtyping import Float32
from torch import Tensor
from torch.nn import functional as F

from scalla.data import digits, photo_patches

SIDE = 28
#: each of them has this many images
NUM_IMAGES = 1000
FONTS = (
    "DejaVu Sans",
    "DejaVu Sans:bold",
    "DejaVu Serif",
    "DejaVu Serif:italic",
    "DejaVu Sans Mono",
    "STIXGeneral",
    "STIXGeneral:italic",
    "cmr10",
    "cmtt10",
    "cmb10",
)
#: rules whose patterns do not die out on a ring of 28
RULES = (30, 45, 54, 73, 105, 110, 150)


def more_out_sets(num: int = NUM_IMAGES, seed: int = 0) -> dict[str, Float32[Tensor, "num 1 28 28"]]:
    """Every further set by name, images in [0, 1]."""
    rng = torch.Generator().manual_seed(seed)
    return {
        "digits": enlarged_digits(num),
        "photos": photo_patches("ood", num, seed=seed, size=SIDE),
        "glyphs": glyphs(num, rng),
        "automata": automata(num, rng),
        "noise": torch.rand(num, 1, SIDE, SIDE, generator=rng),
    }


def enlarged_digits(num: int) -> Float32[Tensor, "num 1 28 28"]:
    images = torch.cat([part.images for part in (digits().test, digits().val, digits().train)])[:num]
    return F.interpolate(images, size=(SIDE, SIDE), mode="bilinear", align_corners=False).clamp(0, 1)


def glyphs(num: int, rng: torch.Generator) -> Float32[Tensor, "num 1 28 28"]:
    """Latin letters, of a random font and a size of 20 to 30 pixels, in the middle of the image."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = torch.empty(num, 1, SIDE, SIDE)
    letters = string.ascii_letters
    figure = Figure(figsize=(1, 1), dpi=SIDE)
    canvas = FigureCanvasAgg(figure)
    for i in range(num):
        letter = letters[int(torch.randint(len(letters), (), generator=rng))]
        family, _, style = FONTS[int(torch.randint(len(FONTS), (), generator=rng))].partition(":")
        pixels = 20 + 10 * float(torch.rand((), generator=rng))
        figure.clear()
        figure.text(
            0.5,
            0.5,
            letter,
            ha="center",
            va="center",
            fontfamily=family,
            fontsize=pixels * 72 / SIDE,
            fontweight="bold" if style == "bold" else "normal",
            fontstyle="italic" if style == "italic" else "normal",
        )
        canvas.draw()
        grey = torch.frombuffer(bytearray(canvas.buffer_rgba()), dtype=torch.uint8).view(SIDE, SIDE, 4)[..., 0]
        found[i, 0] = 1 - grey.float() / 255
    return found


def automata(num: int, rng: torch.Generator) -> Float32[Tensor, "num 1 28 28"]:
    """Each row follows from the one above it by one rule; the first is random, and the first 28 are not shown."""
    rules = torch.tensor(RULES)[torch.randint(len(RULES), (num,), generator=rng)]
    row = torch.randint(2, (num, SIDE), generator=rng)
    rows = []
    for step in range(2 * SIDE):
        neighbourhood = 4 * row.roll(1, 1) + 2 * row + row.roll(-1, 1)
        row = rules[:, None] >> neighbourhood & 1
        if step >= SIDE:
            rows.append(row)
    return torch.stack(rows, 1)[:, None].float()
