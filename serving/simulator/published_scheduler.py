"""The published Stream2LLM scheduler's behaviour on vLLM's own scheduler, to compare with like for like.

Written from what its code does, decisions that look like mistakes included (`QUIRKS`). For simulations only: nothing
is sent to a worker again when a prompt changes, and swapped KV exists in the books alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.request import Request, RequestStatus

from stream2llm_sdk.serving.lcp import TokenArray, longest_common_prefix, token_array
from stream2llm_sdk.serving.simulator.published_preemption import PublishedPreemption, PublishedStep
from stream2llm_sdk.serving.streaming_prompt import EXTRA_ARGS_KEY, StreamingPrompt, set_prompt_tokens
from stream2llm_sdk.serving.swap.messages import SwapMetadata
from stream2llm_sdk.trail import EventType

__all__ = ["PublishedScheduler"]


class PublishedScheduler(PublishedPreemption):
    """vLLM's scheduler with streams that grow in place, three orders, and preemption by recompute or swap.

    A stream stays among the running requests from its admission to its end, with or without work. In each step a
    policy's requests with work are taken in order while tokens last and their blocks would fit the empty memory; then
    each of them takes its blocks, and those left out are preempted one by one until there are enough. Host memory for
    swapped KV is unlimited. Under DEFAULT_VLLM the order and the victims are vLLM's own.
    """

    # ---- messages -----------------------------------------------------------------------------------------------

    def __call__(self, operation: str, arguments: list[Any]) -> Any:
        """`update` and `trail`, as `StreamingPromptScheduler` has them."""
        operations: dict[str, Callable[..., Any]] = {"update": self.update, "trail": self.trail.take}
        return operations[operation](*arguments)

    def add_request(self, request: Request) -> None:
        params = request.sampling_params
        flags = (params.extra_args or {}).get(EXTRA_ARGS_KEY) if params is not None else None
        if flags is not None:
            request.prompt_token_ids = list(request.prompt_token_ids or ())
            prompt = StreamingPrompt.from_flags(
                flags, token_array(request.prompt_token_ids), self.trail.clock.monotonic_s()
            )
            self.prompts[request.request_id] = prompt
            self.trail.begin(request.request_id, flags.get("sent_s"))
            if not prompt.is_open:
                self.trail.mark(request.request_id, EventType.CONTEXT_COMPLETE, flags.get("sent_s"))
        super().add_request(request)
        self._note_work(request)

    def update(
        self, request_id: str, kind: str, token_ids: bytes | list[int] | TokenArray, final: bool, sent_s: float
    ) -> dict[str, Any]:
        """Changes an open prompt where it is; arguments and answer are those of `StreamingPromptScheduler.update`."""
        request, prompt = self.requests.get(request_id), self.prompts.get(request_id)
        if request is None or prompt is None:
            return {"error": "unknown"}
        if not prompt.is_open:
            return {"error": "finished"}
        new, lcp = token_array(token_ids), len(prompt.token_ids)
        if kind == "append":
            new = np.concatenate((prompt.token_ids, new))
        else:
            lcp = longest_common_prefix(prompt.token_ids, new)
        if len(new) >= self.max_model_len:
            return {"error": "too_long"}
        if not len(new):
            return {"error": "empty"}
        self.trail.mark(request_id, EventType.CHUNK_ARRIVED, sent_s, num_tokens=len(new) - lcp)
        num_invalidated = self._change(request, prompt, new, lcp)
        prompt.num_updates += 1
        prompt.last_chunk_arrival_time = sent_s
        self.trail.mark(
            request_id, EventType.PROMPT_UPDATED, lcp=lcp, num_tokens=len(new), num_invalidated=num_invalidated
        )
        if final:
            prompt.completion_s = sent_s
            prompt.is_streaming_prompt_finished = True
            self.trail.mark(request_id, EventType.CONTEXT_COMPLETE, sent_s)
        self._note_work(request)
        if not self._has("appends_in_place") and request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self.running.append(request)
        return {"num_tokens": len(new), "lcp": lcp, "num_invalidated": num_invalidated}

    def _change(self, request: Request, prompt: StreamingPrompt, new: TokenArray, lcp: int) -> int:
        """Gives the request its new prompt and keeps the KV up to the LCP. Returns the tokens made void."""
        request_id = request.request_id
        num_swapped, host = self._swapped.get(request_id, (0, range(0)))
        num_computed = max(request.num_computed_tokens, num_swapped)
        keep = min(num_computed, lcp, len(new) - 1)
        if num_swapped:
            self._swapped[request_id] = (keep, host[: -(-keep // self.block_size)])
        elif keep < num_computed:
            if keep:
                self.kv.release(self.kv.cut(request_id, keep))
            else:
                self._free_request_blocks(request)
        request.num_computed_tokens = keep
        if num_swapped and not keep:
            del self._swapped[request_id]
        set_prompt_tokens(request, new, lcp, self.hash_block_size)
        prompt.token_ids = new
        return prompt.invalidated_from(min(lcp, len(new) - 1), num_computed)

    # ---- a step -------------------------------------------------------------------------------------------------

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        step = self._step = PublishedStep() if self._rank is None else self._planned()
        running, waiting = self.running, self.waiting
        if self._rank is None:
            shown = [request for request in waiting if request.request_id in self._ready]
        else:
            shown = step.admitted
            self.running = [request for request in running if request.request_id in step.num_tokens]
        shown_ids = {request.request_id for request in shown}
        self.waiting = self._queue_of(shown)
        step.other_waiting = self._queue_of(request for request in waiting if request.request_id not in shown_ids)
        try:
            output = super().schedule(throttle_prefills)
        finally:
            step.other_waiting.extendleft(reversed(self.waiting))
            self.waiting = step.other_waiting
            if self._rank is not None:
                self.running = _merged(running, self.running)
        self._record_step(output)
        if output.num_scheduled_tokens and (self._copies.outs or self._copies.ins):
            output.kv_connector_metadata, self._copies = self._copies, SwapMetadata()
        return output

    def has_requests(self) -> bool:
        # Streams without work would keep the engine core busy with empty steps.
        return bool(self._ready) or bool(self.has_finished_requests())

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        result = super().update_from_output(scheduler_output, model_runner_output)
        for request_id in scheduler_output.num_scheduled_tokens:
            if (request := self.requests.get(request_id)) is not None:
                self._note_work(request)
        return result

    def _queue_of(self, requests: Iterable[Request]) -> Any:
        queue = create_request_queue(self.policy)
        queue.extend(requests)
        return queue

    def _planned(self) -> PublishedStep:
        """Who gets how many tokens: in the policy's order, while tokens last and the blocks would fit empty memory."""
        rank, prompts, block_size = self._rank, self.prompts, self.block_size
        assert rank is not None
        step = PublishedStep()
        num_tokens, num_blocks = self.max_num_scheduled_tokens, self.kv.num_total
        num_places = self.max_num_running_reqs - len(self.running)
        for request in sorted(self._ready.values(), key=lambda request: rank(request, prompts.get(request.request_id))):
            is_running = request.status is RequestStatus.RUNNING
            num_new = min(self._num_wanted(request), num_tokens)
            needed = -(-(request.num_computed_tokens + num_new) // block_size) + self._num_extra_blocks
            if num_new <= 0 or needed > num_blocks or not (is_running or num_places > 0):
                step.left_out.append(request)
                continue
            step.num_tokens[request.request_id] = num_new
            num_tokens -= num_new
            num_blocks -= needed
            if not is_running:
                step.admitted.append(request)
                num_places -= 1
        step.running = self.running
        return step

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """vLLM asks here, last of all, how many tokens a request may compute in this step."""
        if self._rank is not None:
            num_new_tokens = min(num_new_tokens, self._step.num_tokens.get(request.request_id, 0))
        prompt = self.prompts.get(request.request_id)
        if prompt is not None and prompt.is_open:
            num_new_tokens = min(num_new_tokens, request.num_tokens - 1 - num_computed_tokens)
        return max(num_new_tokens, 0)

    # ---- the end ------------------------------------------------------------------------------------------------

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        request_id = request.request_id
        self._ready.pop(request_id, None)
        self._swapped.pop(request_id, None)
        self._scheduled_now.discard(request_id)
        self._admission_order.pop(request_id, None)
        self._resident.discard(request_id)
        if (prompt := self.prompts.pop(request_id, None)) is not None:
            aborted = request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)
            self.trail.end(request_id, EventType.ABORTED if aborted else EventType.FINISHED, **prompt.counters())
        return super()._free_request(request, delay_free_blocks=delay_free_blocks)


def _merged(before: list[Request], now: list[Request]) -> list[Request]:
    """What ran before and still does, where it was, and behind it what was admitted."""
    still = [request for request in before if request.status is RequestStatus.RUNNING]
    known = {request.request_id for request in still}
    return still + [request for request in now if request.request_id not in known]
