"""vLLM's scheduler in two phases: a plan, then vLLM's own step with exactly that plan.

Plugged in through `scheduler_cls`. Phase 1 is read-only; phase 2 preempts the plan's victims and lets vLLM's own
`schedule()` see what is planned. Steps that need no plan are vLLM's own, untouched.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from functools import cached_property
from typing import Any, NamedTuple

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.request import Request, RequestStatus

from stream2llm_sdk.serving.admitting_scheduler import AdmittingScheduler
from stream2llm_sdk.serving.decoding_run import DecodingRun
from stream2llm_sdk.serving.fair_share import BlockShares
from stream2llm_sdk.serving.open_share import OpenShare
from stream2llm_sdk.serving.ordered_scheduler import is_admitted
from stream2llm_sdk.serving.orphans import end_with_parent
from stream2llm_sdk.serving.planner import Candidate, Limits, Plan, Planner
from stream2llm_sdk.serving.request_order import SortKey
from stream2llm_sdk.serving.victims import make_victim_order

__all__ = ["AsyncStream2LLMScheduler", "Stream2LLMScheduler"]

_BLOCKED = (
    RequestStatus.WAITING_FOR_REMOTE_KVS,
    RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
    RequestStatus.WAITING_FOR_STREAMING_REQ,
)


class Stream2LLMScheduler(AdmittingScheduler):
    """The scheduler of streaming prompts. With `async_scheduling` on, an instance is an `AsyncStream2LLMScheduler`.

    The policy comes from `additional_config["stream2llm"]["policy"]`, else from the environment's `SCHEDULER_TYPE`,
    else it is vLLM's own order.
    """

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Stream2LLMScheduler:
        if cls is Stream2LLMScheduler and _is_asynchronous(vllm_config):
            return super().__new__(AsyncStream2LLMScheduler)
        return super().__new__(cls)

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.planner = Planner(self.kv, make_victim_order(self.options.get("victims") or "IDLE_FIRST"))
        self._plan: Plan | None = None
        # Candidates of requests that decode: they are the same from step to step.
        self._decoding: dict[str, Candidate] = {}
        tables, block_size = self.kv.plain_tables
        takes_one_token = self.num_sampled_tokens_per_step == 1 and not self.num_lookahead_tokens
        self.decoding_run = DecodingRun(tables, block_size if takes_one_token else 0, self._most_tokens_to_go_on)
        # Those that stand behind it and decode in this step as well.
        self._joining: list[Request] = []
        self._plan_failed = False
        self._open_share = OpenShare(self.max_num_scheduled_tokens)
        # Waiting requests outside the plan, while vLLM schedules it.
        self._num_hidden = 0
        end_with_parent()

    def limits(self) -> dict[str, Any]:
        return {**super().limits(), "policy": self.scheduling_policy.name}

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        # vLLM asks for every request in every step.
        if (plan := self._plan) is not None:
            granted = plan.num_tokens.get(request.request_id, 0)
            if granted == 0:
                return 0
            if num_new_tokens == 1 and num_computed_tokens >= request.num_prompt_tokens:
                return 1  # an output token: the prompt is complete
            num_new_tokens = plan.limit(request.request_id, num_new_tokens)
        if not self.num_open and not self.num_prefill_lookahead:
            return num_new_tokens
        return super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)

    def get_request_counts(self) -> tuple[int, int]:
        num_running, num_waiting = super().get_request_counts()
        return num_running, num_waiting + self._num_hidden

    # ---- a step -------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self.num_open > len(self.parked):
            self._park_idle_streams()
        if not self._needs_plan() or self._plan_failed or self._pause_state == PauseState.PAUSED_ALL:
            self._plan_failed = False
            self.decoding_run.clear()
            hidden_slots = self._hide_slots_of_parked([request.request_id for request in self.kv_holding_waiting])
            try:
                output = super().schedule(throttle_prefills)
            finally:
                self.num_waiting_for_streaming_input += hidden_slots
        else:
            output = self._schedule_planned(throttle_prefills)
        self._record_step(output)
        return output

    def _needs_plan(self) -> bool:
        """Whether vLLM's own step could go wrong: streams are open, or finished ones still wait with their KV (vLLM
        takes KV from running requests only, and never gets on when all of it is held by requests that wait), or
        memory could run out, where vLLM's requests would preempt each other again and again."""
        policy = self.scheduling_policy
        if self.num_open or policy.plans_plain_requests or self.shares.num_tenants > 1:
            return True
        if self.prompts and policy.plans_when_short:
            if self.kv.num_free < self._most_blocks_of_step:
                return True
            if self.waiting and self._must_look_ahead() and not self._all_fit_to_the_end():
                return True
        return any(request.request_id in self.prompts for request in self.kv_holding_waiting)

    @property
    def _most_blocks_of_step(self) -> int:
        """No step takes more blocks: those of its tokens, and one that is begun for each request and group."""
        num_groups = len(self.kv_cache_config.kv_cache_groups)
        num_tokens = self.max_num_scheduled_tokens + self.num_lookahead_tokens * self.max_num_running_reqs
        return num_groups * (num_tokens // self.block_size + len(self.running) + len(self.waiting) + 1)

    def _schedule_planned(self, throttle_prefills: bool) -> SchedulerOutput:
        if self._uses_forecasts:
            self._refresh_forecasts()
        run = self.decoding_run
        if self.shares.num_tenants > 1:
            run.clear()  # the tenants take turns
        run.begin(self.order.take_num_unchanged(), self.max_num_scheduled_tokens, self.kv.num_free)
        plan = Plan(num_tokens=dict(run.num_tokens), num_blocks=run.num_blocks)
        self.planner.plan(self._candidates(plan), self._holders, self._limits_of_step(), plan)
        self._open_share.planned(deferred=plan.defers_open)
        for request in plan.nothing_to_compute:
            self._remove_from_queues(request)
            self._park(request)
        self._num_blocks_short = plan.num_blocks_short
        if plan.victims:
            with self._kept_on_host(plan.num_tokens):
                for victim in plan.victims:
                    self._preempt_victim(victim)
        hidden = self._show_only(plan)
        hidden_slots = self._hide_slots_of_parked(plan.num_tokens)
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.num_waiting_for_streaming_input += hidden_slots
            self._show_again(hidden)
        if len(output.num_scheduled_tokens) == len(plan.num_tokens):
            run.end(self._joining)
        else:
            run.clear()
        # A plan that did not come true (something it cannot see stood in the way) must not be made again for ever.
        # Where only vLLM's sessions hold what others need, vLLM may take it from them.
        self._plan_failed = not output.num_scheduled_tokens and (
            bool(plan.num_tokens) or any(map(self._is_session, self.running))
        )
        return output

    def _candidates(self, plan: Plan) -> Iterator[Candidate]:
        """What may be scheduled, in the policy's order; where there are several tenants, each in its turn."""
        only_holders = self._pause_state != PauseState.UNPAUSED
        entries = self.order.starting_at(len(plan.num_tokens))
        joining, may_join = self._joining, self.shares.num_tenants <= 1
        joining.clear()
        if self.shares.num_tenants > 1:
            # Prompts that are open are read ahead of time: that can wait for those whose answers are waited for.
            entries = self.order.by_share(
                self.shares, lambda request_id: plan.num_tokens.get(request_id, 0), self._is_open
            )
        look_ahead = self._look_ahead()
        decoding, running = self._decoding, RequestStatus.RUNNING
        longest = self._most_tokens_to_go_on
        for key, request in entries:
            # Most of what runs decodes, step after step: what was a candidate for one more output token is that again.
            candidate = decoding.get(request.request_id)
            if (
                candidate is not None
                and candidate.key is key
                and request.status is running
                and request.num_computed_tokens + 1 == request.num_tokens <= longest
                and not request.num_output_placeholders
                and not request.spec_token_ids
            ):
                yield candidate
                may_join = may_join and request.request_id in plan.num_tokens
                if may_join:
                    joining.append(request)
                continue
            if not is_admitted(request):
                may_join = False
                if only_holders:
                    continue
                if look_ahead is not None and self._is_looked_at(request):
                    memory = self._memory(request)
                    if look_ahead.lets_in(memory, request.num_tokens):
                        yield self._candidate(key, request)
                        if request.request_id in plan.num_tokens:
                            look_ahead.admitted(memory)
                    continue
            candidate = self._candidate(key, request)
            if candidate.takes_one and request.num_output_tokens:
                decoding[request.request_id] = candidate
            yield candidate
            # Who gets the rest of its prompt now decodes in the next step.
            may_join = may_join and candidate.is_running and not candidate.num_held_back
            may_join = may_join and plan.num_tokens.get(request.request_id) == candidate.num_wanted
            if may_join:
                joining.append(request)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._decoding.pop(request.request_id, None)
        return super()._free_request(request, delay_free_blocks=delay_free_blocks)

    def _holders(self) -> Iterator[Candidate]:
        """Whose KV may be taken now."""
        for key, request in self.order:
            if self._is_evictable(request, request.status == RequestStatus.RUNNING):
                yield self._holder(key, request)
        for request in self.parked.values():
            if self._is_evictable(request, running=False):
                yield self._holder(self.sort_key(request), request)

    def _holder(self, key: SortKey, request: Request) -> Candidate:
        """One of the holders, with what is asked of a victim; a parked stream wants nothing."""
        request_id = request.request_id
        prompt = self.prompts.get(request_id)
        holder = self._candidate(key, request)
        if request_id in self.parked:
            holder.is_idle, holder.is_ready, holder.num_wanted = True, False, 0
        else:
            holder.is_guarded = self._is_guarded(request, prompt)
        holder.completion_s = math.inf if prompt is None else prompt.completion_s
        holder.admission = self._admission_order.get(request_id, 0)
        return holder

    def _candidate(self, key: SortKey, request: Request) -> Candidate:
        """A request of the order as it stands now."""
        running = request.status is RequestStatus.RUNNING
        prompt = self.prompts.get(request.request_id)
        keeps_slot = running or (self.use_v2_model_runner and request.request_id in self._resident)
        num_wanted = min(self._num_wanted(request), self._room_in_model(request))
        candidate = Candidate(
            request,
            key,
            num_wanted,
            num_held_back=0,
            is_running=running,
            is_ready=running or self._is_ready(request),
            needs_slot=not keeps_slot,
            frees_slot=keeps_slot,
            takes_one=running and num_wanted == 1 and request.num_computed_tokens >= request.num_prompt_tokens,
        )
        if prompt is not None:
            candidate.tenant = prompt.tenant
            candidate.num_held_back = int(prompt.is_open)
        return candidate

    def _room_in_model(self, request: Request) -> int:
        return self._most_tokens_to_go_on - int(request.num_computed_tokens)

    @cached_property
    def _most_tokens_to_go_on(self) -> int:
        """Tokens of the longest sequence that the model has room to go on from."""
        return int(self.max_model_len - self.num_sampled_tokens_per_step)

    def _handle_invalid_blocks(self, *args: Any, **kwargs: Any) -> Any:
        self.decoding_run.clear()
        return super()._handle_invalid_blocks(*args, **kwargs)

    def _is_ready(self, request: Request) -> bool:
        """Whether vLLM would schedule this waiting request now; the same questions that it asks, without effects."""
        if request.num_stale_output_tokens and not request.drop_stale_output:
            return False
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return request.request_id in self.finished_recving_kv_req_ids
        if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            grammar = request.structured_output_request
            return grammar is not None and grammar.grammar is not None
        return request.status != RequestStatus.WAITING_FOR_STREAMING_REQ

    def _is_evictable(self, request: Request, running: bool) -> bool:
        """Whether the request's blocks can be taken now: it holds some, nothing else is writing them, and vLLM's own
        streaming sessions and loads from elsewhere are left alone."""
        if not running and request.num_computed_tokens == 0:
            return False
        if request.status in _BLOCKED and request.request_id not in self.parked:
            return False
        if self._is_session(request):
            return False  # vLLM loses one that is preempted with the last token of its turn in flight
        return bool(self._request_blocks_can_be_freed(request))

    def _limits_of_step(self) -> Limits:
        places = self.max_num_active_reqs - len(self.running) - self._num_foreign_sessions
        if self.use_v2_model_runner:
            places -= len(self._resident_elsewhere())
        num_open_tokens, defers_open = self._open_share.limits(
            self.scheduling_policy.open_share, self.num_open - len(self.parked)
        )
        return Limits(
            num_tokens=self.max_num_scheduled_tokens,
            num_tokens_per_prefill=self._long_prefill_threshold(),
            num_slots=places,
            num_running=len(self.running),
            watermark_blocks=self.kv_cache_manager.watermark_blocks,
            lookahead_tokens=self.num_lookahead_tokens,
            shares=self._block_shares(places) if self.shares.num_tenants > 1 else None,
            num_open_tokens=num_open_tokens,
            defers_open=defers_open,
        )

    def _block_shares(self, num_slots: int) -> BlockShares:
        return BlockShares(self.shares, self.kv.num_total, self._blocks_by_tenant, self._first_to_get_on(num_slots))

    def _first_to_get_on(self, num_slots: int) -> str | None:
        """The first request in the order that nothing but memory could hold up. One that a look-ahead keeps out is not:
        it would protect nobody."""
        look_ahead = self._look_ahead()
        first = None
        for _, request in self.order:
            running = request.status == RequestStatus.RUNNING
            keeps_slot = running or (self.use_v2_model_runner and request.request_id in self._resident)
            if (running or self._is_ready(request)) and (keeps_slot or num_slots > 0):
                if is_admitted(request) or look_ahead is None or not self._is_looked_at(request):
                    return request.request_id
                if look_ahead.lets_in(self._memory(request), request.num_tokens):
                    return request.request_id
                first = first or request.request_id
        return first

    def _blocks_by_tenant(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for request in self.requests.values():
            counts[self._tenant(request)] += self.kv.num_held(request.request_id)
        return counts

    def _long_prefill_threshold(self) -> int:
        """The longest prefill chunk that vLLM will give one request in this step, 0 for no limit."""
        threshold = self.scheduler_config.long_prefill_token_threshold
        if threshold <= 0 or (num_eligible := sum(self.get_request_counts())) <= 1:
            return 0
        if self.adaptive_long_prefill_threshold:
            threshold = max(threshold, self.scheduler_config.max_num_batched_tokens // num_eligible)
        return int(threshold)

    # ---- phase 2 ------------------------------------------------------------------------------------------------

    def _preempt_victim(self, request: Request) -> None:
        """Frees a request's KV. A stream goes back to where it was, to be sent to the worker as a new request."""
        parked = request.request_id in self.parked
        if parked:
            del self.parked[request.request_id]
            self.num_waiting_for_streaming_input -= 1
        elif request.status == RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self._remove_from_queues(request)
        status = request.status
        request.status = RequestStatus.RUNNING
        self._preempt_request(request, self.now_s(), drop_stale_output=self.requires_kv_delivery)
        if status == RequestStatus.RUNNING:
            return
        self._remove_from_queues(request)
        self._front.pop(request.request_id, None)
        if parked:
            self._park(request)
        else:
            request.status = status
            self._enqueue_by_arrival(request)
            self._reorder(request)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self._may_swap = False  # what is reset must not come back from the host
        try:
            if reset_running_requests:
                # vLLM preempts what runs; streams that wait for tokens, or for a place, hold KV too.
                for request in [*self.kv_holding_waiting, *self.parked.values()]:
                    if self._is_evictable(request, running=False):
                        self._preempt_victim(request)
            done = bool(super().reset_prefix_cache(reset_running_requests, reset_connector))
        finally:
            self._may_swap = True
        if self.swap is not None:
            self.swap.reset_cache()
            self._reorder_all([request for _, request in self.order])
        return done

    def _show_only(self, plan: Plan) -> list[_HiddenQueue]:
        """Lets vLLM see the waiting requests of the plan only, in the plan's order. Running ones need no hiding:
        `_reserve_prefill_lookahead` gives those outside the plan no tokens."""
        self._plan = plan
        self._num_hidden = -len(plan.admitted)
        hidden = []
        for name, holding in (("waiting", False), ("kv_holding_waiting", True)):
            queue = getattr(self, name)
            num_waiting = len(queue)
            if num_waiting:  # a queue that is empty anyway hides nothing
                shown = [request for request in plan.admitted if self._holds_kv_blocks(request) is holding]
                hidden.append(_HiddenQueue(name, queue, shown))
                self._num_hidden += num_waiting
                setattr(self, name, self._queue_of(shown))
        return hidden

    def _queue_of(self, requests: list[Request]) -> Any:
        queue = create_request_queue(self.policy)
        for request in requests:
            queue.add_request(request)
        return queue

    def _show_again(self, hidden: list[_HiddenQueue]) -> None:
        self._plan = None
        self._num_hidden = 0
        for name, queue, shown in hidden:
            _merge(queue, shown, getattr(self, name))
            setattr(self, name, queue)

    def _hide_slots_of_parked(self, served: Collection[str]) -> int:
        """vLLM counts `num_waiting_for_streaming_input` as taken request slots. Parked streams take one only in the
        V2 model runner, and only while the worker keeps state of them; so do streams that wait and are not served.
        One that is served has its slot already: vLLM counts it when it runs. Returns what to add after the step."""
        hidden = len(self.parked)
        if self.use_v2_model_runner and self._resident:
            hidden -= len(self._resident_elsewhere().difference(served))
        self.num_waiting_for_streaming_input -= hidden
        return hidden

    def _resident_elsewhere(self) -> set[str]:
        """Requests that the worker keeps state of, though they do not run, less vLLM's idle sessions."""
        elsewhere = self._resident.difference(request.request_id for request in self.running)
        if self._num_foreign_sessions:
            elsewhere -= {request.request_id for request in self.requests.values() if self._is_idle_session(request)}
        return elsewhere


class _HiddenQueue(NamedTuple):
    """One of vLLM's queues while vLLM sees another in its place, and what that was made of."""

    name: str
    queue: Any
    shown: list[Request]


def _merge(queue: Any, shown: list[Request], remaining: Any) -> None:
    """Brings a full queue up to date: what vLLM admitted of what it was shown leaves it, what vLLM sent back to waiting
    joins it in front."""
    left = list(remaining)
    for request in shown:
        if request not in left:
            queue.remove_request(request)
    for request in reversed(left):
        if request not in shown:
            queue.prepend_request(request)


class AsyncStream2LLMScheduler(Stream2LLMScheduler, AsyncScheduler):
    """The same with vLLM's asynchronous scheduling: a step is planned while the one before it still runs."""


def _is_asynchronous(vllm_config: Any) -> bool:
    """Whether vLLM decided for asynchronous scheduling. The CPU platform takes the decision back for its executor;
    what vLLM derived from it stays. The asynchronous class serves a synchronous engine as well, never the reverse."""
    derived = vllm_config.parallel_config.disable_nccl_for_dp_synchronization
    return bool(vllm_config.scheduler_config.async_scheduling or derived)
