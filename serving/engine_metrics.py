"""Feeds an engine's metrics with the trails of its ended requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from stream2llm_sdk.errors import ConfigurationError

if TYPE_CHECKING:
    from stream2llm_sdk.serving.metrics import SchedulerMetrics
    from stream2llm_sdk.serving.vllm_stream import Stream2LLMStream

__all__ = ["EngineMetrics"]

_MAX_UNMEASURED = 4096  # ended requests that are kept until somebody asks; the oldest of more are given up
_ENOUGH_TO_MEASURE = 256  # so many are measured without anybody asking
_AT_ONCE = 64


class EngineMetrics:
    """The requests of one engine that have ended and were not counted yet.

    Args:
        metrics: what is fed; None to keep nothing.
        snapshot: gives how the engine stands now.

    Raises:
        ConfigurationError: `metrics` is something else.
    """

    def __init__(self, metrics: SchedulerMetrics | None, snapshot: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        if metrics is not None and not hasattr(metrics, "observe_trail"):
            raise ConfigurationError(f"metrics must be a SchedulerMetrics, not {type(metrics).__name__}")
        self.metrics = metrics
        self._snapshot = snapshot
        self._unmeasured: deque[Stream2LLMStream] = deque(maxlen=_MAX_UNMEASURED)
        self._lock = asyncio.Lock()

    @property
    def is_due(self) -> bool:
        """Whether enough requests have ended to count them without being asked."""
        return len(self._unmeasured) >= _ENOUGH_TO_MEASURE

    def ended(self, stream: Stream2LLMStream) -> None:
        """Keeps an ended request to be counted."""
        if self.metrics is not None:
            self._unmeasured.append(stream)

    async def observe(self) -> SchedulerMetrics:
        """Counts what has ended since, and how the engine stands. Carried to its end whoever is cancelled, so that a
        trail that was taken is counted.

        Raises:
            ConfigurationError: there are no metrics to feed.
            EngineDeadError: the engine ended; what could not be counted is kept.
        """
        if self.metrics is None:
            raise ConfigurationError("the engine keeps no metrics: make it with metrics=SchedulerMetrics()")
        await asyncio.shield(asyncio.ensure_future(self._observe(self.metrics)))
        return self.metrics

    async def _observe(self, metrics: SchedulerMetrics) -> None:
        async with self._lock:
            while self._unmeasured:
                batch = [self._unmeasured.popleft() for _ in range(min(_AT_ONCE, len(self._unmeasured)))]
                try:
                    trails = await asyncio.gather(*(stream.trail() for stream in batch))
                except BaseException:
                    self._unmeasured.extendleft(reversed(batch))
                    raise
                for stream, trail in zip(batch, trails, strict=True):
                    if len(trail):
                        metrics.observe_trail(trail, tenant=stream.tenant, reason=stream.end_reason)
            metrics.observe_snapshot(await self._snapshot())
