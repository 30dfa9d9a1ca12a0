"""The statistics are those of the paper's tables."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from stream2llm_sdk.context import Append, Chunk, Replace
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.traces.statistics import Distribution, workload_statistics
from stream2llm_sdk.traces.statistics_tables import statistics_tables
from stream2llm_sdk.traces.trace import NUM_TOKENS, TimedFailure, TimedUpdate, Trace


def document(name: str, num_tokens: int) -> Chunk:
    return Chunk("", name, metadata={NUM_TOKENS: num_tokens})


def crawl(name: str = "c", tag: str = "crawler") -> Trace:
    updates = (
        TimedUpdate(2.0, Append(())),
        TimedUpdate(2.5, Append(document("a", 100))),
        TimedUpdate(4.0, Append(document("b", 200))),
    )
    return Trace(name, "", updates, num_query_tokens=30, tag=tag)


A, B, C, D = (document(name, num_tokens) for name, num_tokens in zip("ABCD", (10, 200, 3_000, 40_000), strict=True))


def search(*pools: list[Chunk], name: str = "s") -> Trace:
    updates = tuple(TimedUpdate(3.0 + index, Replace(pool)) for index, pool in enumerate(pools))
    return Trace(name, "", updates, num_query_tokens=5, tag="anns")


def test_a_distribution_has_what_numpy_says_of_it() -> None:
    found = Distribution.of([1, 2, 3, 4])
    assert found is not None
    assert (found.n, found.mean, found.min, found.max) == (4, 2.5, 1, 4)
    assert found.std == pytest.approx(math.sqrt(1.25))
    quantiles = [found.p5, found.p25, found.p50, found.p75, found.p95, found.p99]
    assert quantiles == pytest.approx([1.15, 1.75, 2.5, 3.25, 3.85, 3.97])
    assert Distribution.of([]) is None


def test_a_crawl_counts_its_search_and_its_pages() -> None:
    (found,) = workload_statistics([crawl()], num_template_tokens=60)
    assert (found.name, found.num_queries, found.update) == ("crawler", 1, None)
    assert found.num_tokens.mean == 100 + 200 + 30 + 60
    assert found.collection_s.max == 4.0
    assert found.chunks_per_query.mean == 3
    assert found.inter_chunk_ms is not None
    assert (found.inter_chunk_ms.n, found.inter_chunk_ms.min, found.inter_chunk_ms.max) == (2, 500, 1_500)


def test_sources_that_failed_are_counted_where_they_were_recorded() -> None:
    gone = TimedFailure(1.0, "http://gone", "HTTP 404")
    (found,) = workload_statistics([crawl("a"), replace(crawl("b"), failures=(gone, gone))])
    assert found.failures_per_query is not None
    assert (found.failures_per_query.n, found.failures_per_query.mean) == (2, 1.0)
    (table,) = statistics_tables(found)
    assert "sources that failed: 1.00 a query, at most 2" in table.remark
    assert workload_statistics([crawl()])[0].failures_per_query is None


def test_an_update_invalidates_what_is_behind_the_common_documents() -> None:
    (found,) = workload_statistics([search([A, D, B], [A, C, D], [A, C, D], [B, A])])
    assert found.update is not None
    assert found.num_tokens.mean == 5 + 210
    invalidated, first = found.update.invalidated_tokens, found.update.first_change
    assert invalidated is not None
    assert (invalidated.n, invalidated.min, invalidated.p50, invalidated.max) == (3, 0, 40_200, 43_010)
    assert found.update.invalidated_tokens_per_query.mean == 40_200 + 0 + 43_010
    assert first is not None
    assert (first.min, first.p50, first.max) == (0, 1, 3)


def test_the_share_of_queries_that_lose_much_is_said() -> None:
    small, large = search([A, B], [B, A], name="small"), search([D, A], [A, D], name="large")
    (found,) = workload_statistics([small, large, small, small])
    assert found.update is not None
    assert found.update.share_over_10k == 0.25


def test_single_pools_have_no_gaps() -> None:
    (found,) = workload_statistics([search([A])])
    assert found.inter_chunk_ms is None
    assert found.update is not None
    assert (found.update.invalidated_tokens, found.update.first_change) == (None, None)


def test_kinds_are_described_apart() -> None:
    found = workload_statistics([crawl("1"), search([A]), crawl("2"), crawl("3", tag="")])
    assert [(kind.name, kind.num_queries) for kind in found] == [("crawler", 2), ("anns", 1), ("append", 1)]


class Words:
    """A tokenizer with a token for each word."""

    def __call__(self, texts: list[str], **options: Any) -> dict[str, list[list[int]]]:
        assert options["add_special_tokens"] is False
        return {"input_ids": [[0] * len(text.split()) for text in texts]}


def test_it_is_said_where_numbers_of_tokens_are_from() -> None:
    updates = (TimedUpdate(0, Append([document("a", 100), Chunk("one two three four")])),)
    trace = Trace("t", "and why?", updates)
    (estimated,) = workload_statistics([trace])
    assert estimated.num_tokens.mean == 100 + 5 + 2
    assert estimated.token_source == "ESTIMATED as characters / 4, recorded in the trace"
    (counted,) = workload_statistics([trace], tokenizer=Words())  # type: ignore[arg-type]
    assert counted.num_tokens.mean == 100 + 4 + 2
    assert counted.token_source == "counted by the tokenizer, recorded in the trace"


def test_nothing_cannot_be_described() -> None:
    with pytest.raises(ConfigurationError, match="no traces"):
        workload_statistics([])


def test_they_can_be_written_as_json() -> None:
    (found,) = workload_statistics([search([A, B], [B, A])])
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["update"]["first_change"]["n"] == 1
