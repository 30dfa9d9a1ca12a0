"""Preemptions of a run: when, of which kind, and what they cost beside what was predicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from stream2llm_sdk.traces.report.phases import Mark, Phase, RequestTrail
from stream2llm_sdk.trail import EventType

__all__ = ["KINDS", "Preemption", "preemptions_of"]

KINDS = (Phase.DROPPED, Phase.SWAPPED)

_KIND_OF = {EventType.PREEMPTED_RECOMPUTE: Phase.DROPPED, EventType.PREEMPTED_SWAP: Phase.SWAPPED}


@dataclass(frozen=True, slots=True)
class Preemption:
    """One preemption.

    Attributes:
        kind: `Phase.DROPPED` or `Phase.SWAPPED`.
        run_s: when.
        num_tokens: whose KV was taken away; None if unknown.
        predicted_s: what the cost model expected it to cost; None if unknown.
        actual_s: from being admitted again until it had again what it had; None if it never did.
    """

    kind: Phase
    run_s: float
    num_tokens: int | None
    predicted_s: float | None
    actual_s: float | None


def preemptions_of(trails: Iterable[RequestTrail]) -> list[Preemption]:
    """All preemptions, each with the first resumption after it and before the next one."""
    return [preemption for trail in trails for preemption in _of_request(trail.marks)]


def _of_request(marks: Iterable[Mark]) -> Iterator[Preemption]:
    lost: Mark | None = None
    for mark in marks:
        if mark.type is EventType.RESUMED and lost is not None:
            yield _preemption(lost, mark.data.get("actual_s"))
            lost = None
        elif mark.type in _KIND_OF:
            if lost is not None:
                yield _preemption(lost, None)
            lost = mark
    if lost is not None:
        yield _preemption(lost, None)


def _preemption(lost: Mark, actual_s: Any) -> Preemption:
    data = lost.data
    return Preemption(
        _KIND_OF[lost.type], lost.run_s, data.get("num_tokens"), _seconds(data.get("predicted_s")), _seconds(actual_s)
    )


def _seconds(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
