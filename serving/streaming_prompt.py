"""The scheduler's side of one request of the SDK: its flags and its counters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stream2llm_sdk.serving.lcp import TokenArray

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["EXTRA_ARGS_KEY", "Resumption", "StreamingPrompt", "set_prompt_tokens"]

# `SamplingParams.extra_args` carries the request's flags under this key.
EXTRA_ARGS_KEY = "stream2llm"


@dataclass(slots=True)
class Resumption:
    """A preempted request on its way back.

    Attributes:
        began_s: when it was admitted again, on the trail's clock.
        target: tokens that it had computed when it was preempted.
        num_loaded: tokens that came back from host memory.
        num_found: tokens that the prefix cache gave back.
    """

    began_s: float
    target: int
    num_loaded: int
    num_found: int


@dataclass(slots=True)
class StreamingPrompt:
    """Facts of one request beside vLLM's own `Request`.

    Attributes:
        token_ids: the prompt as it is now.
        is_streaming_prompt: whether the prompt was opened to grow.
        is_streaming_prompt_finished: whether its sender has finished it.
        is_prompt_update: whether updates replace the prompt (update mode) or append to it.
        last_chunk_arrival_time: seconds on the monotonic clock when its last update was sent.
        completion_s: when the prompt was finished, or is expected to be, on the monotonic clock.
        final_num_tokens: the length that the prompt is expected to end with; 0 while nothing is known.
        tenant: who it belongs to.
        tag: what kind of context it gets, such as its retriever's name.
        num_updates: updates applied.
        num_tokens_computed: tokens run through the model for it.
        num_tokens_recomputed: those of them that had been computed before for the same prompt prefix.
        num_tokens_invalidated: computed tokens that updates made void.
        num_tokens_cached: tokens found in the prefix cache that it had not had before.
        num_tokens_loaded: tokens that came back from host memory.
        num_preemptions: how often its KV was taken away.
        num_tokens_lost: tokens that it had when its KV was taken away, until it is admitted again.
        resumption: while it is on its way back.
    """

    token_ids: TokenArray
    is_streaming_prompt: bool
    is_streaming_prompt_finished: bool
    is_prompt_update: bool
    last_chunk_arrival_time: float
    completion_s: float = math.inf
    final_num_tokens: float = 0
    tenant: str = ""
    tag: str = ""
    num_updates: int = 0
    num_tokens_computed: int = 0
    num_tokens_recomputed: int = 0
    num_tokens_invalidated: int = 0
    num_tokens_cached: int = 0
    num_tokens_loaded: int = 0
    num_preemptions: int = 0
    num_tokens_lost: int = 0
    resumption: Resumption | None = None
    _high_water: int = 0
    _known: int = 0
    _guard: int = 0

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any], token_ids: TokenArray, now_s: float) -> StreamingPrompt:
        streaming = bool(flags.get("is_streaming_prompt", False))
        finished = bool(flags.get("is_streaming_prompt_finished", not streaming))
        sent_s = float(flags.get("sent_s", now_s))
        return cls(
            token_ids=token_ids,
            is_streaming_prompt=streaming,
            is_streaming_prompt_finished=finished,
            is_prompt_update=bool(flags.get("is_prompt_update", False)),
            last_chunk_arrival_time=sent_s,
            completion_s=sent_s if finished else math.inf,
            tenant=str(flags.get("tenant") or ""),
            tag=str(flags.get("tag") or ""),
        )

    @property
    def is_open(self) -> bool:
        """Whether more prompt may come: the last token is held back and nothing may be sampled."""
        return self.is_streaming_prompt and not self.is_streaming_prompt_finished

    @property
    def group(self) -> str:
        """Those whose updates it is expected to resemble."""
        return f"{self.tag}/{self.tenant}"

    def is_guarded(self, num_computed: int) -> bool:
        """Whether it lost its KV before and has not got past that point yet, with `num_computed` tokens now."""
        return self._guard > num_computed

    def preempted(self, num_computed: int) -> None:
        """Counts the loss of its KV, of so many tokens."""
        self.num_preemptions += 1
        self.num_tokens_lost = max(self.num_tokens_lost, num_computed)
        self.resumption = None
        self._guard = max(self._guard, num_computed)

    def found(self, num_tokens: int) -> None:
        """Counts what it was admitted with: what the prefix cache gave it, but for what it had and lost."""
        self.num_tokens_cached += max(0, num_tokens - self._known)
        self._known = max(self._known, num_tokens)

    def computed(self, start: int, num_tokens: int) -> None:
        """Counts a step over positions [start, start + num_tokens)."""
        end, high_water = start + num_tokens, self._high_water
        self.num_tokens_computed += num_tokens
        if start < high_water:
            self.num_tokens_recomputed += min(end, high_water) - start
        if end > high_water:
            self._high_water = end
        if end > self._known:
            self._known = end

    def invalidated_from(self, lcp: int, num_computed: int) -> int:
        """Counts what an update with this LCP makes void, of `num_computed` tokens that hold KV."""
        num_invalidated = max(0, num_computed - lcp)
        self.num_tokens_invalidated += num_invalidated
        self._high_water = min(self._high_water, lcp)
        self._known = min(self._known, lcp)
        self._guard = min(self._guard, lcp)
        self.num_tokens_lost = min(self.num_tokens_lost, lcp)
        if self.resumption is not None:
            self.resumption.target = min(self.resumption.target, lcp)
        return num_invalidated

    def counters(self) -> dict[str, int]:
        """The counters by name, as the trail's end carries them."""
        return {
            "num_tokens_computed": self.num_tokens_computed,
            "num_tokens_recomputed": self.num_tokens_recomputed,
            "num_tokens_invalidated": self.num_tokens_invalidated,
            "num_tokens_cached": self.num_tokens_cached,
            "num_tokens_loaded": self.num_tokens_loaded,
            "num_preemptions": self.num_preemptions,
            "num_updates": self.num_updates,
        }


def set_prompt_tokens(request: Request, new: TokenArray, lcp: int, hash_block_size: int) -> None:
    """Replaces a request's tokens past the LCP. `all_token_ids` is a view of `_all_token_ids`, so that list stays."""
    del request.block_hashes[lcp // hash_block_size :]
    tail = new[lcp:].tolist()
    request._all_token_ids[lcp:] = tail
    assert request.prompt_token_ids is not None
    request.prompt_token_ids[lcp:] = tail
    request.num_prompt_tokens = len(new)
    request.update_block_hashes()
