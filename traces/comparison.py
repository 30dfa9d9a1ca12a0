"""Runs of the same load beside each other: with other policies, other memory, or with and without streaming."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.simulator.load_result import SimulationResult
from stream2llm_sdk.traces.replay_run import ReplayRun

if TYPE_CHECKING:
    from stream2llm_sdk.display.plots import Plot

__all__ = ["Comparison"]

_PERCENTS = (50, 95, 99)
_TTFTS = ("ttft_from_context_complete", "ttft_from_request")
_TOTALS = ("num_recompute_preemptions", "num_swap_preemptions", "num_tokens_computed", "num_tokens_recomputed")


@dataclass(frozen=True, repr=False)
class Comparison:
    """Runs beside each other, as a table and as a plot.

    Attributes:
        runs: replays, or results of the simulator, by the names that they are to have. Of replays only the requests
            that were answered count.

    Raises:
        ConfigurationError: there is no run, or not a single request of one was answered.
    """

    runs: Mapping[str, ReplayRun | SimulationResult]

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigurationError("there is no run to compare: give one or more by name")
        for name, run in self.runs.items():
            if not (run.succeeded if isinstance(run, ReplayRun) else run.requests):
                raise ConfigurationError(f"no request of the run {name!r} was answered: leave it out")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(self.runs)}>"

    def values(self, name: str, metric: str) -> npt.NDArray[np.float64]:
        """A metric of a run's requests, in the order in which the run has them; unknown ones are left out.

        Args:
            name: the run's.
            metric: an attribute of a request, such as `ttft_from_request_s`.
        """
        run = self.runs[name]
        if isinstance(run, SimulationResult):
            return run.values(metric)
        known = [value for request in run.succeeded if (value := getattr(request, metric)) is not None]
        return np.array(known, dtype=np.float64)

    def rows(self) -> list[dict[str, Any]]:
        """A dictionary for each run: `name`, `num_requests`, both TTFTs at P50, P95 and P99 in seconds, preemptions by
        kind, tokens computed and recomputed, and `completion_time_s`, from the first arrival to the last token."""
        return [self._row(name) for name in self.runs]

    def _row(self, name: str) -> dict[str, Any]:
        arrivals, ends = self.values(name, "arrival_s"), self.values(name, "finished_s")
        row: dict[str, Any] = {"name": name, "num_requests": len(arrivals)}
        for metric in _TTFTS:
            values = self.values(name, f"{metric}_s")
            row |= {f"{metric}_p{percent}_s": float(np.percentile(values, percent)) for percent in _PERCENTS}
        row |= {metric: int(self.values(name, metric).sum()) for metric in _TOTALS}
        return row | {"completion_time_s": float(ends.max() - arrivals.min())}

    def plot(self) -> Plot:
        """Both TTFTs as the share of requests that took longer, and preemptions where there were any.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        from stream2llm_sdk.display.run_plots import comparison_plot

        return comparison_plot(self)

    def _repr_html_(self) -> str:
        from stream2llm_sdk.display.run_view import comparison_html

        return comparison_html(self)
