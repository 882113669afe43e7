"""Charts as small SVG: axes, lines, points, bars. The script reads the numbers under the pointer from the same SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 360, 250
LEFT, RIGHT, TOP, BOTTOM = 54, 10, 8, 36


@dataclass(frozen=True)
class Axis:
    """A range of values, linear or logarithmic; `ticks` are chosen if not given."""

    label: str
    low: float
    high: float
    log: bool = False
    ticks: tuple[float, ...] = ()

    @staticmethod
    def around(label: str, values: Sequence[float], *, log: bool = False, least: float | None = None) -> Axis:
        """An axis that holds all finite values, with a little room."""
        finite = [v for v in values if math.isfinite(v) and (v > 0 or not log)] or [1.0]
        low, high = min(finite), max(finite)
        if log:
            room = (high / low) ** 0.06 if high > low else 2.0
            return Axis(label, low / room, high * room, log=True)
        room = 0.06 * (high - low) or 0.5 * abs(high) or 0.5
        return Axis(label, low - room if least is None else least, high + room)

    def share(self, value: float) -> float:
        """Where a value stands, between 0 and 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def shown_ticks(self) -> tuple[float, ...]:
        return self.ticks or (log_ticks if self.log else linear_ticks)(self.low, self.high)


@dataclass(frozen=True)
class Frame:
    """The chart's box and its two axes."""

    x: Axis
    y: Axis
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    bottom: int = BOTTOM
    #: class of the <svg>, beside "plot"
    css: str = ""

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Values → pixels; what lies outside is moved to the edge."""
        across = min(max(self.x.share(x), 0.0), 1.0)
        up = min(max(self.y.share(y), 0.0), 1.0)
        return (
            self.left + across * (self.width - self.left - RIGHT),
            self.height - self.bottom - up * (self.height - TOP - self.bottom),
        )

    def points(self, xs: Sequence[float], ys: Sequence[float]) -> str:
        """The `points` of a polyline."""
        return " ".join(f"{px:.1f},{py:.1f}" for px, py in (self.at(x, y) for x, y in zip(xs, ys, strict=True)))

    def line(self, name: str, xs: Sequence[float], ys: Sequence[float], css: str = "") -> str:
        """A line whose points are read by name under the pointer."""
        return f'<polyline class="line {css}" data-n="{escape(name)}" points="{self.points(xs, ys)}"/>'

    def dots(self, xs: Sequence[float], ys: Sequence[float]) -> str:
        at = (self.at(x, y) for x, y in zip(xs, ys, strict=True))
        return "".join(f'<circle class="dot" cx="{px:.1f}" cy="{py:.1f}" r="2"/>' for px, py in at)

    def rule(self, start: tuple[float, float], end: tuple[float, float], css: str = "guide") -> str:
        (x1, y1), (x2, y2) = self.at(*start), self.at(*end)
        return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'

    def area(self, xs: Sequence[float], low: Sequence[float], high: Sequence[float], css: str) -> str:
        edge = f"{self.points(xs, high)} {self.points([*xs][::-1], [*low][::-1])}"
        return f'<polygon class="{css}" points="{edge}"/>'

    def svg(self, description: str, content: str) -> str:
        """The chart, described in words for those who do not see it."""
        axes = [_describe(a) for a in (self.x, self.y)]
        x0, y0 = self.at(self.x.low, self.y.low)
        x1, y1 = self.at(self.x.high, self.y.high)
        box = f"{x0:.0f},{x1:.0f},{y0:.0f},{y1:.0f}"
        return (
            f'<svg class="plot {self.css}" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{escape(description)}" data-x="{axes[0]}" data-y="{axes[1]}" data-box="{box}">'
            f"{self._grid()}{content}</svg>"
        )

    def _grid(self) -> str:
        x0, y0 = self.at(self.x.low, self.y.low)
        x1, y1 = self.at(self.x.high, self.y.high)
        parts = []
        for tick in self.y.shown_ticks():
            y = self.at(self.x.low, tick)[1]
            parts.append(f'<line class="grid" x1="{x0:.1f}" x2="{x1:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{x0 - 4:.1f}" y="{y + 3:.1f}" text-anchor="end">{short(tick)}</text>')
        for tick in self.x.shown_ticks():
            x = self.at(tick, self.y.low)[0]
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{y0:.1f}" y2="{y1:.1f}"/>')
            parts.append(f'<text class="tick" x="{x:.1f}" y="{y0 + 12:.1f}" text-anchor="middle">{short(tick)}</text>')
        if self.x.label:
            middle = (x0 + x1) / 2
            parts.append(
                f'<text class="axis" x="{middle:.0f}" y="{self.height - 5}" text-anchor="middle">'
                f"{escape(self.x.label)}</text>"
            )
        if self.y.label:
            middle = (y0 + y1) / 2
            parts.append(
                f'<text class="axis" x="10" y="{middle:.0f}" text-anchor="middle" '
                f'transform="rotate(-90 10 {middle:.0f})">{escape(self.y.label)}</text>'
            )
        return "".join(parts)


def figure(caption: str, svg: str) -> str:
    """`caption` is HTML."""
    return f"<figure>{svg}<figcaption>{caption}</figcaption></figure>"


def linear_ticks(low: float, high: float, about: int = 5) -> tuple[float, ...]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(round(i * step, 12) for i in range(first, last + 1))


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Powers of ten; with 2 and 5 times them where there are few; with linear ones within less than a factor of two."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for steps in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0)):
        found = tuple(s * 10.0**p for p in range(first, last + 1) for s in steps if low <= s * 10.0**p <= high)
        if len(found) >= 3:
            every = -(-len(found) // 7)
            return found[::every]
    return linear_ticks(low, high, 4)


def short(value: float) -> str:
    """A tick's text."""
    if value == 0:
        return "0"
    power = math.floor(math.log10(abs(value)) + 1e-9)
    if -4 < power < 4:
        return f"{value:.6g}"
    lead = value / 10.0**power
    sign = "".join("⁰¹²³⁴⁵⁶⁷⁸⁹"[int(d)] if d != "-" else "⁻" for d in str(power))
    return f"10{sign}" if abs(lead - 1) < 1e-9 else f"{lead:.3g}·10{sign}"


def _describe(axis: Axis) -> str:
    return escape(f"{axis.low:.8g}|{axis.high:.8g}|{int(axis.log)}|{axis.label}")
