"""Traces as loads of the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence

from stream2llm_sdk.context import Chunk, ContextMode
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.simulator.workloads import SimulatedChunk, SimulatedRequest, TokenSpan
from stream2llm_sdk.tokenizer import Tokenizer
from stream2llm_sdk.traces.synthesis_options import NUM_TEMPLATE_TOKENS
from stream2llm_sdk.traces.trace import NUM_TOKENS, Trace

__all__ = ["simulated_requests"]


def simulated_requests(
    traces: Iterable[Trace],
    *,
    arrivals: Sequence[float] | None = None,
    num_template_tokens: int = NUM_TEMPLATE_TOKENS,
    tokenizer: Tokenizer | None = None,
    max_tokens: int = 1,
) -> list[SimulatedRequest]:
    """One request of the simulator for each trace, in the same order.

    Prompts are those of the published drivers. In append mode the first update opens the prompt with the template, and
    the last one ends it with the question; in update mode each update is template, documents and question. Chunks that
    are the same text (the same `text`, or without texts the same `source`) are the same tokens everywhere.

    Args:
        traces: what comes when.
        arrivals: seconds at which the questions come, one each; left out, each trace's own `arrival_s`.
        num_template_tokens: what all prompts begin with.
        tokenizer: counts the tokens of texts; not needed where chunks have `NUM_TOKENS` in their metadata and traces
            have `num_query_tokens`.
        max_tokens: output tokens of traces that do not say.

    Raises:
        ConfigurationError: an arrival or a length is missing, or one source has two lengths.
    """
    if num_template_tokens < 0:
        raise ConfigurationError(f"num_template_tokens={num_template_tokens!r} must be 0 or more")
    chosen = list(traces)
    if arrivals is not None and len(arrivals) != len(chosen):
        raise ConfigurationError(f"there are {len(arrivals)} arrivals for {len(chosen)} traces: give one each")
    spans = _Spans(num_template_tokens, tokenizer)
    times = [_arrival_s(trace) for trace in chosen] if arrivals is None else [float(time_s) for time_s in arrivals]
    return [
        SimulatedRequest(
            arrival_s,
            tuple(_messages(trace, spans)),
            max_tokens=trace.max_tokens or max_tokens,
            tenant=trace.tenant,
            tag=trace.tag,
        )
        for trace, arrival_s in zip(chosen, times, strict=True)
    ]


def _arrival_s(trace: Trace) -> float:
    if trace.arrival_s is None:
        raise ConfigurationError(f"trace {trace.trace_id!r} has no arrival_s: give arrivals")
    return trace.arrival_s


def _messages(trace: Trace, spans: _Spans) -> Iterable[SimulatedChunk]:
    replaces, last = trace.mode is ContextMode.UPDATE, len(trace.updates) - 1
    question = spans.of_question(trace)
    for number, timed in enumerate(trace.updates):
        parts = [spans.of_chunk(chunk) for chunk in timed.update.chunks]
        if replaces or number == 0:
            parts.insert(0, spans.template)
        if replaces or number == last:
            parts.append(question)
        yield SimulatedChunk(
            timed.offset_s, "replace" if replaces else "append", tuple(span for span in parts if span[1])
        )


class _Spans:
    """Gives equal texts the same token ids, and every other text ids of its own."""

    def __init__(self, num_template_tokens: int, tokenizer: Tokenizer | None) -> None:
        self.template: TokenSpan = (0, num_template_tokens)
        self._next_id = num_template_tokens
        self._tokenizer = tokenizer
        self._known: dict[Hashable, TokenSpan] = {}
        self._unnamed = itertools.count()

    def of_chunk(self, chunk: Chunk) -> TokenSpan:
        num_tokens = chunk.metadata.get(NUM_TOKENS)
        # A text that has two lengths stood in its prompts with two labels, and so with other tokens.
        key = ("text", chunk.text, num_tokens) if chunk.text else ("source", chunk.source or next(self._unnamed))
        return self._span(key, num_tokens, chunk.text, f"chunk of source {chunk.source!r}")

    def of_question(self, trace: Trace) -> TokenSpan:
        key = ("text", trace.query, trace.num_query_tokens) if trace.query else ("question", trace.trace_id)
        return self._span(key, trace.num_query_tokens, trace.query, f"question of trace {trace.trace_id!r}")

    def _span(self, key: Hashable, num_tokens: int | None, text: str, what: str) -> TokenSpan:
        known = self._known.get(key)
        if known is None:
            known = (self._next_id, self._count(text, what) if num_tokens is None else num_tokens)
            self._known[key] = known
            self._next_id += known[1]
        elif num_tokens is not None and num_tokens != known[1]:
            raise ConfigurationError(
                f"the {what} has {num_tokens} tokens, and {known[1]} elsewhere: equal sources must be equal texts"
            )
        return known

    def _count(self, text: str, what: str) -> int:
        if not text:
            return 0
        if self._tokenizer is None:
            raise ConfigurationError(f"the {what} has no {NUM_TOKENS}: give a tokenizer that counts its text")
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])
