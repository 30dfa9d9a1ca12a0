"""Streaming where it pays: the inequality, learning, and the retriever that asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vectors import TextAsRow, clustered

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.retrievers.diskann.build import build_index
from stream2llm_sdk.retrievers.diskann.index import DiskANNIndex
from stream2llm_sdk.retrievers.diskann.retriever import DiskANNRetriever
from stream2llm_sdk.retrievers.diskann.search import EmissionGate
from stream2llm_sdk.retrievers.diskann.streaming_policy import StreamingPolicy, documents_prefilled_again


def learnt(search_s: float, first_s: float, again: int, prefill_s: Any) -> StreamingPolicy:
    policy = StreamingPolicy(prefill_s)
    for _ in range(8):
        assert policy.should_stream()
        policy.observe(search_s, first_pool_s=first_s, prefilled_again=again)
    return policy


@pytest.mark.parametrize(
    ("search_s", "first_s", "again", "prefill_s", "pays"),
    [
        (3.6, 0.7, 1, 0.05, True),  # a search of seconds
        (0.002, 0.001, 1, 0.05, False),  # a warm one of 2 ms
        (1.0, 0.5, 1, 0.499, True),
        (1.0, 0.5, 1, 0.501, False),
        (1.0, 1.0, 1, 1e-9, False),  # the first pool is the last
        (0.002, 0.001, 0, 10.0, True),  # pools that never change cost nothing
    ],
)
def test_the_inequality_decides(search_s: float, first_s: float, again: int, prefill_s: float, pays: bool) -> None:
    policy = learnt(search_s, first_s, again, prefill_s)
    assert policy.estimate.pays is pays
    assert [policy.should_stream() for _ in range(20)] == [pays] * 20


def test_it_looks_again_now_and_then() -> None:
    policy = learnt(0.002, 0.001, 2, 0.05)
    assert sum(policy.should_stream() for _ in range(320)) == 10


def test_searches_that_are_not_streamed_still_say_how_long_they_take() -> None:
    policy = learnt(0.002, 0.001, 2, 0.05)
    assert not policy.should_stream()
    for _ in range(60):  # the disk has become slow
        policy.observe(2.0, first_pool_s=None, prefilled_again=0)
    assert policy.should_stream()
    assert policy.estimate.first_pool_fraction == pytest.approx(0.5)
    assert policy.estimate.prefilled_again == pytest.approx(2)


@pytest.mark.parametrize("answer", [None, float("nan"), 0.0, -1.0])
def test_while_the_prefill_time_is_not_known_it_streams(answer: float | None) -> None:
    policy = learnt(0.002, 0.001, 2, lambda: answer)
    assert policy.estimate.pays is None
    assert policy.should_stream()


def test_a_function_gives_the_prefill_time_as_it_is_now() -> None:
    prefill_s = 1e-6
    policy = learnt(0.002, 0.001, 2, lambda: prefill_s)
    assert policy.should_stream()
    prefill_s = 0.05
    assert not policy.should_stream()


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "0.1"])
def test_a_prefill_time_that_cannot_be_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="prefill_s_per_document"):
        StreamingPolicy(value)


@pytest.mark.parametrize(
    ("before", "after", "count", "order"),
    [
        ("abc", "abc", 0, "abc"),
        ("abc", "cab", 0, "abc"),  # another ranking of the same documents
        ("abc", "abd", 1, "abd"),  # the last one gives way
        ("abc", "bcd", 3, "bcd"),  # the first one does: all behind it move
        ("abc", "xyz", 3, "xyz"),
        ("abcd", "acde", 3, "acde"),
        ("", "ab", 2, "ab"),
        ("ab", "", 0, ""),
    ],
)
def test_documents_behind_the_first_difference_are_prefilled_again(
    before: str, after: str, count: int, order: str
) -> None:
    assert documents_prefilled_again(before, after) == (count, list(order))


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiskANNIndex]:
    points = clustered(1_540, 32)
    directory: Path = tmp_path_factory.mktemp("policy") / "index"
    embedder = TextAsRow(points[:1_500], points[1_500:])
    with build_index(map(str, range(1_500)), directory, embedder=embedder) as opened:
        yield opened


def retriever(index: DiskANNIndex, prefill_s: Any, **options: Any) -> DiskANNRetriever:
    options = {"search_list_size": 300, "beam_width": 1, "gate": EmissionGate(0, 0), **options}
    return DiskANNRetriever(index, stream="auto", prefill_s_per_document=prefill_s, **options)


async def count_pools(opened: DiskANNRetriever, number: int) -> int:
    return len([update async for update in opened.stream(f"q{number % 40}")])


async def test_the_retriever_learns_that_a_quick_search_is_not_worth_streaming(index: DiskANNIndex) -> None:
    async with retriever(index, prefill_s=1.0) as opened:
        assert opened.streaming_estimate is not None
        assert opened.streaming_estimate.pays is None
        learning = [await count_pools(opened, number) for number in range(8)]
        after = [await count_pools(opened, number) for number in range(8, 28)]
    assert max(learning) > 1
    assert after == [1] * 20
    estimate = opened.streaming_estimate
    assert estimate.num_searches == 28
    assert estimate.search_s is not None
    assert 0 < estimate.search_s < 1
    assert estimate.prefilled_again is not None
    assert estimate.prefilled_again > 0


async def test_the_retriever_streams_a_slow_search(index: DiskANNIndex) -> None:
    async with retriever(index, prefill_s=1e-9) as opened:
        pools = [await count_pools(opened, number) for number in range(20)]
    assert max(pools[8:]) > 1
    assert opened.streaming_estimate is not None
    assert opened.streaming_estimate.pays


async def test_what_is_emitted_in_the_end_does_not_depend_on_streaming(index: DiskANNIndex) -> None:
    async with retriever(index, prefill_s=1.0) as opened:
        updates = [[u async for u in opened.stream("q5")] for _ in range(12)]
    assert len(updates[0]) > len(updates[-1]) == 1
    assert updates[0][-1] == updates[-1][-1]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"stream": "auto"}, "prefill_s_per_document="),
        ({"stream": "always"}, "stream='always'"),
        ({"stream": "auto", "prefill_s_per_document": -1}, "prefill_s_per_document=-1"),
    ],
)
def test_options_that_cannot_work_are_refused(index: DiskANNIndex, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        DiskANNRetriever(index, **arguments)
