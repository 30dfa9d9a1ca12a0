"""What a replay came to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stream2llm_sdk.traces.pacing import allowed_lag_s
from stream2llm_sdk.traces.replayed_request import ReplayedRequest

if TYPE_CHECKING:
    from stream2llm_sdk.display.plots import Plot

__all__ = ["ReplayRun", "RunState"]

PERCENTS = (50, 95, 99)
_TOTALS = (
    "num_recompute_preemptions",
    "num_swap_preemptions",
    "num_tokens_computed",
    "num_tokens_recomputed",
    "num_tokens_invalidated",
    "num_tokens_cached",
    "num_tokens_loaded",
    "num_tokens_swapped",
)


class RunState(StrEnum):
    """How a run ended.

    COMPLETE: every request has been replayed.
    STOPPED: it was cancelled; what was under way was aborted.
    FAILED: an error ended it.
    """

    COMPLETE = "complete"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True)
class ReplayRun:
    """A run, or the part of it that there is.

    Attributes:
        config: what was replayed, and how: the content of `config.json`.
        state: how it ended.
        requests: one for each that has ended, in the order in which they did.
        num_expected: how many the whole run has.
        num_segments: 1, and 1 more each time it was continued.
        folder: where it is kept; None for a run without a folder.
    """

    config: Mapping[str, Any] = field(repr=False)
    state: RunState
    requests: tuple[ReplayedRequest, ...] = field(repr=False)
    num_expected: int
    num_segments: int = 1
    folder: Path | None = None

    @cached_property
    def succeeded(self) -> tuple[ReplayedRequest, ...]:
        """The requests that were answered: figures are theirs."""
        return tuple(request for request in self.requests if request.has_succeeded)

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last token."""
        if not self.succeeded:
            return 0.0
        last_s = max(request.finished_s or 0.0 for request in self.succeeded)
        return last_s - min(request.arrival_s for request in self.succeeded)

    @cached_property
    def send_lag_s(self) -> dict[int, float | None]:
        """P50, P95 and P99 of how late messages were sent, over all of them."""
        lags = [lag_s for request in self.requests for lag_s in request.lags_s]
        return {percent: _percentile(lags, percent) for percent in PERCENTS}

    @property
    def allowed_lag_s(self) -> float:
        """The P95 of the lag up to which the figures hold; see `pacing.allowed_lag_s`."""
        return allowed_lag_s(self._percentile("ttft_from_context_complete_s", 50))

    @property
    def is_spoiled_by_lag(self) -> bool:
        """Whether messages went out so late that the figures are not those of the load that was asked for."""
        lag_s = self.send_lag_s[95]
        return lag_s is not None and lag_s > self.allowed_lag_s

    @property
    def warnings(self) -> list[str]:
        """What the run could not keep up with, and what else keeps its figures from being compared; one line each."""
        return list(self._warnings())

    def _warnings(self) -> Iterable[str]:
        if self.is_spoiled_by_lag:
            yield (
                f"spoiled: the P95 of the send lag is {1e3 * (self.send_lag_s[95] or 0):.1f} ms, over the "
                f"{1e3 * self.allowed_lag_s:.1f} ms up to which these figures hold. Replay more slowly (time_scale), "
                "or give the machine less else to do"
            )
        if num_failed := sum(request.error is not None for request in self.requests):
            yield f"{num_failed} of {self.num_expected} requests failed; the figures are those of the others"
        if self.state is not RunState.COMPLETE:
            num_ended = sum(request.is_done for request in self.requests)
            yield f"{self.state.value}: {num_ended} of {self.num_expected} requests have ended"
        if self.num_segments > 1:
            yield f"continued {self.num_segments - 1} times: each time requests met an idle engine"

    def summary(self) -> dict[str, Any]:
        """The figures that runs are compared by; None where there is no request to tell them by.

        `<metric>_p50_s`, `_p95_s` and `_p99_s` of both TTFTs, of the latency until the last token and of the send lag;
        `completion_time_s` (first arrival to last token), throughput, preemptions and what tokens cost.
        """
        metrics = ("ttft_from_context_complete_s", "ttft_from_request_s", "e2e_latency_s")
        percentiles = {
            f"{metric.removesuffix('_s')}_p{percent}_s": self._percentile(metric, percent)
            for metric in metrics
            for percent in PERCENTS
        }
        totals = {name: sum(getattr(request, name) or 0 for request in self.succeeded) for name in _TOTALS}
        num_preemptions = totals["num_recompute_preemptions"] + totals["num_swap_preemptions"]
        return {
            "state": self.state.value,
            "num_requests": len(self.succeeded),
            "num_failed": sum(request.error is not None for request in self.requests),
            "num_aborted": sum(not request.is_done for request in self.requests),
            **percentiles,
            "completion_time_s": self.duration_s,
            **self._throughput(),
            "num_preemptions": num_preemptions,
            "swap_share": totals["num_swap_preemptions"] / num_preemptions if num_preemptions else None,
            **totals,
            **{f"send_lag_p{percent}_s": lag_s for percent, lag_s in self.send_lag_s.items()},
            "allowed_lag_s": self.allowed_lag_s,
            "is_spoiled_by_lag": self.is_spoiled_by_lag,
            "num_segments": self.num_segments,
        }

    def plot(self) -> Plot:
        """Both TTFTs as the share of requests that took longer. `Comparison` shows several runs, and the folder of a
        run its timeline.

        Raises:
            ConfigurationError: no request was answered.
            MissingExtraError: matplotlib is not installed.
        """
        from stream2llm_sdk.traces.comparison import Comparison

        return Comparison({"": self}).plot()

    def _repr_html_(self) -> str:
        from stream2llm_sdk.display.run_view import replay_html

        return replay_html(self)

    def _throughput(self) -> dict[str, float | None]:
        seconds = self.duration_s
        num_prompt_tokens = sum(request.num_prompt_tokens for request in self.succeeded)
        num_output_tokens = sum(request.num_output_tokens for request in self.succeeded)
        counts = {
            "requests": len(self.succeeded),
            "prompt_tokens": num_prompt_tokens,
            "output_tokens": num_output_tokens,
        }
        return {f"{name}_per_s": count / seconds if seconds > 0 else None for name, count in counts.items()}

    def _percentile(self, metric: str, percent: float) -> float | None:
        return _percentile([getattr(request, metric) for request in self.succeeded], percent)


def _percentile(values: Iterable[float | None], percent: float) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.percentile(known, percent)) if known else None
