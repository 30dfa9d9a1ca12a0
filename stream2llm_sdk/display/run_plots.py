"""Runs as plots: both TTFTs, preemptions, and the timeline of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.display.plots import PLOT_INK, Plot, new_plot, plot_lines, plot_style, themed
from stream2llm_sdk.display.theme import PHASES
from stream2llm_sdk.traces.report.phases import Phase
from stream2llm_sdk.traces.report.style import log_axis, plain

if TYPE_CHECKING:
    from stream2llm_sdk.traces.comparison import Comparison

__all__ = ["comparison_plot", "draw_tail"]

_SHORTEST_S = 1e-4
_METRICS = (
    ("ttft_from_context_complete_s", "From the complete context"),
    ("ttft_from_request_s", "From the question"),
)
_KINDS = (
    ("num_recompute_preemptions", "KV dropped", Phase.DROPPED),
    ("num_swap_preemptions", "KV to the host", Phase.SWAPPED),
)
_CAPTION = (
    "Time to first token: the share of requests that took longer, from the moment in which the context was complete "
    "(the published definition) and from the question (what a person waits). Both scales are logarithmic: what is "
    "further right below is the tail."
)
_Values = Mapping[str, npt.NDArray[np.float64]]


def comparison_plot(comparison: Comparison) -> Plot:
    """Both TTFTs of all runs, and their preemptions where there were any."""
    names = list(comparison.runs)
    counts = {metric: [comparison.values(name, metric).sum() for name in names] for metric, *_ in _KINDS}
    is_preempted = len(names) > 1 and any(map(any, counts.values()))
    with plot_style():
        figure = new_plot(3.5 if len(names) > 1 else 3.0, 9.5 if is_preempted else 8.0)
        plots = figure.subplots(1, 3 if is_preempted else 2, width_ratios=(3, 3, 2) if is_preempted else (1, 1))
        for plot, (metric, title) in zip(plots, _METRICS, strict=False):
            draw_tail(plot, {name: comparison.values(name, metric) for name in names}, title)
        if is_preempted:
            _draw_counts(plots[2], names, counts)
        if len(names) > 1:
            _legend_below(figure, plots[0], len(names))
        caption = f"{_CAPTION} Preemptions are of all requests together." if is_preempted else _CAPTION
        return themed(figure, "Time to first token", caption)


def draw_tail(plot: Any, values: _Values, title: str) -> None:
    """Draws into axes the share of values (seconds) that are larger, a line for each name."""
    sorted_values = {name: np.sort(np.maximum(each, _SHORTEST_S)) for name, each in values.items()}
    low = min(each[0] for each in sorted_values.values()) / 1.2
    high = max(each[-1] for each in sorted_values.values()) * 1.2
    for (name, each), style in zip(sorted_values.items(), plot_lines(len(values)), strict=True):
        shares = np.arange(len(each), 0, -1) / len(each)
        # The last step down leads out of the plot: zero is nowhere on a logarithmic scale.
        plot.step([low, *each, each[-1]], [1.0, *shares, 1e-12], where="pre", label=plain(name), **style)
    log_axis(plot, "x", low, high)
    least = 0.7 / max(map(len, values.values()))
    log_axis(plot, "y", least, 1.1)
    plot.set(title=title, xlabel="TTFT (s)", ylabel="share that took longer")
    for percent in (percent for percent in (50, 95, 99) if 1 - percent / 100 > least):
        share = 1 - percent / 100
        plot.axhline(share, color=PLOT_INK, alpha=0.4, linewidth=0.6, linestyle=":")
        plot.text(0.01, share, f"P{percent}", transform=plot.get_yaxis_transform(), va="bottom", fontsize=7)


def _draw_counts(plot: Any, names: Sequence[str], counts: Mapping[str, Sequence[float]]) -> None:
    """Preemptions of each run, by kind, one beside the other."""
    from matplotlib.ticker import MaxNLocator

    places = np.arange(len(names))
    left = np.zeros(len(names))
    for metric, label, phase in _KINDS:
        if any(counts[metric]):
            plot.barh(places, counts[metric], 0.65, left=left, color=PHASES[phase].colour, label=label, linewidth=0)
            left += counts[metric]
    for place, number in zip(places, left, strict=True):
        plot.text(number, place, f" {int(number):,}", va="center", fontsize=7)
    plot.set_yticks(places, [plain(name) for name in names], fontsize=7)
    plot.invert_yaxis()
    plot.grid(axis="y", visible=False)
    plot.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    plot.set(title="Preemptions", xlim=(0, max(left) * 1.18))
    if all(any(counts[metric]) for metric, *_ in _KINDS):
        plot.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, fontsize=7, handlelength=1)


def _legend_below(figure: Any, plot: Any, number: int) -> None:
    handles, labels = plot.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=min(5, number))
