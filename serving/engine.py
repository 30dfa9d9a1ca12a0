"""What an engine is: prompts as token ids that can still grow, and the tokens that come out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stream2llm_sdk.context import ContextMode
from stream2llm_sdk.trail import EventTrail

__all__ = ["Engine", "EngineLimits", "PromptUpdate", "Stream", "StreamOutput", "StreamProgress"]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one request may use.

    Attributes:
        max_model_len: prompt and answer together, in tokens.
        max_prompt_tokens: the longest prompt that leaves room for one token of answer.
        num_blocks: KV blocks that requests share.
        block_size: tokens in a block.
    """

    max_model_len: int
    max_prompt_tokens: int
    num_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class PromptUpdate:
    """What an update did.

    Attributes:
        num_tokens: the prompt's length now.
        lcp: tokens that the prompt has in common with the one before.
        num_invalidated: tokens that had been computed and are void.
    """

    num_tokens: int
    lcp: int
    num_invalidated: int


@dataclass(frozen=True, slots=True)
class StreamOutput:
    """New output of a request.

    Attributes:
        token_ids: new tokens since the output before.
        text: their text ("" where the engine gives none).
        finish_reason: None while more may come; then 'stop', 'length', 'abort' or 'error'.
        logprobs: for each new token the log-probabilities by token id, where `sampling` asks for them: its own, and
            those of the `logprobs` most likely tokens; else None.
    """

    token_ids: tuple[int, ...]
    text: str = ""
    finish_reason: str | None = None
    logprobs: tuple[Mapping[int, float], ...] | None = None


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """Where a request stands in the engine, in tokens.

    Attributes:
        num_tokens: prompt and output known so far.
        num_computed: tokens that hold KV.
        num_tokens_computed: tokens run through the model for it.
        num_tokens_recomputed: those that had been computed before, and lost to others.
        num_tokens_invalidated: computed tokens that updates made void.
        num_tokens_cached: tokens taken from the prefix cache.
        num_tokens_loaded: tokens that came back from host memory.
        num_preemptions: how often its KV was taken away.
        num_updates: updates applied.
    """

    num_tokens: int = 0
    num_computed: int = 0
    num_tokens_computed: int = 0
    num_tokens_recomputed: int = 0
    num_tokens_invalidated: int = 0
    num_tokens_cached: int = 0
    num_tokens_loaded: int = 0
    num_preemptions: int = 0
    num_updates: int = 0


class Stream(Protocol):
    """One request. Its prompt is open until `finish`; nothing is sampled before.

    Use it as an async context manager: leaving it aborts what is not finished. Iterating gives the outputs.
    """

    @property
    def request_id(self) -> str:
        """Its name in the engine."""
        ...

    @property
    def is_streaming_prompt(self) -> bool:
        """Whether the prompt was opened to grow."""
        ...

    @property
    def is_streaming_prompt_finished(self) -> bool:
        """Whether the prompt is complete."""
        ...

    @property
    def is_prompt_update(self) -> bool:
        """Whether updates replace the prompt (update mode) or only append to it."""
        ...

    async def append(self, token_ids: Sequence[int]) -> PromptUpdate:
        """Puts tokens behind the prompt."""
        ...

    async def replace(self, token_ids: Sequence[int], *, final: bool = False) -> PromptUpdate:
        """Gives the whole prompt anew as `token_ids`; the KV of the common prefix is kept. Update mode only. `final`
        finishes it."""
        ...

    async def finish(self, token_ids: Sequence[int] = ()) -> PromptUpdate:
        """Puts last tokens behind the prompt and lets sampling begin."""
        ...

    async def abort(self) -> None:
        """Ends the request wherever it stands. May be called again, and after the end."""
        ...

    async def progress(self) -> StreamProgress:
        """Where the request stands."""
        ...

    async def trail(self) -> EventTrail:
        """The events so far; all of them once the request has ended."""
        ...

    def __aiter__(self) -> AsyncIterator[StreamOutput]: ...

    async def __aenter__(self) -> Stream: ...

    async def __aexit__(self, *exc_info: object) -> None: ...


class Engine(Protocol):
    """Serves many requests at once."""

    @property
    def limits(self) -> EngineLimits:
        """What one request may use."""
        ...

    async def open(
        self,
        token_ids: Sequence[int],
        sampling: Mapping[str, Any] | None = None,
        *,
        mode: ContextMode | str = ContextMode.APPEND,
        finished: bool = False,
        request_id: str | None = None,
        arrival_time: float | None = None,
        tenant: str = "",
        tag: str = "",
    ) -> Stream:
        """Opens a request with the beginning of its prompt.

        Args:
            token_ids: the beginning of the prompt, or all of it. May be empty while the prompt is open.
            sampling: fields of vLLM's `SamplingParams`.
            mode: 'append', or 'update' for a prompt that may be replaced.
            finished: whether the prompt is complete already (a plain request).
            request_id: a name for it, made up if left out.
            arrival_time: seconds since the epoch by which FCFS ranks it; now, if left out.
            tenant: who it belongs to: limits and fair shares are kept for each tenant.
            tag: what kind of context it gets, such as the retriever's name; forecasts are learned for each tag.
        """
        ...

    async def aclose(self) -> None:
        """Ends every request and the engine."""
        ...
