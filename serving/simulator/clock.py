"""Virtual time: a clock that a latency model moves, one step of the model at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["LatencyModel", "StepFacts", "VirtualClock"]


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What one forward pass did; everything a latency model may depend on.

    Attributes:
        step: its number.
        spans: one `(first, stop)` pair of token positions per request of the batch: the pass computed the positions
            `first .. stop - 1` and attended to all positions below `stop`.
        num_sampled: requests of which a token was sampled.
    """

    step: int
    spans: tuple[tuple[int, int], ...]
    num_sampled: int

    @property
    def num_requests(self) -> int:
        """Requests in the batch."""
        return len(self.spans)

    @property
    def num_tokens(self) -> int:
        """Tokens run through the model, prefill and decode."""
        return sum(stop - first for first, stop in self.spans)

    @property
    def num_context_tokens(self) -> int:
        """Tokens attended to, summed over the requests."""
        return sum(stop for _, stop in self.spans)


LatencyModel = Callable[[StepFacts], float]
"""Maps a step to the seconds it takes."""


class VirtualClock:
    """Seconds of simulated time; only ever moves forward.

    Args:
        now_s: where it begins.
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    @property
    def now_s(self) -> float:
        """The current time in seconds."""
        return self._now_s

    def advance(self, duration_s: float) -> None:
        """Let `duration_s` seconds pass. Raises `ValueError` for a negative or infinite duration."""
        if not (math.isfinite(duration_s) and duration_s >= 0):
            raise ValueError(f"a step cannot take {duration_s} s; latency models return finite seconds >= 0")
        self._now_s += duration_s

    def advance_to(self, time_s: float) -> None:
        """Move to `time_s`, an event in the future; a time already passed changes nothing."""
        self._now_s = max(self._now_s, time_s)
