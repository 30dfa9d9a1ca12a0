"""vLLM's real engine core without a model: content-checked KV memory and virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stream2llm_sdk.serving.simulator.clock import LatencyModel, StepFacts, VirtualClock
from stream2llm_sdk.serving.simulator.content import SamplingRule
from stream2llm_sdk.serving.simulator.kv_memory import (
    KVCheckError,
    KVContentError,
    KVMemory,
    KVWriteError,
    RunnerStateError,
)

if TYPE_CHECKING:
    from stream2llm_sdk.serving.simulator.executor import CheckedExecutor

__all__ = [
    "CheckedExecutor",
    "KVCheckError",
    "KVContentError",
    "KVMemory",
    "KVWriteError",
    "LatencyModel",
    "RunnerStateError",
    "SamplingRule",
    "StepFacts",
    "VirtualClock",
]


def __getattr__(name: str) -> Any:
    # The executor subclasses one of vLLM's classes, and importing vLLM takes seconds.
    if name == "CheckedExecutor":
        from stream2llm_sdk.serving.simulator.executor import CheckedExecutor

        return CheckedExecutor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
