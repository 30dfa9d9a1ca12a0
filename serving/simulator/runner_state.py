"""What vLLM's model runners keep between steps, and how a scheduler's message changes it.

The two runners differ in what they trust. V1 (`v1/worker/gpu_model_runner.py`) takes the number of computed
tokens from every message, keeps preempted requests until they finish, and under asynchronous scheduling has
only placeholders on the host for the tokens it sampled. V2 (`v1/worker/gpu/model_runner.py`) counts computed
tokens itself, forgets preempted requests, and must be sent every resumed request whole. Both forget what they
knew of a live request whose id arrives again as a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from stream2llm_sdk.serving.simulator.content import PLACEHOLDER_TOKEN_ID, TokenRow
from stream2llm_sdk.serving.simulator.kv_memory import BlockTable, KVMemory, RunnerStateError

__all__ = ["RunnerRequest", "RunnerState", "V1RunnerState", "V2RunnerState"]


class RunnerRequest:
    """One request as the model runner knows it."""

    __slots__ = ("num_computed", "num_on_host", "num_prompt", "request_id", "row", "table")

    def __init__(self, request_id: str, table: BlockTable, row: TokenRow, num_prompt: int, num_computed: int) -> None:
        self.request_id = request_id
        self.table = table
        self.row = row
        # Tokens of the prompt (V1), or of everything known when the request was sent (V2).
        self.num_prompt = num_prompt
        self.num_computed = num_computed
        # V1 under asynchronous scheduling: tokens whose ids are on the host; later ones are placeholders.
        self.num_on_host = len(row)


class RunnerState(Protocol):
    """The part of a model runner that outlives a step."""

    requests: dict[str, RunnerRequest]

    def update(self, scheduler_output: Any) -> None:
        """Take over the changes that a `SchedulerOutput` announces."""

    def span(self, request_id: str, num_tokens: int) -> tuple[RunnerRequest, int, int]:
        """The request and the positions `start .. stop - 1` that the step computes, inputs in place."""

    def samples(self, request: RunnerRequest, stop: int) -> bool:
        """Whether the runner keeps the token sampled after position `stop - 1`."""

    def finish_step(self, computed: Sequence[tuple[RunnerRequest, int, int | None]]) -> None:
        """Take over a step's results: `(request, stop, sampled token or None)` for each of the batch."""


class _State:
    """What both runners share."""

    def __init__(self, memory: KVMemory, max_num_requests: int, max_model_len: int) -> None:
        self.requests: dict[str, RunnerRequest] = {}
        self._memory = memory
        self._max_num_requests = max_num_requests
        self._max_model_len = max_model_len

    def _lookup(self, request_id: str) -> RunnerRequest:
        try:
            return self.requests[request_id]
        except KeyError:
            raise RunnerStateError(f"request {request_id!r} was never sent to the runner, or dropped since") from None

    def _forget(self, request_id: str) -> None:
        request = self.requests.pop(request_id, None)
        if request is not None:
            self._memory.release(request.table)

    def _feed_back(self, request: RunnerRequest, position: int, token_id: int, num_known: int) -> None:
        """Put the token sampled last at `position`, as the device does without looking at what is there."""
        known = int(request.row.tokens[position])
        if position < num_known and known != token_id:
            raise RunnerStateError(
                f"request {request.request_id!r}: the token sampled one step ago replaces token {known} at position "
                f"{position}, which is part of its prompt"
            )
        request.row.put(position, token_id)

    def _check_length(self, request_id: str, num_tokens: int) -> None:
        if num_tokens > self._max_model_len:
            raise RunnerStateError(
                f"request {request_id!r} has {num_tokens} tokens, more than max_model_len={self._max_model_len}"
            )


