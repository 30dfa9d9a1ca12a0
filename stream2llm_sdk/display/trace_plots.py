"""Distributions over sets of traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stream2llm_sdk.display.plots import Plot, new_plot, plot_lines, plot_style, themed
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.traces.report.style import log_axis, plain
from stream2llm_sdk.traces.token_counts import TokenCounts

if TYPE_CHECKING:
    from stream2llm_sdk.tokenizer import Tokenizer
    from stream2llm_sdk.traces.trace import Trace

__all__ = ["plot_traces"]

# Where the largest value is so many times the smallest, the scale is logarithmic.
_WIDE = 50


def plot_traces(traces: Sequence[Trace], tokenizer: Tokenizer | None = None) -> Plot:
    """Tokens of the context, time of the retrieval and number of updates, as distribution functions by kind.

    Raises:
        ConfigurationError: there are no traces.
        MissingExtraError: matplotlib is not installed.
    """
    if not traces:
        raise ConfigurationError("there are no traces to draw")
    counts = TokenCounts(traces, tokenizer)
    kinds: dict[str, list[Trace]] = {}
    for trace in traces:
        kinds.setdefault(trace.tag or trace.mode.value, []).append(trace)

    def num_tokens(trace: Trace) -> float:
        return sum(map(counts.chunk, trace.final_chunks))

    panels: dict[str, Mapping[str, list[float]]] = {
        "tokens of the context": {name: [num_tokens(trace) for trace in kind] for name, kind in kinds.items()},
        "retrieval (s)": {name: [trace.duration_s for trace in kind] for name, kind in kinds.items()},
        "updates of a trace": {name: [float(len(trace.updates)) for trace in kind] for name, kind in kinds.items()},
    }
    caption = f"The share of traces that have at most so much. Tokens are {', '.join(sorted(counts.sources))}."
    with plot_style():
        figure = new_plot(2.8)
        plots = figure.subplots(1, len(panels), sharey=True)
        for plot, (label, values) in zip(plots, panels.items(), strict=True):
            _draw(plot, label, values)
        plots[0].set_ylabel("share of traces")
        if len(kinds) > 1:
            figure.legend(*plots[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        return themed(figure, f"{len(traces):,} traces", caption)


def _draw(plot: Any, label: str, values: Mapping[str, Sequence[float]]) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    every = np.concatenate([np.asarray(each, dtype=np.float64) for each in values.values()])
    low, high = float(every.min()), max(float(every.max()), 1e-9) * 1.03
    is_wide = low > 0 and high / low > _WIDE
    start = low / 1.2 if is_wide else 0.0
    for (name, each), style in zip(values.items(), plot_lines(len(values)), strict=True):
        shares = np.arange(len(each) + 1) / len(each)
        plot.step([start, *np.sort(each), high], [*shares, 1.0], where="post", label=plain(name), **style)
    plot.set(xlabel=label, ylim=(0, 1.02))
    if is_wide:
        log_axis(plot, "x", start, high)
    else:
        plot.set_xlim(0, high)
        plot.xaxis.set_major_locator(MaxNLocator(4, integer=high >= 4))
        plot.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
