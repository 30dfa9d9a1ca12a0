"""Inline SVG in a page's own text colour."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from markupsafe import Markup, escape

from stream2llm_sdk.display.theme import INK, Fill

__all__ = ["Svg", "ticks", "time_axis"]

_FONT_SIZE = 12.0


class Svg:
    """A drawing in pixels, from the upper left corner; in a narrow page it shrinks.

    Args:
        width: of the drawing.
        height: of the drawing.
        label: what it shows, for who cannot see it.
    """

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width, self.height = width, height
        self._label = label
        self._parts: list[Markup] = []

    def rect(self, x: float, y: float, width: float, height: float, fill: Fill, tip: object = "") -> None:
        """A filled rectangle. `tip` is seen when the pointer rests on it."""
        self._add(
            "rect",
            tip,
            f"x='{x:.2f}' y='{y:.2f}' width='{max(0.0, width):.2f}' height='{height:.2f}' fill='{fill.colour}'"
            f" fill-opacity='{fill.opacity:g}'",
        )

    def frame(self, x: float, y: float, width: float, height: float, fill: Fill, *, dashes: str = "") -> None:
        """The outline of a rectangle."""
        dashed = f" stroke-dasharray='{dashes}'" if dashes else ""
        self._add(
            "rect",
            "",
            f"x='{x:.2f}' y='{y:.2f}' width='{max(0.0, width):.2f}' height='{height:.2f}' fill='none'"
            f" stroke='{fill.colour}' stroke-opacity='{fill.opacity:g}'{dashed}",
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, fill: Fill, *, width: float = 1.0) -> None:
        """A line between two points."""
        self._add(
            "line",
            "",
            f"x1='{x1:.2f}' y1='{y1:.2f}' x2='{x2:.2f}' y2='{y2:.2f}' stroke='{fill.colour}'"
            f" stroke-opacity='{fill.opacity:g}' stroke-width='{width:g}'",
        )

    def shape(self, points: Iterable[tuple[float, float]], fill: Fill, tip: object = "") -> None:
        """A filled polygon."""
        corners = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        self._add("polygon", tip, f"points='{corners}' fill='{fill.colour}' fill-opacity='{fill.opacity:g}'")

    def dot(self, x: float, y: float, radius: float, fill: Fill, tip: object = "") -> None:
        """A filled circle around a point."""
        self._add(
            "circle",
            tip,
            f"cx='{x:.2f}' cy='{y:.2f}' r='{radius:g}' fill='{fill.colour}' fill-opacity='{fill.opacity:g}'",
        )

    def text(
        self,
        x: float,
        y: float,
        text: object,
        *,
        anchor: str = "start",
        opacity: float = 1.0,
        size: float = _FONT_SIZE,
        bold: bool = False,
    ) -> None:
        """A line of text on the base line `y`; `anchor` is 'start', 'middle' or 'end'."""
        weight = " font-weight='600'" if bold else ""
        shown = Markup("<text x='{:.2f}' y='{:.2f}' text-anchor='{}' font-size='{:g}' fill='{}' fill-opacity='{:g}'")
        self._parts.append(shown.format(x, y, anchor, size, INK, opacity) + Markup(f"{weight}>{escape(text)}</text>"))

    def markup(self) -> Markup:
        """The drawing, to be put into a page."""
        head = Markup(
            "<svg xmlns='http://www.w3.org/2000/svg' role='img' aria-label='{}' viewBox='0 0 {:g} {:g}' "
            "width='{:g}' style='display:block;max-width:100%;height:auto;font-family:inherit;color:inherit'>"
        ).format(self._label, self.width, self.height, self.width)
        return head + Markup("").join(self._parts) + Markup("</svg>")

    def _add(self, kind: str, tip: object, attributes: str) -> None:
        title = Markup("<title>{}</title>").format(tip) if tip else Markup("")
        self._parts.append(Markup(f"<{kind} {attributes}>") + title + Markup(f"</{kind}>"))


def ticks(end: float, most: int = 8) -> list[float]:
    """Round numbers from 0 to `end`, at most so many and one."""
    if not 0 < end < math.inf:
        return [0.0]
    raw = end / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    return [step * number for number in range(int(end / step * (1 + 1e-9)) + 1)]


def time_axis(svg: Svg, left: float, right: float, top: float, bottom: float, end_s: float) -> None:
    """A time axis from 0 to `end_s` seconds: faint lines from top to bottom, with their times below."""
    for moment_s, label in _labelled(ticks(end_s)):
        x = left + (right - left) * (moment_s / end_s if end_s else 0.0)
        svg.line(x, top, x, bottom, Fill(INK, 0.15))
        svg.text(x, bottom + 14, label, anchor="middle", opacity=0.72, size=11)


def _labelled(moments_s: list[float]) -> Iterator[tuple[float, str]]:
    unit, factor = ("s", 1.0) if moments_s[-1] >= 1 else ("ms", 1e3)
    for index, moment_s in enumerate(moments_s):
        number = f"{factor * moment_s:.4g}"
        yield moment_s, f"{number} {unit}" if index == len(moments_s) - 1 else number
