"""How figures look: colours that a colour-blind reader can tell apart, one font, one width.

The colours are those of Okabe and Ito, "Color Universal Design" (2008). The font comes with matplotlib.
"""

from __future__ import annotations

import io
import itertools
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stream2llm_sdk.traces.extras import require_matplotlib
from stream2llm_sdk.traces.report.phases import Phase

__all__ = [
    "PHASE_COLOURS",
    "blank",
    "line_styles",
    "log_axis",
    "new_figure",
    "own_style",
    "panels",
    "plain",
    "png",
]

_BLACK, _ORANGE, _SKY, _GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
_YELLOW, _BLUE, _VERMILION, _PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
_LINES = (_BLUE, _VERMILION, _GREEN, _PURPLE, _SKY, _ORANGE, _BLACK)
_DASHES = ("-", "--", ":", "-.")

PHASE_COLOURS = {
    Phase.RUNNING: _BLUE,
    Phase.QUEUED: _ORANGE,
    Phase.AWAITING_TURN: _YELLOW,
    Phase.DROPPED: _VERMILION,
    Phase.SWAPPED: _PURPLE,
    Phase.AWAITING_CHUNK: "#A9D8F3",
    Phase.RETRIEVING: "#E4E4E4",
    Phase.UNKNOWN: "#8C8C8C",
}
"""In the order in which they are stacked and listed."""

_WIDTH_IN = 10.0
_DOTS_PER_INCH = 150
_LONGEST_TEXT = 40
_SETTINGS = {
    "agg.path.chunksize": 10_000,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.labelsize": 9,
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.color": "#E0E0E0",
    "grid.linewidth": 0.6,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "savefig.facecolor": "white",
}


@contextmanager
def own_style() -> Iterator[None]:
    """Figures made inside look the same whatever the user's own settings of matplotlib are; these come back after."""
    matplotlib = require_matplotlib()
    with matplotlib.style.context(["default", _SETTINGS]), warnings.catch_warnings():
        # Names in scripts that the font lacks are drawn as boxes; the page has them as text.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def new_figure(height_in: float) -> Any:
    """An empty figure of the common width. It belongs to its caller alone: nothing of pyplot is touched."""
    return require_matplotlib().figure.Figure(figsize=(_WIDTH_IN, height_in), dpi=_DOTS_PER_INCH, layout="constrained")


def panels(number: int, height_in: float, **shared: Any) -> tuple[Any, list[Any]]:
    """A figure with so many plots, two in a row where there are several."""
    num_columns = min(2, number)
    num_rows = -(-number // num_columns)
    figure = new_figure(height_in * num_rows)
    axes = list(figure.subplots(num_rows, num_columns, squeeze=False, **shared).flat)
    for unused in axes[number:]:
        unused.remove()
    for plot in axes[:number]:
        plot.tick_params(labelbottom=True, labelleft=True)
    return figure, axes[:number]


def png(figure: Any) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def plain(text: str) -> str:
    """Text as it is to be drawn: in one line, not too long, and without a meaning to matplotlib."""
    line = "".join(character if character.isprintable() else " " for character in text)
    if len(line) > _LONGEST_TEXT:
        line = f"{line[: _LONGEST_TEXT - 1]}…"
    return (f" {line}" if line.startswith("_") else line).replace("$", r"\$")


def line_styles(number: int) -> list[dict[str, Any]]:
    """Colour and dashes of so many lines."""
    styles = itertools.cycle(itertools.product(_DASHES, _LINES))
    return [{"color": colour, "linestyle": dashes} for dashes, colour in itertools.islice(styles, number)]


def log_axis(plot: Any, which: str, low: float, high: float) -> None:
    """Makes an axis logarithmic, with numbers that are read without powers: 0.05, 1, 20.

    Args:
        plot: whose axis it is.
        which: 'x' or 'y'.
        low: its lower end, above 0.
        high: its upper end.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    plot.set(**{f"{which}scale": "log", f"{which}lim": (low, high)})
    axis = {"x": plot.xaxis, "y": plot.yaxis}[which]
    decades = math.log10(high / low)
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2 else (1,), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def blank(plot: Any, reason: str) -> None:
    """Says in a plot why it is empty."""
    # Not by taking its ticks away: other plots may share them.
    plot.tick_params(which="both", bottom=False, left=False, labelbottom=False, labelleft=False)
    plot.grid(False)
    plot.text(0.5, 0.5, reason, transform=plot.transAxes, ha="center", va="center", color="#555555", wrap=True)
