"""Memory and preemption as the published system has them: who loses KV for whom, and in which way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.request import Request, RequestStatus

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.cost_correction import OnlineCorrection
from stream2llm_sdk.serving.cost_model import H200_LLAMA_8B
from stream2llm_sdk.serving.kv_blocks import CacheHit
from stream2llm_sdk.serving.preemption import PreemptionMode
from stream2llm_sdk.serving.simulator.published_policies import PublishedOptions, QuadraticCosts, make_rank
from stream2llm_sdk.serving.streaming_prompt import EXTRA_ARGS_KEY
from stream2llm_sdk.serving.swap.messages import SwapMetadata
from stream2llm_sdk.serving.traced_scheduler import TracedScheduler
from stream2llm_sdk.trail import EventType

__all__ = ["PublishedPreemption", "PublishedStep"]

_NUM_PREALLOCATED_BLOCKS = 4


@dataclass(slots=True)
class PublishedStep:
    """One step's plan, and what vLLM does not see of the queues meanwhile.

    Attributes:
        num_tokens: planned tokens by request id.
        admitted: those of them that wait, in order.
        left_out: requests with work that got nothing, in order.
        running: all that run, in the order of their admission.
        other_waiting: what waits and is not shown to vLLM.
        victims: who may still be preempted, the next one last; None until somebody must be.
    """

    num_tokens: dict[str, int] = field(default_factory=dict)
    admitted: list[Request] = field(default_factory=list)
    left_out: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    other_waiting: Any = None
    victims: list[Request] | None = None


class PublishedPreemption(TracedScheduler):
    """vLLM's scheduler with preemption by recompute, swap or cost, in the midst of a step and one victim at a time.

    The KV of a swapped request is away until the request is admitted again: a stream that has nothing to do then stays
    out of memory, where one that was dropped comes back at once to be computed again.
    """

    swap = None  # no connector: the copies are in the books alone

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        if vllm_config.scheduler_config.async_scheduling:
            raise ConfigurationError("the published system schedules synchronously; leave async_scheduling off")
        given = dict(vllm_config.additional_config or {}).get(EXTRA_ARGS_KEY, {})
        known = ("policy", "preemption_mode", "quirks")
        self.options = PublishedOptions.parse(**{name: given[name] for name in known if name in given})
        self._rank = make_rank(self.options)
        self.costs = OnlineCorrection(H200_LLAMA_8B, frozen=True)
        self._quadratic_costs: QuadraticCosts | None = None
        self._num_extra_blocks = _NUM_PREALLOCATED_BLOCKS if self._has("preallocation") else 0
        # Requests with tokens to compute now, wherever they are.
        self._ready: dict[str, Request] = {}
        self._step = PublishedStep()
        # Tokens and host blocks of requests whose KV was swapped out.
        self._swapped: dict[str, tuple[int, range]] = {}
        self._num_host_blocks = 0
        self._copies = SwapMetadata()
        self._num_incoming = 0
        self._preempting_by = PreemptionMode.RECOMPUTE
        self._vllm_allocate_slots = self.kv_cache_manager.allocate_slots
        self.kv_cache_manager.allocate_slots = self._allocate_slots

    def _has(self, quirk: str) -> bool:
        return quirk in self.options.quirks

    # ---- who has work -------------------------------------------------------------------------------------------

    def _num_wanted(self, request: Request) -> int:
        """Tokens that the request could compute now; the last one of an open prompt is held back."""
        prompt = self.prompts.get(request.request_id)
        is_open = prompt is not None and prompt.is_open
        return int(request.num_tokens_with_spec - request.num_computed_tokens - is_open)

    def _note_work(self, request: Request) -> None:
        if self._num_wanted(request) > 0:
            self._ready[request.request_id] = request
        else:
            self._ready.pop(request.request_id, None)

    # ---- memory -------------------------------------------------------------------------------------------------

    def _allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        num_lookahead_tokens: int = 0,
        **options: Any,
    ) -> Any:
        """vLLM's `allocate_slots`, which preempts for the request first and preallocates behind it."""
        self._num_incoming = num_new_tokens
        hit = self.kv.no_hit
        if num_new_computed_tokens:
            hit = CacheHit(new_computed_blocks.blocks, num_new_computed_tokens)
        num_computed = request.num_computed_tokens + num_new_computed_tokens
        needed = self.kv.num_needed(request, num_computed, num_new_tokens, hit)
        while needed > self.kv.num_free and (victim := self._next_victim()) is not None:
            self._evict(victim)
        num_extra = min(self._num_extra_blocks, self.kv.num_free - needed) if needed else 0
        blocks = self._vllm_allocate_slots(
            request,
            num_new_tokens,
            num_new_computed_tokens=num_new_computed_tokens,
            new_computed_blocks=new_computed_blocks,
            num_lookahead_tokens=num_lookahead_tokens + max(0, num_extra) * self.block_size,
            **options,
        )
        if blocks is not None and request.request_id in self._swapped:
            self._copy_in(request)
        return blocks

    def _next_victim(self) -> Request | None:
        """The next to lose its KV: streams without work, the last admitted one first; then, from the end of the order,
        those that have work and were left out."""
        if self._rank is None:
            return None  # vLLM preempts the last of the running ones itself
        step = self._step
        if step.victims is None:
            idle = [request for request in step.running if request.request_id not in self._ready]
            if not self._has("admission_ties"):
                rank, prompts = self._rank, self.prompts
                idle.sort(key=lambda request: rank(request, prompts.get(request.request_id)))
            step.victims = [request for request in step.left_out if request.status is RequestStatus.RUNNING] + idle
        return step.victims.pop() if step.victims else None

    def _evict(self, victim: Request) -> None:
        """Preempts a request that vLLM does not see in this step."""
        shown, self.waiting = self.waiting, self._step.other_waiting
        self._preempt_request(victim, self.trail.clock.monotonic_s())
        self.waiting = shown

    # ---- preemption ---------------------------------------------------------------------------------------------

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        request_id, num_tokens = request.request_id, request.num_computed_tokens
        has_work = request_id in self._ready
        self._preempting_by = self._mode_for(num_tokens)
        swaps = self._preempting_by is PreemptionMode.SWAP
        if swaps:
            self._copy_out(request)
        super()._preempt_request(request, timestamp, drop_stale_output)
        if swaps:
            request.num_computed_tokens = num_tokens
            if not has_work and self._rank is None and self._has("immediate_readmission"):
                # It is admitted with a block's worth of tokens to compute again.
                request.num_computed_tokens = max(0, num_tokens - self.block_size)
        if has_work or self._has("immediate_readmission"):
            self._note_work(request)

    def _mode_for(self, num_tokens: int) -> PreemptionMode:
        """How a victim with so many computed tokens is preempted."""
        mode = self.options.preemption_mode
        if not num_tokens:
            return PreemptionMode.RECOMPUTE
        if mode is not PreemptionMode.COST:
            return mode
        asked = self._num_incoming if self._has("cost_of_incoming") else num_tokens
        if self._has("quadratic_costs"):
            if self._quadratic_costs is None or self._quadratic_costs.model is not self.costs.model:
                self._quadratic_costs = QuadraticCosts(self.costs.model)
            recompute_s, swap_s = self._quadratic_costs.recompute_s(asked), self._quadratic_costs.swap_s(asked)
        else:
            recompute_s = self.costs.recompute_s(asked)
            swap_s = self.costs.swap_out_s(asked) + self.costs.swap_in_s(asked)
        return PreemptionMode.RECOMPUTE if recompute_s < swap_s else PreemptionMode.SWAP

    def _record_preemption(self, request: Request, num_tokens: int, num_blocks: int) -> None:
        swapped = self._preempting_by is PreemptionMode.SWAP
        event = EventType.PREEMPTED_SWAP if swapped else EventType.PREEMPTED_RECOMPUTE
        self.trail.state(request.request_id, event, num_tokens=num_tokens, num_blocks=num_blocks)

    def _copy_out(self, request: Request) -> None:
        num_tokens = request.num_computed_tokens
        blocks = self._computed_blocks(request, num_tokens)
        host = range(self._num_host_blocks, self._num_host_blocks + len(blocks))
        self._num_host_blocks += len(blocks)
        self._swapped[request.request_id] = (num_tokens, host)
        self._copies.outs += zip(blocks, host, strict=True)
        self._copies.num_tokens_out += num_tokens

    def _copy_in(self, request: Request) -> None:
        num_tokens, host = self._swapped.pop(request.request_id)
        self._copies.ins += zip(host, self._computed_blocks(request, num_tokens), strict=True)
        self._copies.num_tokens_in += num_tokens
        self.prompts[request.request_id].num_tokens_loaded += num_tokens

    def _computed_blocks(self, request: Request, num_tokens: int) -> list[int]:
        return list(self.kv_cache_manager.get_block_ids(request.request_id)[0][: -(-num_tokens // self.block_size)])
