"""Prompts that grow and change inside vLLM's scheduler: the part that is about one request at a time.

Which request gets tokens, and whose KV has to go, is decided in `scheduler.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from stream2llm_sdk.serving.lcp import TokenArray, longest_common_prefix, token_array
from stream2llm_sdk.serving.streaming_prompt import EXTRA_ARGS_KEY, StreamingPrompt, set_prompt_tokens
from stream2llm_sdk.serving.traced_scheduler import TracedScheduler
from stream2llm_sdk.trail import EventType

__all__ = ["StreamingPromptScheduler"]


class StreamingPromptScheduler(TracedScheduler):
    """vLLM's scheduler with requests whose prompt changes between steps.

    A request is a streaming prompt when its `SamplingParams.extra_args["stream2llm"]` says so (`StreamingPrompt`).
    Its prompt is changed through `update`. While it is open its last token is held back, so that nothing is ever
    sampled from a partial prompt; when nothing is left to compute it is parked outside vLLM's queues and costs no
    steps.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        # Open streams with nothing to compute; they are in none of vLLM's queues.
        self.parked: dict[str, Request] = {}
        self.num_open = 0
        # The order in which requests came, whatever happened to them since.
        self._sequence: dict[str, int] = {}
        self._num_added = 0

    # ---- the utility channel ------------------------------------------------------------------------------------

    def __call__(self, operation: str, arguments: list[Any]) -> Any:
        """Operations for the engine's front end. vLLM's engine core looks utility methods up by attribute name, and
        this object is its attribute `scheduler`.

        `update(request_id, kind, token_ids, final, sent_s)` changes a prompt, `trail(request_ids)` takes events,
        `progress(request_ids)` gives counters, `limits()` what the engine can hold, `snapshot()` how it stands.
        """
        operations: dict[str, Callable[..., Any]] = {
            "update": self.update,
            "trail": self.trail.take,
            "progress": self.progress,
            "limits": self.limits,
            "snapshot": self.snapshot,
        }
        return operations[operation](*arguments)

    def limits(self) -> dict[str, Any]:
        """What a single request may use: `max_prompt_tokens` leaves room for one output token."""
        capacity = self.kv.max_tokens(self.max_model_len)
        return {
            "max_model_len": self.max_model_len,
            "max_prompt_tokens": max(0, capacity - 1),
            "num_blocks": self.kv.num_total,
            "block_size": self.block_size,
        }

    def snapshot(self) -> dict[str, Any]:
        """How the scheduler stands, for metrics."""
        return {"num_parked": len(self.parked), "num_free_blocks": self.kv.num_free}

    def progress(self, request_ids: Iterable[str]) -> dict[str, dict[str, int]]:
        """Counters by request id, with `num_tokens` (the prompt and output now) and `num_computed`."""
        found = {}
        for request_id in request_ids:
            request, prompt = self.requests.get(request_id), self.prompts.get(request_id)
            if request is not None and prompt is not None:
                found[request_id] = {
                    "num_tokens": request.num_tokens,
                    "num_computed": request.num_computed_tokens,
                    **prompt.counters(),
                }
        return found

    # ---- a request's life ---------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        flags = _flags(request)
        if request.request_id not in self.requests:
            self._sequence[request.request_id] = self._num_added
            self._num_added += 1
        if flags is None or request.request_id in self.requests:
            super().add_request(request)
            return
        # The front end's list belongs to the front end: an in-process client hands over the object itself.
        request.prompt_token_ids = list(request.prompt_token_ids or ())
        prompt = StreamingPrompt.from_flags(
            flags, token_array(request.prompt_token_ids), self.trail.clock.monotonic_s()
        )
        self.prompts[request.request_id] = prompt
        self.num_open += prompt.is_open
        self.trail.begin(request.request_id, flags.get("sent_s"))
        if not prompt.is_open:
            self.trail.mark(request.request_id, EventType.CONTEXT_COMPLETE, flags.get("sent_s"))
        super().add_request(request)
        if prompt.is_open and self._num_wanted(request) <= 0:
            self._remove_from_queues(request)
            self._park(request)

    def update(
        self,
        request_id: str,
        kind: str,
        token_ids: bytes | list[int] | TokenArray,
        final: bool,
        sent_s: float,
    ) -> dict[str, Any]:
        """Changes an open prompt between two steps.

        Args:
            request_id: the engine's id of the request.
            kind: 'append' (`token_ids` go behind the prompt) or 'replace' (`token_ids` are the whole prompt).
            token_ids: ids, as int32 bytes or a sequence.
            final: whether the prompt is finished with this.
            sent_s: when it was sent, on the monotonic clock.

        Returns:
            `num_tokens`, `lcp` and `num_invalidated`; or `error`, one of 'unknown', 'finished', 'empty' and
            'too_long', and then nothing has changed.
        """
        request, prompt = self.requests.get(request_id), self.prompts.get(request_id)
        if request is None or prompt is None or request.is_finished():
            return {"error": "unknown"}
        if not prompt.is_open:
            return {"error": "finished"}
        new = token_array(token_ids)
        if kind == "append":
            lcp = len(prompt.token_ids)
            new = np.concatenate((prompt.token_ids, new))
        else:
            lcp = longest_common_prefix(prompt.token_ids, new)
        if len(new) >= self.max_model_len:
            return {"error": "too_long"}
        if final and not len(new):
            return {"error": "empty"}
        self.trail.mark(request_id, EventType.CHUNK_ARRIVED, sent_s, num_tokens=len(new) - lcp)
        prompt.num_updates += 1
        prompt.last_chunk_arrival_time = sent_s
        if final:
            prompt.completion_s = sent_s
        num_invalidated = self._apply(request, prompt, new, lcp, final)
        self.trail.mark(
            request_id,
            EventType.PROMPT_UPDATED,
            lcp=lcp,
            num_tokens=len(new),
            num_invalidated=num_invalidated,
        )
        if final:
            self.trail.mark(request_id, EventType.CONTEXT_COMPLETE, sent_s)
        return {"num_tokens": len(new), "lcp": lcp, "num_invalidated": num_invalidated}

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self.parked.pop(request.request_id, None)
        return finished

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        request_id = request.request_id
        self._resident.discard(request_id)
        self._admission_order.pop(request_id, None)
        self._sequence.pop(request_id, None)
        self._scheduled_now.discard(request_id)
        prompt = self.prompts.pop(request_id, None)
        if prompt is not None:
            self.num_open -= prompt.is_open
            if prompt.resumption is not None:
                self._note_resumed(request_id, prompt, request.num_computed_tokens)
            aborted = request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)
            state = EventType.ABORTED if aborted else EventType.FINISHED
            self.trail.end(
                request_id,
                state,
                reason=str(request.get_finished_reason()),
                num_prompt_tokens=request.num_prompt_tokens,
                num_output_tokens=request.num_output_tokens,
                max_tokens=request.max_tokens,
                tenant=prompt.tenant,
                tag=prompt.tag,
                **prompt.counters(),
            )
        return super()._free_request(request, delay_free_blocks=delay_free_blocks)

    # ---- a changed prompt ---------------------------------------------------------------------------------------

    def _apply(self, request: Request, prompt: StreamingPrompt, new: TokenArray, lcp: int, final: bool) -> int:
        """Gives the request its new prompt and keeps the KV that is still right. Returns the tokens made void."""
        num_computed = request.num_computed_tokens
        self._withdraw(request)
        # Something must be left to compute, or there would be no logits to sample from.
        keep = max(0, min(num_computed, lcp, len(new) - 1))
        self._truncate(request, keep)
        num_invalidated = prompt.invalidated_from(max(0, min(lcp, len(new) - 1)), num_computed)
        set_prompt_tokens(request, new, lcp, self.hash_block_size)
        prompt.token_ids = new
        if final:
            prompt.is_streaming_prompt_finished = True
            self.num_open -= 1
        self._resubmit(request)
        return num_invalidated

    def _truncate(self, request: Request, keep: int) -> None:
        """Drops the KV at positions >= `keep`; fewer may be kept where a cut is not possible."""
        if keep >= request.num_computed_tokens:
            return
        keep = self.kv.resumable_at(request.request_id, keep)
        if keep <= 0:
            self._free_request_blocks(request)
            self._forget_in_worker(request)
        else:
            dropped = self.kv.cut(request.request_id, keep)
            if self._request_blocks_can_be_freed(request):
                self.kv.release(dropped)
            elif dropped:
                self.deferred_frees.append((self.sched_step_seq, dropped))
        request.num_computed_tokens = keep

    def _forget_in_worker(self, request: Request) -> None:
        if request.request_id in self._resident:
            self._resident.discard(request.request_id)
            self.reset_preempted_req_ids.add(request.request_id)
        self._admission_order.pop(request.request_id, None)

    def _withdraw(self, request: Request) -> None:
        """Takes the request out of whatever holds it, and voids its steps in flight: they ran the old prompt."""
        if request.status == RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.request_id in self.parked:
            del self.parked[request.request_id]
            self.num_waiting_for_streaming_input -= 1
        else:
            self._remove_from_queues(request)
        self._inflight_prefills.discard(request)
        request.is_prefill_chunk = False
        if request.num_in_flight_tokens:
            request.drop_stale_output = True
            request.num_stale_output_tokens = request.num_in_flight_tokens
            request.num_output_placeholders = 0

    def _resubmit(self, request: Request) -> None:
        """Queues the request as a new one, so that the next step sends its whole prompt to the worker."""
        request.status = RequestStatus.WAITING
        if self._num_wanted(request) <= 0:
            self._park(request)
            return
        self._enqueue_by_arrival(request)
        holds = self.kv.holds(request.request_id)
        self._record_state(request, EventType.KV_ON_GPU if holds else EventType.QUEUED)

    def _enqueue_by_arrival(self, request: Request) -> None:
        """Queues a waiting request where it would be had it never left: an update costs it no place. Preempted
        requests stay in front, as vLLM puts them."""
        sequence = self._sequence
        queue = self.kv_holding_waiting if self._holds_kv_blocks(request) else self.waiting
        if self.policy != SchedulingPolicy.FCFS:
            queue.add_request(request)
            return
        later = (
            index
            for index, other in enumerate(queue)
            if other.status != RequestStatus.PREEMPTED and sequence[other.request_id] > sequence[request.request_id]
        )
        queue.insert(next(later, len(queue)), request)

    def _park(self, request: Request) -> None:
        prompt = self.prompts[request.request_id]
        if prompt.resumption is not None:
            self._note_resumed(request.request_id, prompt, request.num_computed_tokens)
        request.status = RequestStatus.WAITING_FOR_STREAMING_REQ
        self._inflight_prefills.discard(request)
        self.parked[request.request_id] = request
        self.num_waiting_for_streaming_input += 1
        holds = self.kv.holds(request.request_id)
        if holds or self.trail.current_state(request.request_id) is EventType.SCHEDULED:
            self._record_state(request, EventType.KV_ON_GPU if holds else EventType.QUEUED)

    def _remove_from_queues(self, request: Request) -> None:
        for queue in (self.waiting, self.kv_holding_waiting):
            queue.remove_requests([request])
        self.deferred_waiting.discard(request)

    def _park_idle_streams(self) -> None:
        # Whoever runs and wants nothing got its last tokens in the step before.
        idle = []
        for request_id in self._scheduled_now:
            if self.prompts[request_id].is_open:
                request = self.requests[request_id]
                if request.status is RequestStatus.RUNNING and self._num_wanted(request) <= 0:
                    idle.append(request)
        if idle:
            leaving = set(idle)
            self.running = [request for request in self.running if request not in leaving]
            for request in sorted(idle, key=lambda request: self._sequence[request.request_id]):
                self._park(request)

    # ---- held-back token ----------------------------------------------------------------------------------------

    def _is_open(self, request: Request) -> bool:
        prompt = self.prompts.get(request.request_id)
        return prompt is not None and prompt.is_open

    def _is_session(self, request: Request) -> bool:
        """Whether it is one of vLLM's own streaming-input sessions."""
        return bool(request.resumable) and request.request_id not in self.prompts

    def _is_idle_session(self, request: Request) -> bool:
        """Whether it is one that waits for input."""
        return request.status is RequestStatus.WAITING_FOR_STREAMING_REQ and request.request_id not in self.prompts

    @property
    def _num_foreign_sessions(self) -> int:
        """vLLM's own streaming-input sessions that wait for input."""
        return int(self.num_waiting_for_streaming_input) - len(self.parked)

    def _num_wanted(self, request: Request) -> int:
        """Tokens that the request could compute now; the last one of an open prompt is held back."""
        placeholders = request.num_output_placeholders
        if placeholders and (
            request.num_computed_tokens + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens
        ):
            return 0  # its last token is already in flight
        wanted = request.num_tokens_with_spec + placeholders - request.num_computed_tokens
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            wanted = max(1, wanted)  # a prompt that was loaded whole computes its last token again
        return int(wanted - self._is_open(request))

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """vLLM asks here, last of all, how many tokens a request may compute in this step."""
        num_new_tokens = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        if self.num_open and self._is_open(request):
            num_new_tokens = min(num_new_tokens, request.num_tokens - 1 - num_computed_tokens)
        return max(num_new_tokens, 0)

    # ---- what vLLM counts ---------------------------------------------------------------------------------------

    def get_request_counts(self) -> tuple[int, int]:
        num_running, num_waiting = super().get_request_counts()
        return num_running, num_waiting + len(self.parked)

    def get_num_unfinished_requests(self) -> int:
        num_unfinished = int(super().get_num_unfinished_requests())
        if self._pause_state == PauseState.PAUSED_NEW:
            num_unfinished += len(self.parked)  # not among the block holders that vLLM counts then
        return num_unfinished


def _flags(request: Request) -> dict[str, Any] | None:
    params = request.sampling_params
    flags = (params.extra_args or {}).get(EXTRA_ARGS_KEY) if params is not None else None
    return dict(flags) if flags is not None else None
