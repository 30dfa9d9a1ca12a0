"""Synthetic traces: the published statistics, and what the options do."""

from __future__ import annotations

import functools
import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import llama2_tokenizer

from stream2llm_sdk.context import Chunk, ContextMode
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.traces.arrivals import Arrivals
from stream2llm_sdk.traces.synthesis import OutputLength, SynthesisOptions, TraceKind, synthesize
from stream2llm_sdk.traces.trace import NUM_TOKENS, Trace, check_unique

PUBLISHED: Mapping[str, Mapping[str, Mapping[Any, float]]] = {
    "crawler": {
        "prompt tokens": {"mean": 8_889, 50: 5_749, 75: 11_167, 95: 28_372},
        "collection s": {"mean": 9.219, 50: 8.670, 75: 11.059, 95: 16.402},
        "duration s": {"mean": 9.86961, 50: 9.28734, 95: 16.69267},
        "gaps s": {"mean": 1.053, 5: 0.08185, 25: 0.38712, 50: 0.70067, 75: 1.33952, 95: 3.07799, 99: 5.29335}
        | {0: 0.00301, 100: 34.94656},
        "chunks": {"mean": 7.86, 50: 8, 0: 1, 100: 17},
    },
    "anns": {
        "prompt tokens": {"mean": 13_006, 50: 10_126, 75: 14_615, 95: 30_618},
        "collection s": {"mean": 4.471, 50: 3.896, 75: 5.327, 95: 8.512},
        "gaps s": {"mean": 0.15714, 5: 0.00139, 25: 0.01125, 50: 0.03668, 75: 0.12433, 95: 0.6988, 99: 2.07926}
        | {0: 0.00021, 100: 8.91665},
        "chunks": {"mean": 4.42, 50: 4, 0: 1, 100: 26},
    },
}
ALL_SEARCHES_S = {"mean": 3.63026, 50: 3.46377, 95: 5.37512}
TEMPLATE_TOKENS = 60


def num_tokens(chunks: Sequence[Chunk]) -> int:
    return sum(chunk.metadata[NUM_TOKENS] for chunk in chunks)


def prompt_tokens(trace: Trace) -> int:
    return num_tokens(trace.final_chunks) + (trace.num_query_tokens or 0) + TEMPLATE_TOKENS


def gaps_s(trace: Trace) -> list[float]:
    """The times between chunks as they were published: of a search, of the windows of all top-k but the last."""
    times_s = [timed.offset_s for timed in trace.updates]
    if trace.mode is ContextMode.UPDATE:
        times_s = [timed.begin_s for timed in trace.updates if timed.begin_s is not None]
    return [after - before for before, after in itertools.pairwise(times_s)]


def statistics(traces: Sequence[Trace]) -> dict[str, list[float]]:
    durations_s = [trace.duration_s for trace in traces]
    return {
        "prompt tokens": [float(prompt_tokens(trace)) for trace in traces],
        "collection s": durations_s,
        "duration s": durations_s,
        "gaps s": [gap_s for trace in traces for gap_s in gaps_s(trace)],
        "chunks": [float(len(trace.updates)) for trace in traces],
    }


def misses(values: Sequence[float], published: Mapping[Any, float], tolerance: float = 0.10) -> dict[Any, float]:
    """Ratios to the published statistics outside of the tolerance."""
    drawn = {key: np.mean(values) if key == "mean" else np.percentile(values, key) for key in published}
    ratios = {key: float(drawn[key] / value) for key, value in published.items()}
    return {key: ratio for key, ratio in ratios.items() if abs(ratio - 1) > tolerance}


@functools.cache
def four_thousand(kind: TraceKind, seed: int) -> tuple[list[Trace], float]:
    """Draws, and the seconds of CPU that they took."""
    started_s = time.process_time()
    traces = synthesize(kind, 4000, seed=seed)
    return traces, time.process_time() - started_s


# ---- statistics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["crawler", "anns"])
def test_four_thousand_draws_have_every_published_statistic_within_ten_per_cent(kind: TraceKind, seed: int) -> None:
    values = statistics(four_thousand(kind, seed)[0])
    assert {name: misses(values[name], published) for name, published in PUBLISHED[kind].items()} == {
        name: {} for name in PUBLISHED[kind]
    }


