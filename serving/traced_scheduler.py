"""What happens to requests inside vLLM's scheduler, recorded: their trails, and in which order they were admitted."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from stream2llm_sdk.serving.kv_blocks import KVBlocks
from stream2llm_sdk.serving.streaming_prompt import StreamingPrompt
from stream2llm_sdk.serving.trail_recorder import TrailRecorder
from stream2llm_sdk.trail import EventType

__all__ = ["TracedScheduler"]


class TracedScheduler(Scheduler):
    """vLLM's scheduler with a trail of each request of the SDK."""

    # vLLM's own, declared here for those who read types only.
    running: list[Request]
    waiting: Any
    kv_holding_waiting: Any
    num_waiting_for_streaming_input: int

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.kv = KVBlocks(self.kv_cache_manager, self.block_size)
        self.trail = TrailRecorder()
        self.prompts: dict[str, StreamingPrompt] = {}
        # Requests that the worker keeps state of. Only the V2 model runner has a fixed number of places for it.
        self._resident: set[str] = set()
        self._admission_order: dict[str, int] = {}
        self._num_admitted = 0
        self._scheduled_now: set[str] = set()
        # Requests that the step under way gives back what they had, and how much: noted when it is over.
        self._back_soon: dict[str, int] = {}
        # Of those that came through the SDK.
        self._without_output: set[str] = set()

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        num_tokens, num_blocks = request.num_computed_tokens, self.kv.num_held(request.request_id)
        super()._preempt_request(request, timestamp, drop_stale_output)
        self._resident.discard(request.request_id)
        self._admission_order.pop(request.request_id, None)
        prompt = self.prompts.get(request.request_id)
        if prompt is not None:
            if request.request_id in self._back_soon:
                self._note_resumed(request.request_id, prompt, self._back_soon.pop(request.request_id))
            prompt.preempted(num_tokens)
            self._scheduled_now.discard(request.request_id)
            self._record_preemption(request, num_tokens, num_blocks)

    def _record_preemption(self, request: Request, num_tokens: int, num_blocks: int) -> None:
        self.trail.state(
            request.request_id, EventType.PREEMPTED_RECOMPUTE, num_tokens=num_tokens, num_blocks=num_blocks
        )

    def _record_step(self, output: SchedulerOutput) -> None:
        for request_id, num_computed in self._back_soon.items():
            if (prompt := self.prompts.get(request_id)) is not None:
                self._note_resumed(request_id, prompt, num_computed)
        self._back_soon.clear()
        self._record_admissions(output)
        if not self.prompts:
            return
        prompts, requests, before = self.prompts, self.requests, self._scheduled_now
        num_scheduled = output.num_scheduled_tokens
        scheduled = set()
        few, many = (prompts, num_scheduled) if len(prompts) < len(num_scheduled) else (num_scheduled, prompts)
        for request_id in few:
            if request_id in many:
                prompt, num_tokens = prompts[request_id], num_scheduled[request_id]
                start = requests[request_id].num_computed_tokens - num_tokens
                prompt.computed(start, num_tokens)
                if prompt.resumption is not None and start >= prompt.resumption.target:
                    self._back_soon[request_id] = start
                scheduled.add(request_id)
                if request_id not in before:
                    self.trail.state(request_id, EventType.SCHEDULED)
        for request_id in before - scheduled:
            self.trail.state(request_id, EventType.KV_ON_GPU)
        self._scheduled_now = scheduled

    def _note_resumed(self, request_id: str, prompt: StreamingPrompt, num_computed: int) -> None:
        """Records that a preempted request has again what it had, once it has."""
        back = prompt.resumption
        if back is None or num_computed < back.target:
            return
        prompt.resumption = None
        self.trail.mark(
            request_id,
            EventType.RESUMED,
            num_loaded=back.num_loaded,
            num_found=back.num_found,
            num_recomputed=max(0, back.target - back.num_loaded - back.num_found),
            actual_s=self.trail.clock.monotonic_s() - back.began_s,
        )

    def _record_admissions(self, output: SchedulerOutput) -> None:
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        if not output.scheduled_new_reqs and not resumed:
            return
        num_scheduled = output.num_scheduled_tokens
        admitted = [data.req_id for data in output.scheduled_new_reqs]
        if resumed:
            # In the order in which vLLM admitted them: behind all that ran already.
            both = {*admitted, *resumed}
            admitted = [request_id for request_id in num_scheduled if request_id in both]
        for request_id in admitted:
            request = self.requests[request_id]
            self._record_admission(request, request.num_computed_tokens - num_scheduled[request_id])

    def _record_admission(self, request: Request, num_computed: int) -> None:
        request_id = request.request_id
        self._resident.add(request_id)
        if request_id not in self._admission_order:
            self._admission_order[request_id] = self._num_admitted
            self._num_admitted += 1
            if (prompt := self.prompts.get(request_id)) is not None:
                prompt.found(num_computed)

    def _record_state(self, request: Request, state: EventType) -> None:
        self._scheduled_now.discard(request.request_id)
        self.trail.state(request.request_id, state)

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if request.request_id in self.prompts:
            self._without_output.add(request.request_id)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._without_output.discard(request.request_id)
        return super()._free_request(request, delay_free_blocks=delay_free_blocks)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        # vLLM asks for every token of every request; only the first ones are of interest.
        if scheduler_output.num_scheduled_tokens.keys().isdisjoint(self._without_output):
            return super().update_from_output(scheduler_output, model_runner_output)
        self._update_request_with_output = self._update_noting_first_token
        try:
            return super().update_from_output(scheduler_output, model_runner_output)
        finally:
            del self._update_request_with_output

    def _update_noting_first_token(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        request_id = request.request_id
        if request_id in self._without_output:
            assert not self.prompts[request_id].is_open, f"{request_id}: sampled while its prompt is open"
            self._without_output.discard(request_id)
            self.trail.mark(request_id, EventType.FIRST_TOKEN)
        return super()._update_request_with_output(request, new_token_ids, is_stale)
