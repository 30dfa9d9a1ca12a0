"""Costs as curves over tokens, and the decisions that follow from them as a map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stream2llm_sdk.display.cost_view import lengths_told, model_name
from stream2llm_sdk.display.plots import PLOT_INK, Plot, new_plot, plot_style, themed
from stream2llm_sdk.display.theme import BLUE, GREEN, OCHRE, PHASES
from stream2llm_sdk.serving.cost_curve import Sample
from stream2llm_sdk.serving.preemption import PreemptionMode, VictimFacts, decide
from stream2llm_sdk.traces.report.phases import Phase
from stream2llm_sdk.traces.report.style import log_axis

if TYPE_CHECKING:
    from stream2llm_sdk.serving.cost_model import CostModel

__all__ = ["cost_plot", "decision_plot"]

_RECOMPUTE, _SWAP = PHASES[Phase.DROPPED].colour, PHASES[Phase.SWAPPED].colour
_COLUMNS, _ROWS = 96, 48
# What is more times cheaper is not drawn more boldly.
_BOLDEST_RATIO = 8.0


def cost_plot(model: CostModel, most: int, samples: Mapping[str, Sequence[Sample]] | None = None) -> Plot:
    """The curves up to `most` tokens, with the measurements that they were fitted to."""
    # What is shorter than all that was measured is extrapolated, down to nothing on a logarithmic scale.
    first = min(most // 2, *(curve.num_tokens[0] for curve in (model.recompute, model.swap_out, model.swap_in)))
    lengths = np.unique(np.geomspace(first, most, 200).astype(int))
    curves = (
        ("recompute", [model.recompute_s(int(n)) for n in lengths], _RECOMPUTE, "-"),
        ("swap, out and in", [model.swap_out_s(int(n)) + model.swap_in_s(int(n)) for n in lengths], _SWAP, "-"),
        ("swap out", [model.swap_out_s(int(n)) for n in lengths], BLUE, "--"),
        ("swap in", [model.swap_in_s(int(n)) for n in lengths], GREEN, ":"),
    )
    with plot_style():
        figure = new_plot(3.4)
        plot = figure.subplots()
        for label, values, colour, dashes in curves:
            plot.plot(lengths, values, dashes, color=colour, label=label)
        points = _draw_samples(plot, samples or {})
        for begin, last in model.swap_pays(most):
            plot.axvspan(begin, last, color=_SWAP, alpha=0.12, linewidth=0)
        shown = [value for _, values, *_ in curves for value in values if value > 0]
        low, high = min([*shown, *points]), max([*shown, *points])
        log_axis(plot, "x", first, most)
        log_axis(plot, "y", low / 1.5, high * 1.5)
        plot.set(xlabel="tokens whose KV is taken away", ylabel="seconds")
        plot.legend(loc="upper left")
        dots = " Dots are single measurements." if points else ""
        caption = (
            f"What it costs to take a request's KV away and to have it again, for {model_name(model)} on "
            f"{model.hardware}. Swap is cheaper where the ground is tinted: {lengths_told(model, most)}.{dots}"
        )
        return themed(figure, "Recompute against swap", caption)


def _draw_samples(plot: Any, samples: Mapping[str, Sequence[Sample]]) -> list[float]:
    """Dots for what was measured; returns their seconds."""
    colours = {"recompute": _RECOMPUTE, "swap_out": BLUE, "swap_in": GREEN}
    drawn: list[float] = []
    for name, measured in samples.items():
        found = [(sample.num_tokens, sample.seconds) for sample in measured if sample.seconds > 0]
        if found:
            plot.scatter(*zip(*found, strict=True), s=9, color=colours.get(name, OCHRE), alpha=0.6, linewidths=0)
            drawn += [seconds for _, seconds in found]
    return drawn


def decision_plot(model: CostModel, most: int, cached_shares: Sequence[float]) -> Plot:
    """A map for each share of the victim that the prefix cache will give back."""
    lengths = np.geomspace(16, most, _COLUMNS + 1)
    lost = np.linspace(0, 1, _ROWS + 1)
    with plot_style():
        figure = new_plot(3.1, min(9.5, 1.2 + 2.6 * len(cached_shares)))
        plots = figure.subplots(1, len(cached_shares), sharey=True, squeeze=False)[0]
        for plot, share in zip(plots, cached_shares, strict=True):
            gains = _gains(model, lengths, lost, share)
            plot.pcolormesh(lengths, lost, _colours(gains), rasterized=True, linewidth=0)
            if gains.min() < 0 < gains.max():
                middles = np.sqrt(lengths[1:] * lengths[:-1]), (lost[1:] + lost[:-1]) / 2
                plot.contour(*middles, gains, levels=[0.0], colors=PLOT_INK, linewidths=0.9)
            log_axis(plot, "x", 16, most)
            plot.set(title=f"{share:.0%} in the prefix cache", xlabel="computed tokens of the victim", ylim=(0, 1))
            plot.grid(False)
        plots[0].set_ylabel("share made void before\nit resumes")
        _legend(figure)
        caption = (
            "What the scheduler decides for a victim, by its computed tokens, the share of them that updates may well "
            "make void before it is served again, and the share that the prefix cache will still have. The bolder, "
            f"the more that choice saves: both cost the same at the line, full colour at {_BOLDEST_RATIO:g} times."
        )
        return themed(figure, "Recompute or swap?", caption)


def _gains(model: CostModel, lengths: Any, lost: Any, cached_share: float) -> Any:
    """What swapping saves in each cell, `(rows, columns)`: the logarithm of recompute over swap, of `decide`."""
    cells = np.empty((_ROWS, _COLUMNS))
    for column in range(_COLUMNS):
        num_tokens = int((lengths[column] * lengths[column + 1]) ** 0.5)
        for row in range(_ROWS):
            facts = VictimFacts(
                num_tokens,
                num_tokens_cached_again=int(cached_share * num_tokens),
                survival=1.0 - float(lost[row] + lost[row + 1]) / 2,
            )
            found = decide(model, facts, PreemptionMode.COST, fits_host_pool=True)
            cells[row, column] = np.log(max(found.recompute_s, 1e-9) / max(found.swap_s, 1e-9))
    return cells


def _colours(gains: Any) -> Any:
    """Colour and opacity of each cell, `(rows, columns, 4)`."""
    from matplotlib.colors import to_rgb

    boldness = np.minimum(1.0, np.abs(gains) / np.log(_BOLDEST_RATIO))
    colours = np.where(gains[..., None] > 0, to_rgb(_SWAP), to_rgb(_RECOMPUTE))
    return np.concatenate([colours, 0.1 + 0.83 * boldness[..., None]], axis=2)


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=_RECOMPUTE, edgecolor="none", label="recompute: drop its KV"),
        Patch(facecolor=_SWAP, edgecolor="none", label="swap: move its KV to the host"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=2)
