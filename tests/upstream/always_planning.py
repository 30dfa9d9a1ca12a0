"""The scheduler as it is while streams are open: every step is planned. For vLLM's own tests."""

from __future__ import annotations

from typing import Any

from stream2llm_sdk.serving.scheduler import AsyncStream2LLMScheduler, Stream2LLMScheduler


class AlwaysPlanning(Stream2LLMScheduler):
    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Stream2LLMScheduler:
        made = super().__new__(Stream2LLMScheduler, vllm_config)
        asynchronous = isinstance(made, AsyncStream2LLMScheduler)
        return object.__new__(AsyncAlwaysPlanning if asynchronous else AlwaysPlanning)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scheduling_policy.plans_plain_requests = True


class AsyncAlwaysPlanning(AlwaysPlanning, AsyncStream2LLMScheduler):
    pass
