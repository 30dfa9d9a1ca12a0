"""The engine: streaming prompts on stock vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stream2llm_sdk.lazy import lazy_names

if TYPE_CHECKING:
    from stream2llm_sdk.serving.admission import StreamLimits
    from stream2llm_sdk.serving.engine import (
        Engine,
        EngineLimits,
        PromptUpdate,
        Stream,
        StreamOutput,
        StreamProgress,
    )
    from stream2llm_sdk.serving.metrics import SchedulerMetrics
    from stream2llm_sdk.serving.options import SchedulingOptions
    from stream2llm_sdk.serving.policies import POLICIES, SchedulingPolicy
    from stream2llm_sdk.serving.vllm_engine import Stream2LLMEngine
    from stream2llm_sdk.serving.vllm_stream import Stream2LLMStream

__all__ = [
    "POLICIES",
    "Engine",
    "EngineLimits",
    "PromptUpdate",
    "SchedulerMetrics",
    "SchedulingOptions",
    "SchedulingPolicy",
    "Stream",
    "Stream2LLMEngine",
    "Stream2LLMStream",
    "StreamLimits",
    "StreamOutput",
    "StreamProgress",
]

_MODULES = dict.fromkeys(__all__, "engine") | {
    "POLICIES": "policies",
    "SchedulerMetrics": "metrics",
    "SchedulingOptions": "options",
    "SchedulingPolicy": "policies",
    "Stream2LLMEngine": "vllm_engine",
    "Stream2LLMStream": "vllm_stream",
    "StreamLimits": "admission",
}

# Importing numpy and vLLM is left to whoever needs an engine.
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