def test_searches_have_the_durations_of_all_published_traces_where_asked() -> None:
    searches = synthesize("anns", 2000, seed=1, options=SynthesisOptions(durations="all"))
    assert misses([trace.duration_s for trace in searches], ALL_SEARCHES_S) == {}


def test_a_few_hundred_draws_have_the_published_gaps_and_chunks_already() -> None:
    values = statistics(synthesize("crawler", 300, seed=5))
    for name in ("gaps s", "chunks"):
        inner = {key: value for key, value in PUBLISHED["crawler"][name].items() if key not in (0, 99, 100)}
        assert misses(values[name], inner) == {}


def test_the_longest_prompts_are_as_long_as_the_published_latencies_say() -> None:
    crawls, searches = ([prompt_tokens(t) for t in four_thousand(kind, 2)[0]] for kind in ("crawler", "anns"))
    assert 40_000 < np.percentile(crawls, 99) < 60_000
    assert 65_000 < np.percentile(searches, 99) < 85_000
    assert 80_000 < max(crawls) <= 125_000
    assert 90_000 < max(searches) <= 110_000


def test_four_thousand_draws_take_less_than_three_seconds() -> None:
    assert four_thousand("crawler", 0)[1] < 3
    assert four_thousand("anns", 0)[1] < 3


# ---- structure ------------------------------------------------------------------------------------------------------


def test_a_crawl_opens_with_nothing_and_then_appends_a_page_at_a_time() -> None:
    for trace in synthesize("crawler", 100, seed=3):
        assert trace.mode is ContextMode.APPEND
        assert [len(timed.update.chunks) for timed in trace.updates] == [0] + [1] * (len(trace.updates) - 1)
        assert all(chunk.metadata[NUM_TOKENS] >= 1 and not chunk.text for chunk in trace.final_chunks)


def test_a_refinement_inserts_one_document_and_the_last_one_leaves() -> None:
    distances = Counter[int]()
    for trace in synthesize("anns", 500, seed=3):
        assert trace.mode is ContextMode.UPDATE
        for before, after in itertools.pairwise(trace.updates):
            old, new = ([chunk.source for chunk in timed.update.chunks] for timed in (before, after))
            position = next(i for i, source in enumerate(new) if source not in old)
            assert new == [*old[:position], new[position], *old[position:-1]]
            distances[10 - position] += 1
    assert [distances[d] / distances.total() for d in range(1, 11)] == pytest.approx([0.1] * 10, rel=0.2)


@pytest.mark.parametrize("options", [{}, {"num_shared_documents": 300}, {"max_prompt_tokens": 5_000}])
def test_equal_sources_are_equal_lengths_and_others_are_unique(options: dict[str, Any]) -> None:
    lengths: dict[str, int] = {}
    traces = [*synthesize("mixed", 300, seed=1, options=SynthesisOptions(**options)), *synthesize("anns", 50, seed=2)]
    check_unique(traces)
    for trace in traces:
        for timed in trace.updates:
            assert len({chunk.source for chunk in timed.update.chunks}) == len(timed.update.chunks)
            for chunk in timed.update.chunks:
                assert lengths.setdefault(chunk.source, chunk.metadata[NUM_TOKENS]) == chunk.metadata[NUM_TOKENS]


def test_shared_documents_are_found_by_many_and_popular_ones_by_more() -> None:
    own, shared = (synthesize("anns", 200, seed=1, options=SynthesisOptions(num_shared_documents=n)) for n in (0, 500))
    assert max(Counter(chunk.source for trace in own for chunk in trace.final_chunks).values()) == 1
    found = Counter(chunk.source for trace in shared for chunk in trace.final_chunks).most_common()
    assert found[0][1] > 60 > 10 > found[len(found) // 2][1]


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from(["crawler", "anns", "mixed"]),
    num_queries=st.integers(0, 40),
    seed=st.integers(0, 10_000),
    max_prompt_tokens=st.integers(1_000, 200_000),
    delay_multiplier=st.floats(0, 50),
    search_gap=st.sampled_from(["first", "last", "split"]),
    num_documents=st.integers(1, 13),
    num_shared_documents=st.sampled_from([0, 400]),
    popularity_exponent=st.floats(0, 60),
)
def test_whatever_is_asked_for_prompts_fit_and_the_same_seed_gives_the_same_traces(
    kind: TraceKind, num_queries: int, seed: int, max_prompt_tokens: int, **options: Any
) -> None:
    chosen = SynthesisOptions(max_prompt_tokens=max_prompt_tokens, **options)
    traces = synthesize(kind, num_queries, seed=seed, options=chosen)
    assert len(traces) == num_queries
    assert traces == synthesize(kind, num_queries, seed=seed, options=chosen)
    for trace in traces:
        updates = trace.updates[-1:] if trace.mode is ContextMode.APPEND else trace.updates
        assert max(num_tokens(timed.update.chunks) for timed in updates) + 90 <= max_prompt_tokens
        assert prompt_tokens(trace) <= max_prompt_tokens


