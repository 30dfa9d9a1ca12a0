"""Loads: when requests come, and when the parts of their prompts do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.lcp import TokenArray

__all__ = ["SimulatedChunk", "SimulatedRequest", "TokenSpan", "token_ids"]

TokenSpan = tuple[int, int]
"""`(first_id, length)`: the consecutive token ids `first_id .. first_id + length - 1`. A text of its own gets ids of
its own, so two prompts agree exactly as far as their spans do, and a prompt costs nothing until it is sent."""


@dataclass(frozen=True, slots=True)
class SimulatedChunk:
    """One message of a stream.

    Attributes:
        offset_s: seconds after the request's arrival.
        kind: 'append' (the spans go behind the prompt) or 'replace' (they are the whole prompt).
        spans: the tokens.
    """

    offset_s: float
    kind: Literal["append", "replace"]
    spans: tuple[TokenSpan, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of this message."""
        return sum(length for _, length in self.spans)


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request: it arrives, then its prompt comes in chunks. The last chunk completes the prompt.

    Attributes:
        arrival_s: when the user asked, in seconds of virtual time.
        chunks: at least one, in the order of their offsets.
        max_tokens: the most output tokens; exactly as many are generated unless the model stops before.
        tenant: whose request it is.
        tag: whatever tells kinds of requests apart.
        stops_after: output tokens after which the model ends of itself, which nothing that schedules knows; None if it
            does not before `max_tokens`.

    Raises:
        ConfigurationError: there is no chunk, the offsets decrease, or the prompt ends empty.
    """

    arrival_s: float
    chunks: tuple[SimulatedChunk, ...]
    max_tokens: int = 1
    tenant: str = ""
    tag: str = ""
    stops_after: int | None = None

    def __post_init__(self) -> None:
        offsets = [chunk.offset_s for chunk in self.chunks]
        if not offsets:
            raise ConfigurationError("a simulated request needs at least one chunk")
        if not (0 <= self.arrival_s < math.inf and offsets[0] >= 0) or offsets != sorted(offsets):
            raise ConfigurationError(
                f"times must not be negative and offsets must not decrease, got arrival {self.arrival_s}, {offsets}"
            )
        if self.max_tokens < 1:
            raise ConfigurationError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.stops_after is not None and self.stops_after < 1:
            raise ConfigurationError(f"stops_after must be at least 1, got {self.stops_after}: use None for never")
        if not self.num_prompt_tokens:
            raise ConfigurationError("the last chunk of a simulated request leaves an empty prompt")

    @property
    def context_complete_s(self) -> float:
        """When the last chunk arrives, in seconds of virtual time."""
        return self.arrival_s + self.chunks[-1].offset_s

    @property
    def final_spans(self) -> tuple[TokenSpan, ...]:
        """The whole prompt after the last chunk."""
        first = max((index for index, chunk in enumerate(self.chunks) if chunk.kind == "replace"), default=0)
        return tuple(span for chunk in self.chunks[first:] for span in chunk.spans)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the whole prompt after the last chunk."""
        return sum(length for _, length in self.final_spans)

    @property
    def num_output_tokens(self) -> int:
        """Tokens that it will put out."""
        return self.max_tokens if self.stops_after is None else min(self.max_tokens, self.stops_after)

    @property
    def longest_prompt_tokens(self) -> int:
        """The most tokens that the prompt has at any time."""
        longest = length = 0
        for chunk in self.chunks:
            length = chunk.num_tokens + (length if chunk.kind == "append" else 0)
            longest = max(longest, length)
        return longest


def token_ids(spans: Iterable[TokenSpan]) -> TokenArray:
    """The spans' token ids, 1-d."""
    parts = [np.arange(first, first + length, dtype=np.int32) for first, length in spans]
    return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, dtype=np.int32)])