class V1RunnerState(_State):
    """State of `GPUModelRunner`: cached requests, the persistent batch, and the tokens sampled last."""

    def __init__(self, memory: KVMemory, max_num_requests: int, max_model_len: int, *, async_scheduling: bool) -> None:
        super().__init__(memory, max_num_requests, max_model_len)
        self._async = async_scheduling
        self._batch: set[str] = set()
        # Sampled in the previous step and still in the batch: fed to the next step on the device.
        self._last_sampled: dict[str, int] = {}

    def update(self, scheduler_output: Any) -> None:
        """See `RunnerState.update`; mirrors `GPUModelRunner._update_states`."""
        for request_id in scheduler_output.finished_req_ids:
            self._forget(request_id)
            self._leave_batch(request_id)
        cached = scheduler_output.scheduled_cached_reqs
        staying = scheduler_output.num_scheduled_tokens.keys() - cached.resumed_req_ids
        for request_id in self._batch - staying:
            self._leave_batch(request_id)
        for data in scheduler_output.scheduled_new_reqs:
            self._take_new(data)
        for index in range(len(cached.req_ids)):
            self._take_cached(cached, index)
        if len(self._batch) > self._max_num_requests:
            raise RunnerStateError(f"a batch of {len(self._batch)} requests, more than {self._max_num_requests}")

    def span(self, request_id: str, num_tokens: int) -> tuple[RunnerRequest, int, int]:
        """See `RunnerState.span`; mirrors `_prepare_inputs` and `_prepare_input_ids`."""
        request = self._lookup(request_id)
        start, stop = request.num_computed, request.num_computed + num_tokens
        row = request.row
        if stop > len(row):
            raise RunnerStateError(
                f"request {request_id!r}: the step runs up to position {stop - 1}, but the runner knows "
                f"{len(row)} tokens"
            )
        on_host = stop
        if request_id in self._last_sampled:
            # The device overwrites the last input token of every request it sampled for one step ago.
            self._feed_back(request, stop - 1, self._last_sampled[request_id], request.num_on_host)
            on_host = stop - 1
        if on_host > max(start, request.num_on_host):
            raise RunnerStateError(
                f"request {request_id!r}: the token at position {max(start, request.num_on_host)} was sampled "
                f"on the device and never reached the host"
            )
        return request, start, stop

    def samples(self, request: RunnerRequest, stop: int) -> bool:
        """See `RunnerState.samples`."""
        return stop >= len(request.row)

    def finish_step(self, computed: Sequence[tuple[RunnerRequest, int, int | None]]) -> None:
        """See `RunnerState.finish_step`; mirrors `_bookkeeping_sync`."""
        self._last_sampled = {}
        for request, _, token_id in computed:
            if token_id is None:
                continue
            self._check_length(request.request_id, len(request.row) + 1)
            if self._async:
                request.row.append(PLACEHOLDER_TOKEN_ID)
                self._last_sampled[request.request_id] = token_id
            else:
                request.row.append(token_id)
                request.num_on_host = len(request.row)

    def _leave_batch(self, request_id: str) -> None:
        self._batch.discard(request_id)
        self._last_sampled.pop(request_id, None)

    def _take_new(self, data: Any) -> None:
        request_id = data.req_id
        self._check_length(request_id, len(data.prompt_token_ids))
        row = TokenRow(data.prompt_token_ids)
        request = self.requests.get(request_id)
        if request is None:
            request = RunnerRequest(request_id, self._memory.new_table(request_id), row, len(row), 0)
            self.requests[request_id] = request
        else:
            self._leave_batch(request_id)
            request.row, request.num_prompt = row, len(row)
        request.num_on_host = len(row)
        request.num_computed = data.num_computed_tokens
        self._memory.replace_blocks(request.table, data.block_ids)
        self._batch.add(request_id)

    def _take_cached(self, cached: Any, index: int) -> None:
        request = self._lookup(cached.req_ids[index])
        num_outputs = cached.num_output_tokens[index]
        new_blocks = cached.new_block_ids[index]
        request.num_computed = cached.num_computed_tokens[index]
        if request.num_prompt + num_outputs < len(request.row):
            request.row.truncate(request.num_prompt + num_outputs)
            request.num_on_host = min(request.num_on_host, len(request.row))
        if request.request_id in cached.resumed_req_ids:
            if new_blocks is None:
                raise RunnerStateError(f"request {request.request_id!r} is resumed without any block")
            self._memory.replace_blocks(request.table, new_blocks)
        elif new_blocks is not None:
            self._memory.append_blocks(request.table, new_blocks)
        if request.request_id not in self._batch:
            self._join_batch(request, cached, num_outputs)

    def _join_batch(self, request: RunnerRequest, cached: Any, num_outputs: int) -> None:
        if self._async and num_outputs > 0:
            if request.request_id not in cached.all_token_ids:
                raise RunnerStateError(f"request {request.request_id!r} rejoins the batch without its token ids")
            outputs = cached.all_token_ids[request.request_id][-num_outputs:]
            row = TokenRow([*request.row.tokens[: request.num_prompt].tolist(), *outputs])
            self._check_length(request.request_id, len(row))
            self._memory.distrust(request.table, row.common_prefix(request.row))
            request.row = row
        request.num_on_host = len(request.row)
        self._batch.add(request.request_id)


