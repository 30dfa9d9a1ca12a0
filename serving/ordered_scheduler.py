"""Keeps the requests that may be scheduled in the policy's order, as things happen to them.

Sorting at each step would cost more than the rest of a step; a request's place changes only when something happens to
it, and all of that passes through here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from stream2llm_sdk.serving.policies import SchedulingPolicy, Standing, make_policy
from stream2llm_sdk.serving.request_order import RequestOrder, SortKey
from stream2llm_sdk.serving.streaming_prompt import EXTRA_ARGS_KEY
from stream2llm_sdk.serving.streaming_scheduler import StreamingPromptScheduler

__all__ = ["OrderedScheduler"]


class OrderedScheduler(StreamingPromptScheduler):
    """Streaming prompts in a policy's order: `order` holds what runs or waits, but no parked stream."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.options: dict[str, Any] = dict(vllm_config.additional_config or {}).get(EXTRA_ARGS_KEY, {})
        name = self.options.get("policy") or os.environ.get("SCHEDULER_TYPE") or "DEFAULT_VLLM"
        self.scheduling_policy: SchedulingPolicy = make_policy(name)
        self.order = RequestOrder()
        # Preempted requests wait in front of the others, the last one first, as vLLM has it.
        self._front: dict[str, int] = {}
        self._num_preempted = 0
        self._wall_to_monotonic_s = time.monotonic() - time.time()

    # ---- what happens to a request ------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if request.request_id not in self.parked and request.request_id in self.requests:
            self._reorder(request)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self.order.discard(request.request_id)
        self._front.pop(request.request_id, None)
        return super()._free_request(request, delay_free_blocks=delay_free_blocks)

    def _park(self, request: Request) -> None:
        self.order.discard(request.request_id)
        super()._park(request)

    def _resubmit(self, request: Request) -> None:
        super()._resubmit(request)
        if request.request_id not in self.parked:
            self._reorder(request)

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        super()._preempt_request(request, timestamp, drop_stale_output)
        self._num_preempted += 1
        self._front[request.request_id] = -self._num_preempted
        self._reorder(request)

    def _record_admission(self, request: Request, num_computed: int) -> None:
        super()._record_admission(request, num_computed)
        self._front.pop(request.request_id, None)
        self._reorder(request)

    def _record_step(self, output: SchedulerOutput) -> None:
        super()._record_step(output)
        if self.scheduling_policy.follows_progress:
            self._reorder_all(self.requests[request_id] for request_id in output.num_scheduled_tokens)

    # ---- its place ----------------------------------------------------------------------------------------------

    def _reorder(self, request: Request) -> None:
        self.order.put(request, self.sort_key(request))

    def _reorder_all(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request.request_id in self.order:
                self._reorder(request)

    def sort_key(self, request: Request) -> SortKey:
        """The policy's key, and behind it vLLM's own order: admitted ones as they were admitted, then preempted ones,
        then as they came."""
        request_id = request.request_id
        admission = self._admission_order.get(request_id)
        is_admitted = request.status == RequestStatus.RUNNING or request.num_computed_tokens > 0
        key = self.scheduling_policy.key(self.standing(request, is_admitted))
        if admission is not None and is_admitted:
            return (*key, 0, admission)
        if (front := self._front.get(request_id)) is not None:
            return (*key, 1, front)
        return (*key, 2, self._sequence.get(request_id, 0))

    def standing(self, request: Request, is_admitted: bool) -> Standing:
        """What the policy may know of a request."""
        prompt = self.prompts.get(request.request_id)
        arrival_s = request.arrival_time + self._wall_to_monotonic_s
        num_output_tokens = request.max_tokens
        return Standing(
            request=request,
            prompt=prompt,
            is_admitted=is_admitted,
            final_num_tokens=request.num_prompt_tokens,
            completion_s=arrival_s if prompt is None else prompt.completion_s,
            last_chunk_s=arrival_s if prompt is None else prompt.last_chunk_arrival_time,
            num_output_tokens=num_output_tokens,
        )
