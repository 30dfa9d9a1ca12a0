"""Plots by matplotlib that take a page's own text colour and leave its background as it is."""

from __future__ import annotations

import io
import itertools
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from stream2llm_sdk.display.markup import block, note
from stream2llm_sdk.display.theme import INK, LINES
from stream2llm_sdk.traces.extras import require_matplotlib

__all__ = ["PLOT_INK", "Plot", "new_plot", "plot_lines", "plot_style", "themed"]

PLOT_INK = "#010203"
"""Stands for the page's text colour in a figure; `themed` puts that in its place."""

_SETTINGS = {
    "axes.axisbelow": True,
    "axes.edgecolor": PLOT_INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": PLOT_INK,
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": PLOT_INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "figure.facecolor": "none",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.alpha": 0.15,
    "grid.color": PLOT_INK,
    "grid.linewidth": 0.6,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.labelcolor": PLOT_INK,
    "lines.linewidth": 1.6,
    "patch.edgecolor": PLOT_INK,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "text.color": PLOT_INK,
    "xtick.color": PLOT_INK,
    "ytick.color": PLOT_INK,
}
_DASHES = ("-", "--", ":", "-.")
_HEAD = re.compile(r"<svg[^>]*?(viewBox=\"[^\"]*\")[^>]*>", re.DOTALL)
_METADATA = re.compile(r"\s*<metadata>.*?</metadata>", re.DOTALL)
_POINT_PX = 96 / 72


@dataclass(frozen=True, slots=True, repr=False)
class Plot:
    """A plot that shows itself in a notebook.

    Attributes:
        title: what it shows.
        svg: the drawing, in the page's text colour.
        caption: how it is read.
    """

    title: str
    svg: Markup
    caption: str = ""

    def __repr__(self) -> str:
        return f"<Plot {self.title!r}>"

    def _repr_html_(self) -> str:
        return str(block(self.svg, note(self.caption) if self.caption else "", title=self.title))

    def save(self, path: str | Path) -> None:
        """Writes an SVG file, black where the page's text colour would be."""
        text = str(self.svg).replace("style='", "style='color:black;", 1)
        Path(path).write_text(text, encoding="utf-8")


@contextmanager
def plot_style() -> Iterator[None]:
    """Figures made inside look the same whatever the user's own settings of matplotlib are; these come back after.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    matplotlib = require_matplotlib()
    with matplotlib.style.context(["default", _SETTINGS]), warnings.catch_warnings():
        # The browser has the glyphs that matplotlib's font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def new_plot(height_in: float, width_in: float = 8.0) -> Any:
    """An empty figure, to be used inside `plot_style`. It belongs to its caller alone: nothing of pyplot is touched."""
    return require_matplotlib().figure.Figure(figsize=(width_in, height_in), layout="constrained")


def plot_lines(number: int) -> list[dict[str, Any]]:
    """Colour and dashes of so many lines."""
    colours = [PLOT_INK if colour == INK else colour for colour in LINES]
    styles = itertools.islice(itertools.product(_DASHES, colours), number)
    return [{"color": colour, "linestyle": dashes} for dashes, colour in styles]


def themed(figure: Any, title: str, caption: str = "") -> Plot:
    """The figure as a plot that follows the theme; called inside `plot_style`."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = _METADATA.sub("", buffer.getvalue()).replace(PLOT_INK, INK)
    width_px = figure.get_figwidth() * 72 * _POINT_PX
    head = Markup(
        "<svg xmlns='http://www.w3.org/2000/svg' xmlns:xlink='http://www.w3.org/1999/xlink' role='img' "
        "aria-label='{}' width='{:g}' style='display:block;max-width:100%;height:auto;color:inherit' "
    ).format(title, width_px)
    found = _HEAD.search(text)
    assert found is not None, "matplotlib writes an <svg> element with a viewBox"
    return Plot(title, head + Markup(f"{found.group(1)}>{text[found.end() :]}"), caption)
