"""The README's picture: the top of the page that `scalla demo` wrote, as headless Chromium shows it.

scalla demo && python docs/scripts/demo_page.py demo_output/report.html
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

OUT = Path(__file__).resolve().parent.parent / "images" / "demo.png"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
#: what is photographed, and how wide the picture is in the end
WIDTH, HEIGHT, SHOWN_WIDTH = 1080, 1420, 900
NUM_COLOURS = 200


def photograph(page: Path, out: Path) -> None:
    browser = next((found for name in NAMES if (found := shutil.which(name))), None)
    if browser is None:
        raise SystemExit(f"found no browser; wanted one of {', '.join(NAMES)}")
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        command = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={folder}/profile", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={shot}",
            page.resolve().as_uri(),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        with Image.open(shot) as image:
            small = image.convert("RGB").resize((SHOWN_WIDTH, HEIGHT * SHOWN_WIDTH // WIDTH), Image.Resampling.LANCZOS)
    out.parent.mkdir(exist_ok=True)
    small.quantize(NUM_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(out, optimize=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path, nargs="?", default=Path("demo_output/report.html"))
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    photograph(options.page, options.out)
    print(f"{options.out.name}: {options.out.stat().st_size / 1024:.0f} kB")
