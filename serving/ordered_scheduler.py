"""Keeps the requests that may be scheduled in the policy's order, as things happen to them.

Sorting at each step would cost more than the rest of a step; a request's place changes only when something happens to
it, and all of that passes through here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from stream2llm_sdk.serving.adaptive import Adaptive, Observation
from stream2llm_sdk.serving.fair_share import FairShare
from stream2llm_sdk.serving.forecast import Forecast
from stream2llm_sdk.serving.lcp import TokenArray
from stream2llm_sdk.serving.outlook import Outlook
from stream2llm_sdk.serving.policies import SchedulingPolicy, Standing, make_policy, policy_name
from stream2llm_sdk.serving.request_order import RequestOrder, SortKey
from stream2llm_sdk.serving.streaming_prompt import EXTRA_ARGS_KEY, StreamingPrompt
from stream2llm_sdk.serving.streaming_scheduler import StreamingPromptScheduler
from stream2llm_sdk.serving.victims import LatestCompletion
from stream2llm_sdk.trail import EventType

__all__ = ["OrderedScheduler", "is_admitted"]

_FINISHED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


def is_admitted(request: Request) -> bool:
    """Whether a request runs or holds KV."""
    return request.status is RequestStatus.RUNNING or request.num_computed_tokens > 0


class OrderedScheduler(StreamingPromptScheduler):
    """Streaming prompts in a policy's order: `order` holds what runs or waits, but no parked stream."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.options: dict[str, Any] = dict(vllm_config.additional_config or {}).get(EXTRA_ARGS_KEY, {})
        name = policy_name(self.options.get("policy"), "DEFAULT_VLLM")
        self.scheduling_policy: SchedulingPolicy = make_policy(name)
        self.order = RequestOrder()
        self.shares = FairShare(self.options.get("tenant_weights"))
        self.outlook = Outlook(self.options.get("length_predictor") or "quantile", max_model_len=self.max_model_len)
        self._forecasts: Mapping[str, Forecast] = {}
        self._uses_forecasts = self.scheduling_policy.uses_forecasts or (
            self.options.get("victims") == LatestCompletion.name
        )
        # Preempted requests wait in front of the others, the last one first, as vLLM has it.
        self._front: dict[str, int] = {}
        self._num_preempted = 0

    # ---- what happens to a request ------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        is_new = request.request_id not in self.requests
        super().add_request(request)
        if not is_new:
            return
        prompt = self.prompts.get(request.request_id)
        self.shares.joined(self._tenant(request))
        self.outlook.added(request, prompt, self.now_s())
        if request.request_id not in self.parked:
            self._reorder(request)

    def _apply(self, request: Request, prompt: StreamingPrompt, new: TokenArray, lcp: int, final: bool) -> int:
        self.outlook.prompt_changed(request, len(new), final, prompt.last_chunk_arrival_time)
        num_invalidated = super()._apply(request, prompt, new, lcp, final)
        if final:
            self.outlook.completed(request, prompt)
            self._reorder(request)
        return num_invalidated

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        request_id = request.request_id
        if request_id in self._sequence:
            self.shares.left(self._tenant(request))
            self.outlook.ended(request, finished=request.status in _FINISHED)
        self.order.discard(request_id)
        self._front.pop(request_id, None)
        return super()._free_request(request, delay_free_blocks=delay_free_blocks)

    def shutdown(self) -> None:
        self.outlook.close()
        super().shutdown()

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
        if not self._uses_forecasts:
            self.outlook.pick_up()
        if isinstance(self.scheduling_policy, Adaptive):
            self._adapt(self.scheduling_policy, output)
        if self.shares.num_tenants > 1:
            for request_id, num_tokens in output.num_scheduled_tokens.items():
                self.shares.charge(self._tenant(self.requests[request_id]), num_tokens)
            self.shares.advance(output.total_num_scheduled_tokens, self.order.tenants)
        if self.scheduling_policy.follows_progress or self._uses_forecasts:
            self._reorder_all(self._moved_by(output))

    def _moved_by(self, output: SchedulerOutput) -> Iterator[Request]:
        """Those of which a step may have changed the key."""
        follows_output = self.scheduling_policy.follows_output
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            if follows_output or request.num_computed_tokens - num_tokens < request.num_prompt_tokens:
                yield request

    def _adapt(self, policy: Adaptive, output: SchedulerOutput) -> None:
        num_unfinished = len(self.requests)
        seen = Observation(
            now_s=self.now_s(),
            free_share=self.kv.num_free / self.kv.num_total,
            num_open=self.num_open,
            num_complete=num_unfinished - self.num_open,
            num_waiting=sum(
                not self._is_open(request) for queue in (self.waiting, self.kv_holding_waiting) for request in queue
            ),
            num_answering=sum(
                self.requests[request_id].num_output_tokens > 0 for request_id in output.num_scheduled_tokens
            ),
        )
        switch = policy.observe(seen)
        if switch is not None:
            for request_id in self.prompts:
                self.trail.mark(request_id, EventType.POLICY_SWITCHED, policy=switch.policy, reason=switch.reason)
            self._reorder_all([request for _, request in self.order])

    def _refresh_forecasts(self) -> None:
        """Moves the open prompts of which something else is expected now."""
        forecasts, before = self.outlook.refresh(self.now_s()), self._forecasts
        for request_id, forecast in forecasts.items():
            if before.get(request_id) is not forecast:
                prompt, request = self.prompts.get(request_id), self.requests.get(request_id)
                if prompt is not None and request is not None:
                    prompt.completion_s = forecast.completion_s
                    prompt.final_num_tokens = forecast.final_num_tokens
                    self._reorder_all((request,))
        self._forecasts = dict(forecasts)

    # ---- its place ----------------------------------------------------------------------------------------------

    def _reorder(self, request: Request) -> None:
        tenant = self._tenant(request)
        if tenant not in self.order.tenants:
            self.shares.has_work_again(tenant)
        self.order.put(request, self.sort_key(request), tenant)

    def _reorder_all(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request.request_id in self.order:
                self._reorder(request)

    def sort_key(self, request: Request) -> SortKey:
        """The policy's key, and behind it vLLM's own order: admitted ones as they were admitted, others that hold KV,
        then preempted ones, then as they came."""
        request_id = request.request_id
        admission = self._admission_order.get(request_id)
        admitted = is_admitted(request)
        key = self.scheduling_policy.key(self.standing(request, admitted))
        if admission is not None and admitted:
            return (*key, 0, admission)
        if (front := self._front.get(request_id)) is not None:
            return (*key, 2, front)
        return (*key, 1 if self._holds_kv_blocks(request) else 3, self._sequence.get(request_id, 0))

    def standing(self, request: Request, is_admitted: bool) -> Standing:
        """What the policy may know of a request."""
        prompt = self.prompts.get(request.request_id)
        arrival_s = 0.0 if prompt is not None else request.arrival_time + self._wall_to_monotonic_s
        standing = Standing(
            request=request,
            prompt=prompt,
            is_admitted=is_admitted,
            final_num_tokens=request.num_prompt_tokens,
            completion_s=arrival_s if prompt is None else prompt.completion_s,
            last_chunk_s=arrival_s if prompt is None else prompt.last_chunk_arrival_time,
            num_available_tokens=request.num_computed_tokens or self.kv.num_on_host(request),
            num_output_tokens=request.max_tokens,
        )
        if self._uses_forecasts:
            output = self.outlook.output(request)
            standing.num_output_tokens = output.num_tokens
            standing.class_num_output_tokens = self.outlook.class_means[output.is_long]
            if prompt is not None and prompt.is_open:
                standing.final_num_tokens = max(prompt.final_num_tokens, request.num_prompt_tokens)
        return standing

    def _tenant(self, request: Request) -> str:
        prompt = self.prompts.get(request.request_id)
        return "" if prompt is None else prompt.tenant

    @cached_property
    def _wall_to_monotonic_s(self) -> float:
        # Once: a difference read anew each time would move the requests' places by microseconds.
        return self.trail.clock.monotonic_s() - self.trail.clock.wall_s()

    def now_s(self) -> float:
        """The trail's clock, which tests and simulations may set."""
        return self.trail.clock.monotonic_s()