# ---- options --------------------------------------------------------------------------------------------------------


def test_the_seeds_of_contents_and_arrivals_are_apart() -> None:
    options = SynthesisOptions(arrivals=Arrivals(rate_per_s=2.0))
    first, again, moved, other = (
        synthesize("mixed", 30, seed=seed, arrival_seed=arrival_seed, options=options)
        for seed, arrival_seed in ((3, None), (3, 3), (3, 9), (4, None))
    )
    assert first == again
    assert [t.arrival_s for t in moved] != [t.arrival_s for t in first]
    assert [replace(t, arrival_s=0.0) for t in moved] == [replace(t, arrival_s=0.0) for t in first]
    assert [t.updates for t in other] != [t.updates for t in first]


def test_a_delay_multiplier_leaves_a_crawls_search_and_all_prompts_as_they_are() -> None:
    fast, slow = (synthesize("mixed", 40, seed=3, options=SynthesisOptions(delay_multiplier=m)) for m in (1, 10))
    for a, b in zip(fast, slow, strict=True):
        assert a.final_chunks == b.final_chunks
        assert gaps_s(b) == pytest.approx([10 * gap_s for gap_s in gaps_s(a)])
        stretched = 1 if a.mode is ContextMode.APPEND else 10
        assert b.updates[0].offset_s == pytest.approx(stretched * a.updates[0].offset_s)


def test_the_long_wait_of_a_vector_search_is_where_it_was_asked_for() -> None:
    first, last, split = (
        synthesize("anns", 200, seed=5, options=SynthesisOptions(search_gap=g)) for g in ("first", "last", "split")
    )
    assert np.median([t.updates[0].offset_s for t in first]) > 3
    assert np.median([t.duration_s - t.updates[-2].offset_s for t in last if len(t.updates) > 1]) > 3
    assert np.median([t.updates[0].offset_s for t in last]) < 0.1
    assert synthesize("anns", 200, seed=5) == split
    before_first = [(t.updates[0].begin_s or 0) / t.duration_s for t in split if len(t.updates) > 1]
    assert before_first == pytest.approx([0.275] * len(before_first))
    assert [t.duration_s for t in first] == pytest.approx([t.duration_s for t in last])
    assert [t.duration_s for t in first] == pytest.approx([t.duration_s for t in split])


def test_a_mixed_load_has_its_share_of_vector_searches() -> None:
    traces = synthesize("mixed", 100, seed=0, options=SynthesisOptions(update_share=0.3))
    assert Counter(trace.tag for trace in traces) == {"anns": 30, "crawler": 70}
    assert [trace.tag for trace in traces[:30]] != ["anns"] * 30


def test_tenants_ask_by_their_weights() -> None:
    traces = synthesize("crawler", 200, seed=0, options=SynthesisOptions(tenants={"large": 3, "small": 1}))
    assert Counter(trace.tenant for trace in traces) == {"large": 150, "small": 50}


def test_output_lengths_are_left_open_constant_or_lognormal() -> None:
    lengths = OutputLength(median=200, spread=0.8, most=1_000)
    none, ten, drawn = (
        [t.max_tokens for t in synthesize("crawler", 400, seed=0, options=SynthesisOptions(max_tokens=value))]
        for value in (None, 10, lengths)
    )
    assert (set(none), set(ten)) == ({None}, {10})
    numbers = [length for length in drawn if length is not None]
    assert np.median(numbers) == pytest.approx(200, rel=0.05)
    assert max(numbers) == 1_000


