"""Whom a policy that looks ahead lets in: those that can run to the ends of their answers in the memory there is."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from vllm.v1.request import Request

from stream2llm_sdk.serving.look_ahead import LookAhead, Memory, fits_to_the_end
from stream2llm_sdk.serving.ordered_scheduler import is_admitted
from stream2llm_sdk.serving.preempting_scheduler import PreemptingScheduler

__all__ = ["AdmittingScheduler"]

_UNKNOWN_OUTPUT = 1_024
"""Tokens that a look-ahead keeps free for an answer of which nothing but the limit is known."""


class AdmittingScheduler(PreemptingScheduler):
    """Foresees the memory of requests, for the plan to admit no more than can end."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self._may_look_ahead = bool(self.options.get("look_ahead", True))

    def _look_ahead(self) -> LookAhead | None:
        """For one plan; None where it would find nothing."""
        if not self._must_look_ahead():
            return None
        return LookAhead(self._memory_of_admitted, self._capacity, num_kept=self._num_tokens_of_idle_sessions())

    def _must_look_ahead(self) -> bool:
        """Whether the policy looks ahead, and there are so many requests that it could find anything."""
        looks_ahead = self._looks_ahead
        if looks_ahead == "none":
            return False
        if looks_ahead == "all" and self.num_open:
            return True
        return self.outlook.most_tokens + len(self.requests) * (self.block_size - 1) > self._capacity

    def _all_fit_to_the_end(self) -> bool:
        return fits_to_the_end((self._memory(request) for _, request in self.order), self._capacity)

    def _memory_of_admitted(self) -> Iterator[Memory]:
        """Of those that a look-ahead counts. Idle streams are the first to give theirs up."""
        for _, request in self.order:
            if is_admitted(request) and self._is_looked_at(request) and not self._is_idle_session(request):
                yield self._memory(request)

    def _num_tokens_of_idle_sessions(self) -> float:
        """Tokens of KV that nobody gets until vLLM's own streaming sessions have input again."""
        if not self._num_foreign_sessions:
            return 0.0
        held = sum(
            self.kv.num_held(request.request_id) for request in self.requests.values() if self._is_idle_session(request)
        )
        return self._num_tokens_of(held)

    @property
    def _looks_ahead(self) -> str:
        return self.scheduling_policy.looks_ahead if self._may_look_ahead else "none"

    def _is_looked_at(self, request: Request) -> bool:
        """Whether the policy's look-ahead decides on the request, and counts it."""
        looks_ahead = self._looks_ahead
        return looks_ahead == "all" or (looks_ahead == "complete" and not self._is_open(request))

    def _memory(self, request: Request) -> Memory:
        """Tokens of its final prompt and of its output so far, with the rest of a last block that it may leave unused,
        and the steps still to come: those of its prefill, and one for each token of output."""
        prompt = self.prompts.get(request.request_id)
        num_tokens = request.num_prompt_tokens
        if prompt is not None and prompt.is_open:
            num_tokens = max(num_tokens, min(prompt.final_num_tokens, self.max_model_len - 1))
        num_output: float = self.outlook.output(request).num_tokens
        if num_output >= request.max_tokens:  # nothing is known but the limit, which may be far off
            num_output = min(num_output, max(_UNKNOWN_OUTPUT, request.num_output_tokens))
        num_tokens += request.num_output_tokens
        # Without its prefill, one that is far from its end would look as near to it as one that answers already, and
        # whoever waits for its memory would be passed by for ever.
        prefill_steps = max(0, num_tokens - 1 - request.num_computed_tokens) / self.max_num_scheduled_tokens
        to_come = prefill_steps + max(1.0, num_output - request.num_output_tokens)
        return num_tokens + self.block_size - 1, to_come

    @cached_property
    def _capacity(self) -> float:
        """Tokens of KV that there are."""
        return self._num_tokens_of(self.kv.num_total)

    def _num_tokens_of(self, num_blocks: int) -> float:
        """Tokens in so many blocks: each group of layers keeps blocks of its own for the same tokens."""
        return num_blocks * self.block_size / len(self.kv_cache_config.kv_cache_groups)
