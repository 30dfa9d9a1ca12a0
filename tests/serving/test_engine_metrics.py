"""Every ended request is counted once, also where fetching its trail fails at first."""

from __future__ import annotations

from typing import Any

import pytest

from stream2llm_sdk.errors import ConfigurationError, EngineDeadError
from stream2llm_sdk.serving.engine_metrics import EngineMetrics


class Stream:
    """An ended stream whose trail cannot be fetched the first few times."""

    tenant, end_reason = "t", None

    def __init__(self, number: int, num_failures: int = 0) -> None:
        self.number = number
        self.num_failures = num_failures

    async def trail(self) -> list[int]:
        if self.num_failures:
            self.num_failures -= 1
            raise EngineDeadError("gone")
        return [self.number]


class Metrics:
    def __init__(self) -> None:
        self.counted: list[int] = []
        self.snapshots: list[Any] = []

    def observe_trail(self, trail: list[int], *, tenant: str, reason: str | None) -> None:
        self.counted += trail

    def observe_snapshot(self, snapshot: Any) -> None:
        self.snapshots.append(snapshot)


async def snapshot() -> dict[str, int]:
    return {"num_waiting": 0}


async def test_all_are_counted_in_order_and_once() -> None:
    metrics = Metrics()
    feed: Any = EngineMetrics(metrics, snapshot)  # type: ignore[arg-type]
    for number in range(150):
        feed.ended(Stream(number))
    assert await feed.observe() is metrics
    await feed.observe()
    assert metrics.counted == list(range(150))
    assert len(metrics.snapshots) == 2


async def test_what_could_not_be_fetched_is_counted_later() -> None:
    metrics = Metrics()
    feed: Any = EngineMetrics(metrics, snapshot)  # type: ignore[arg-type]
    for number in range(5):
        feed.ended(Stream(number, num_failures=number == 3))
    with pytest.raises(EngineDeadError):
        await feed.observe()
    assert metrics.counted == []
    await feed.observe()
    assert metrics.counted == [0, 1, 2, 3, 4]


async def test_so_many_are_due_without_asking_and_the_oldest_of_too_many_are_given_up() -> None:
    metrics = Metrics()
    feed: Any = EngineMetrics(metrics, snapshot)  # type: ignore[arg-type]
    assert not feed.is_due
    for number in range(5_000):
        feed.ended(Stream(number))
    assert feed.is_due
    await feed.observe()
    assert metrics.counted == list(range(5_000 - 4_096, 5_000))


async def test_without_metrics_nothing_is_kept() -> None:
    feed: Any = EngineMetrics(None, snapshot)
    feed.ended(Stream(1))
    with pytest.raises(ConfigurationError, match=r"metrics=SchedulerMetrics\(\)"):
        await feed.observe()
    with pytest.raises(ConfigurationError, match="not int"):
        EngineMetrics(3, snapshot)  # type: ignore[arg-type]