def test_texts_have_about_as_many_tokens_as_the_chunks_say() -> None:
    tokenizer = llama2_tokenizer()
    plain, written = (
        synthesize("mixed", 4, seed=2, options=SynthesisOptions(texts=texts, max_prompt_tokens=4_000))
        for texts in (False, True)
    )
    texts: dict[str, str] = {}
    for without, trace in zip(plain, written, strict=True):
        counted = sum(len(tokenizer(c.text, add_special_tokens=False)["input_ids"]) for c in trace.final_chunks)
        assert counted == pytest.approx(num_tokens(trace.final_chunks), rel=0.03, abs=30)
        assert len(tokenizer(trace.query, add_special_tokens=False)["input_ids"]) == pytest.approx(30, abs=4)
        assert [c.metadata for c in trace.final_chunks] == [c.metadata for c in without.final_chunks]
        for chunk in (chunk for timed in trace.updates for chunk in timed.update.chunks):
            assert chunk.text == texts.setdefault(chunk.source, chunk.text) != ""
    assert len(set(texts.values())) > 0.9 * len(texts), "other sources are other texts, single words aside"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"delay_multiplier": -1.0}, "delay_multiplier=-1.0"),
        ({"search_gap": "middle"}, "'middle'.*first, last"),
        ({"durations": "some"}, "'some'.*replayed, all"),
        ({"update_share": 1.5}, r"update_share=1\.5"),
        ({"num_documents": 0}, "num_documents=0"),
        ({"num_documents": 200_000}, "num_documents=200000 must be a whole number of 1 to 1,000"),
        (
            {"num_shared_documents": 10**17},
            "num_shared_documents=100000000000000000 must be a whole number of 0 to 10,000,000",
        ),
        ({"num_shared_documents": 30}, "num_shared_documents=30.*30 times"),
        ({"popularity_exponent": float("inf")}, "popularity_exponent=inf"),
        ({"max_prompt_tokens": 50}, "max_prompt_tokens=50"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"tenants": {"a": 0.0}}, "weights"),
        ({"tenants": {"a": "1"}}, "weights"),
        ({"tenants": ["a"]}, r"tenants=\['a'\] must have a weight"),
        ({"delay_multiplier": "10"}, "delay_multiplier='10' must be a finite number"),
        ({"update_share": None}, "update_share=None must be a number"),
        ({"num_documents": 2.5}, "num_documents=2.5 must be a whole number"),
        ({"max_prompt_tokens": "9000"}, "max_prompt_tokens='9000' must be a whole number"),
        ({"max_tokens": 2.5}, "max_tokens=2.5 must be a whole number"),
        ({"texts": "no"}, "texts='no' must be True or False"),
        ({"arrivals": 4}, "arrivals=4 must be Arrivals"),
        ({"search_gap": ["last"]}, "search_gap=.* must be one of first, last, split"),
    ],
)
def test_an_option_that_cannot_work_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SynthesisOptions(**wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("web", 1, 0), "'web'.*crawler, anns, mixed"),
        (("anns", -1, 0), "num_queries=-1"),
        (("anns", 1, -2), "seed=-2"),
        (("anns", "4", 0), "num_queries='4' must be a whole number"),
        (("anns", 4, 0.5), "seed=0.5 must be a whole number"),
    ],
)
def test_a_synthesis_that_cannot_be_is_refused(arguments: tuple[Any, int, int], message: str) -> None:
    kind, num_queries, seed = arguments
    with pytest.raises(ConfigurationError, match=message):
        synthesize(kind, num_queries, seed=seed)


def test_an_output_length_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="spread=-1"):
        OutputLength(median=5, spread=-1)


def test_numbers_of_numpy_draw_what_those_of_python_do() -> None:
    options = SynthesisOptions(max_tokens=np.int64(5), delay_multiplier=np.float32(2), num_documents=np.int8(10))
    (mine, theirs) = (
        synthesize("mixed", num, seed=seed, options=each)
        for num, seed, each in (
            (np.uint64(6), np.int32(3), options),
            (6, 3, SynthesisOptions(max_tokens=5, delay_multiplier=2.0, num_documents=10)),
        )
    )
    assert mine == theirs
    assert all(type(trace.max_tokens) is int for trace in mine)
    with pytest.raises(ConfigurationError, match="options='x' must be SynthesisOptions"):
        synthesize("anns", 2, seed=0, options="x")  # type: ignore[arg-type]
