"""How many tokens the texts of traces have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import islice
from typing import Any

from stream2llm_sdk.context import Chunk
from stream2llm_sdk.tokenizer import Tokenizer
from stream2llm_sdk.traces.trace import NUM_TOKENS, Trace

__all__ = ["TokenCounts", "TokenSource"]

_CHARACTERS_PER_TOKEN = 4
_BATCH_TEXTS = 256


class TokenSource(StrEnum):
    """Where a number of tokens is from."""

    RECORDED = "recorded in the trace"
    TOKENIZER = "counted by the tokenizer"
    ESTIMATE = "ESTIMATED as characters / 4"


class TokenCounts:
    """Numbers of tokens: those that a trace records, else the tokenizer's, else a quarter of the characters.

    A text is counted alone, without special tokens and without what a driver puts around it.

    Attributes:
        sources: which of these were met so far.
    """

    def __init__(self, traces: Iterable[Trace], tokenizer: Tokenizer | None = None) -> None:
        self.sources: set[TokenSource] = set()
        self._counted = _counted(traces, tokenizer) if tokenizer is not None else None

    def chunk(self, chunk: Chunk) -> int:
        """The length of a chunk."""
        return self._length(chunk.metadata.get(NUM_TOKENS), chunk.text)

    def query(self, trace: Trace) -> int:
        """The length of a trace's question."""
        return self._length(trace.num_query_tokens, trace.query)

    def _length(self, recorded: Any, text: str) -> int:
        if isinstance(recorded, int):
            self.sources.add(TokenSource.RECORDED)
            return recorded
        if self._counted is not None:
            self.sources.add(TokenSource.TOKENIZER)
            return self._counted[text]
        self.sources.add(TokenSource.ESTIMATE)
        return -(-len(text) // _CHARACTERS_PER_TOKEN)


def _counted(traces: Iterable[Trace], tokenizer: Tokenizer) -> dict[str, int]:
    counted: dict[str, int] = {}
    texts = iter(set(_texts(traces)))
    encode: Any = tokenizer
    while batch := list(islice(texts, _BATCH_TEXTS)):
        encoded = encode(batch, add_special_tokens=False, verbose=False)["input_ids"]
        counted.update(zip(batch, map(len, encoded), strict=True))
    return counted


def _texts(traces: Iterable[Trace]) -> Iterator[str]:
    for trace in traces:
        if trace.num_query_tokens is None:
            yield trace.query
        for timed in trace.updates:
            yield from (
                chunk.text for chunk in timed.update.chunks if not isinstance(chunk.metadata.get(NUM_TOKENS), int)
            )
