"""Traces as loads of the simulator: who shares tokens with whom, and what each message holds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tiny_tokenizer import byte_tokenizer

from stream2llm_sdk.context import Append, Chunk, Replace
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.lcp import longest_common_prefix
from stream2llm_sdk.serving.simulator.load import simulate
from stream2llm_sdk.serving.simulator.workloads import token_ids
from stream2llm_sdk.traces.arrivals import Arrivals
from stream2llm_sdk.traces.simulated import simulated_requests
from stream2llm_sdk.traces.synthesis import SynthesisOptions, synthesize
from stream2llm_sdk.traces.trace import NUM_TOKENS, TimedUpdate, Trace


def sized(source: str, num_tokens: int) -> Chunk:
    return Chunk("", source=source, metadata={NUM_TOKENS: num_tokens})


def appends(*chunks: Sequence[Chunk], name: str = "a") -> Trace:
    updates = tuple(TimedUpdate(float(second), Append(part)) for second, part in enumerate(chunks))
    return Trace(name, "", updates, arrival_s=0.0, num_query_tokens=30)


def replaces(*pools: Sequence[Chunk], name: str = "a") -> Trace:
    updates = tuple(TimedUpdate(float(second), Replace(pool)) for second, pool in enumerate(pools))
    return Trace(name, "", updates, arrival_s=0.0, num_query_tokens=30)


def test_the_template_opens_an_appended_prompt_and_the_question_ends_it() -> None:
    [request] = simulated_requests([appends([], [sized("p", 500)], [sized("q", 7)])])
    assert [chunk.kind for chunk in request.chunks] == ["append"] * 3
    assert [[length for _, length in chunk.spans] for chunk in request.chunks] == [[60], [500], [7, 30]]
    assert [chunk.offset_s for chunk in request.chunks] == [0.0, 1.0, 2.0]


def test_a_search_without_pages_is_template_and_question() -> None:
    [request] = simulated_requests([appends([])], num_template_tokens=5)
    assert [[length for _, length in chunk.spans] for chunk in request.chunks] == [[5, 30]]


def test_every_replacement_is_the_whole_prompt() -> None:
    a, b, c = sized("a", 10), sized("b", 20), sized("c", 40)
    [request] = simulated_requests([replaces([a, b], [a, c])])
    (first, second) = (chunk.spans for chunk in request.chunks)
    assert [length for _, length in first] == [60, 10, 20, 30]
    assert [length for _, length in second] == [60, 10, 40, 30]
    assert (first[0], first[1], first[3]) == (second[0], second[1], second[3])
    assert longest_common_prefix(token_ids(first), token_ids(second)) == 70


def test_a_source_is_the_same_tokens_in_all_prompts_and_questions_are_everyones_own() -> None:
    page = sized("https://example.org", 100)
    first, second = simulated_requests([appends([page], name="a"), appends([page], name="b")])
    assert first.final_spans[:2] == second.final_spans[:2]
    assert first.final_spans[2] != second.final_spans[2]
    spans = sorted({*first.final_spans, *second.final_spans})
    assert all(start + length <= after for (start, length), (after, _) in itertools.pairwise(spans)), "none overlap"


def test_texts_are_told_apart_by_what_they_say_and_counted_by_the_tokenizer() -> None:
    chunks = [Chunk("one", source="x"), Chunk("three", source="x"), Chunk("one", source="y")]
    trace = Trace("t", "why?", (TimedUpdate(0.0, Append(chunks)),), arrival_s=1.5, max_tokens=9, tenant="w", tag="g")
    [request] = simulated_requests([trace], tokenizer=byte_tokenizer())
    template, one, three, again, question = request.final_spans
    assert (template, one[1], three[1], question[1]) == ((0, 60), 3, 5, 4)
    assert one == again
    assert (request.arrival_s, request.max_tokens, request.tenant, request.tag) == (1.5, 9, "w", "g")


def test_chunks_without_text_and_source_are_all_different() -> None:
    [request] = simulated_requests([appends([sized("", 10), sized("", 10)])])
    assert len(set(request.final_spans)) == 4


def test_arrivals_may_be_given_and_output_tokens_for_those_that_have_none() -> None:
    traces = synthesize("mixed", 3, seed=0)
    requests = simulated_requests(traces, arrivals=[3.0, 1.0, 2.0], max_tokens=5)
    assert [(request.arrival_s, request.max_tokens) for request in requests] == [(3.0, 5), (1.0, 5), (2.0, 5)]


def test_a_message_without_tokens_is_nothing_to_the_scheduler() -> None:
    trace = appends([sized("p", 50)], [sized("empty", 0)], [sized("q", 7)])
    result = simulate(simulated_requests([trace]), policy="FCFS", num_gpu_blocks=100, max_model_len=1_000)
    assert result.requests[0].num_tokens_computed == 147


def test_synthetic_traces_keep_their_prompt_lengths() -> None:
    traces = synthesize("mixed", 40, seed=1, options=SynthesisOptions(arrivals=Arrivals(rate_per_s=1.0)))
    for trace, request in zip(traces, simulated_requests(traces), strict=True):
        assert request.num_prompt_tokens == 90 + sum(chunk.metadata[NUM_TOKENS] for chunk in trace.final_chunks)
        assert request.context_complete_s == pytest.approx((trace.arrival_s or 0.0) + trace.duration_s)


def test_what_is_missing_or_contradicts_itself_is_named() -> None:
    no_arrival = replace(appends([]), arrival_s=None)
    with pytest.raises(ConfigurationError, match="'a' has no arrival_s"):
        simulated_requests([no_arrival])
    with pytest.raises(ConfigurationError, match="2 arrivals for 1 traces"):
        simulated_requests([no_arrival], arrivals=[1.0, 2.0])
    with pytest.raises(ConfigurationError, match="tokenizer"):
        simulated_requests([appends([Chunk("some text", source="s")])])
    with pytest.raises(ConfigurationError, match="source 'x' has 6 tokens, and 5 elsewhere"):
        simulated_requests([appends([sized("x", 5)], [sized("x", 6)])])
    with pytest.raises(ConfigurationError, match="num_template_tokens=-1"):
        simulated_requests([], num_template_tokens=-1)