class V2RunnerState(_State):
    """State of the V2 `GPUModelRunner`: request slots with their own token and progress counters."""

    def __init__(self, memory: KVMemory, max_num_requests: int, max_model_len: int) -> None:
        super().__init__(memory, max_num_requests, max_model_len)
        self._last_sampled: dict[str, int] = {}

    def update(self, scheduler_output: Any) -> None:
        """See `RunnerState.update`; mirrors `finish_requests`, `add_requests`, `update_requests`."""
        for request_id in (*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())):
            self._forget(request_id)
        for data in scheduler_output.scheduled_new_reqs:
            self._take_new(data)
        cached = scheduler_output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            raise RunnerStateError(f"requests {sorted(cached.resumed_req_ids)} are resumed without being sent whole")
        for request_id, num_computed, new_blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            request = self._lookup(request_id)
            if num_computed != request.num_computed:
                raise RunnerStateError(
                    f"request {request_id!r}: the scheduler counts {num_computed} computed tokens, the runner "
                    f"{request.num_computed}"
                )
            if new_blocks is not None:
                self._memory.append_blocks(request.table, new_blocks)

    def span(self, request_id: str, num_tokens: int) -> tuple[RunnerRequest, int, int]:
        """See `RunnerState.span`; mirrors `prepare_prefill_inputs` and `combine_sampled_…`."""
        request = self._lookup(request_id)
        start, stop = request.num_computed, request.num_computed + num_tokens
        num_prefill, row = request.num_prompt, request.row
        if stop > len(row) or (start >= num_prefill and num_tokens > 1):
            raise RunnerStateError(
                f"request {request_id!r}: the step runs positions {start} to {stop - 1}, but the runner knows "
                f"{len(row)} tokens, {num_prefill} of them sent by the scheduler"
            )
        if stop > num_prefill:
            self._feed_back(request, stop - 1, self._last_sampled[request_id], len(row))
        return request, start, stop

    def samples(self, request: RunnerRequest, stop: int) -> bool:
        """See `RunnerState.samples`."""
        return stop >= request.num_prompt

    def finish_step(self, computed: Sequence[tuple[RunnerRequest, int, int | None]]) -> None:
        """See `RunnerState.finish_step`; mirrors `post_update`."""
        for request, stop, token_id in computed:
            request.num_computed = stop
            if token_id is not None:
                self._check_length(request.request_id, len(request.row) + 1)
                request.row.append(token_id)
                self._last_sampled[request.request_id] = token_id

    def _forget(self, request_id: str) -> None:
        super()._forget(request_id)
        self._last_sampled.pop(request_id, None)

    def _take_new(self, data: Any) -> None:
        request_id, token_ids = data.req_id, data.prefill_token_ids
        if token_ids is None:
            raise RunnerStateError(f"request {request_id!r} was sent without prefill_token_ids")
        if len(token_ids) < len(data.prompt_token_ids):
            raise RunnerStateError(
                f"request {request_id!r}: {len(token_ids)} prefill tokens for a prompt of {len(data.prompt_token_ids)}"
            )
        self._check_length(request_id, len(token_ids))
        self._forget(request_id)
        if len(self.requests) >= self._max_num_requests:
            raise RunnerStateError(
                f"request {request_id!r} needs a slot, but all {self._max_num_requests} (max_num_seqs) are held by "
                f"requests that neither finished nor were preempted"
            )
        table = self._memory.new_table(request_id)
        row = TokenRow(token_ids)
        self.requests[request_id] = RunnerRequest(request_id, table, row, len(row), data.num_computed_tokens)
        self._memory.append_blocks(table, data.block_ids)
