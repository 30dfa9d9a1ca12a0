from __future__ import annotations

import asyncio
import math
import random
import string
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import byte_tokenizer

from stream2llm_sdk import StreamingRAG
from stream2llm_sdk.context import (
    Append,
    Chunk,
    ContextMode,
    ContextUpdate,
    Replace,
    Retriever,
    SourceFailure,
    as_retriever,
)
from stream2llm_sdk.errors import ConfigurationError, MissingExtraError, RetrievalError
from stream2llm_sdk.growing_prompt import Prompt
from stream2llm_sdk.prompt import PromptAssembler
from stream2llm_sdk.retrievers.budget_shares import whole_shares
from stream2llm_sdk.retrievers.merge import Merge, Weighted, about_tokens
from stream2llm_sdk.retrievers.merged_context import MergedContext, SourceRules
from stream2llm_sdk.testing import FakeEngine, ScriptedRetriever

APPEND, UPDATE = ContextMode.APPEND, ContextMode.UPDATE


def chunks(*texts: str, source: str = "") -> list[Chunk]:
    return [Chunk(text, source=source) for text in texts]


def texts(update: ContextUpdate) -> list[str]:
    return [chunk.text for chunk in update.chunks]


async def all_of(retriever: Retriever, query: str = "q") -> list[ContextUpdate | SourceFailure]:
    async with asyncio.timeout(20):
        return [item async for item in retriever.stream(query)]


def final(items: Iterable[ContextUpdate | SourceFailure]) -> list[str]:
    context: list[str] = []
    for item in items:
        if isinstance(item, Replace):
            context = texts(item)
        elif isinstance(item, Append):
            context += texts(item)
    return context


def failures(items: Iterable[ContextUpdate | SourceFailure]) -> dict[str, str]:
    return {item.source: item.reason for item in items if isinstance(item, SourceFailure)}


# ---- what the stream is ----------------------------------------------------------------------------------------------


async def test_sources_that_append_make_a_merge_that_appends_in_the_order_of_arrival() -> None:
    first, second, third = asyncio.Event(), asyncio.Event(), asyncio.Event()
    slow = ScriptedRetriever([second, "b", third, "d"])
    quick = ScriptedRetriever([first, "a", third, "c"])
    merge = Merge(slow, quick)
    assert merge.mode is APPEND
    stream = merge.stream("q")
    first.set()
    assert texts(await anext(stream)) == ["a"]
    second.set()
    assert texts(await anext(stream)) == ["b"]
    third.set()
    rest = [item async for item in stream]
    assert sorted(final(rest)) == ["c", "d"]
    assert all(isinstance(item, Append) for item in rest)
    assert slow.queries == quick.queries == ["q"]


async def test_a_source_that_replaces_makes_a_merge_that_replaces_with_the_whole_context() -> None:
    merge = Merge(
        ScriptedRetriever(["page"]), ScriptedRetriever([Replace(chunks("x", "y")), Replace(chunks("y", "z"))], UPDATE)
    )
    assert merge.mode is UPDATE
    items = await all_of(merge)
    assert all(isinstance(item, Replace) for item in items)
    assert sorted(final(items)) == ["page", "y", "z"]


async def test_functions_and_merges_can_be_sources() -> None:
    async def pages(query: str) -> AsyncIterator[str]:
        yield f"{query} 1"
        yield f"{query} 2"

    inner = Merge(pages, ScriptedRetriever([Replace(chunks("pool"))], UPDATE))
    merge = Merge(inner, ScriptedRetriever(["more"]))
    assert list(merge.sources) == ["Merge", "ScriptedRetriever"]
    assert sorted(final(await all_of(merge))) == ["more", "pool", "q 1", "q 2"]


async def test_it_answers_a_question() -> None:
    merge = Merge(ScriptedRetriever(["page"]), ScriptedRetriever([Replace(chunks("x")), Replace(chunks("z"))], UPDATE))
    engine = FakeEngine()
    async with StreamingRAG("no-model", merge, engine=engine, tokenizer=byte_tokenizer(), max_answer_tokens=8) as rag:
        answer = await rag.ask("why?")
    assert sorted(source.chunk.text for source in answer.sources) == ["page", "z"]
    assert engine.num_open_streams == 0


async def test_the_prompt_keeps_its_order() -> None:
    dropped, ended = asyncio.Event(), asyncio.Event()

    async def pool(query: str) -> AsyncIterator[list[Chunk]]:
        yield chunks("x1", "x2", "x3")
        await dropped.wait()
        yield chunks("x3", "x2")
        ended.set()

    async def page(query: str) -> AsyncIterator[str]:
        yield "a"
        dropped.set()
        await ended.wait()

    merge = Merge(as_retriever(pool, mode="update"), page, hold_s=0)
    async with StreamingRAG("no-model", merge, engine=FakeEngine(), tokenizer=byte_tokenizer()) as rag:
        answer = await rag.ask("why?")
    # With the x1 before them gone, all are prefilled again: what stays goes first. "stable" would leave x2 first.
    assert [source.chunk.text for source in answer.sources] == ["a", "x2", "x3"]


# ---- order -----------------------------------------------------------------------------------------------------------


def context_of(*appends: bool, hold_s: float = 0.0, **options: Any) -> MergedContext:
    rules = [SourceRules(appending) for appending in appends]
    options = {"max_chunks": None, "max_tokens": None, "count_tokens": len, "drop_duplicates": True, **options}
    return MergedContext(options.pop("rules", rules), hold_s=hold_s, **options)


def laid(context: MergedContext, now_s: float = 0.0) -> str:
    context.arrange(now_s)
    return " ".join(chunk.text for chunk in context.chunks)


def test_what_comes_at_once_goes_in_with_the_stable_first() -> None:
    context = context_of(False, False, True)
    context.take(0, Replace(chunks("x1", "x2")), 0)
    context.take(1, Replace(chunks("y1")), 0)
    context.end(1)
    context.take(2, Append(chunks("a")), 0)
    assert laid(context) == "y1 a x1 x2"


def test_what_is_there_stays_in_place_and_new_text_goes_behind_it() -> None:
    context = context_of(False, True)
    context.take(0, Replace(chunks("x1", "x2")), 0)
    assert laid(context) == "x1 x2"
    context.take(1, Append(chunks("a")), 0)
    assert laid(context) == "x1 x2 a"
    context.take(0, Replace(chunks("x2", "x1")), 0)
    assert laid(context) == "x1 x2 a"


def test_behind_a_dropped_chunk_the_stable_goes_first() -> None:
    context = context_of(False, True)
    context.take(0, Replace(chunks("x1", "x2", "x3")), 0)
    laid(context)
    context.take(1, Append(chunks("a")), 0)
    laid(context)
    context.take(0, Replace(chunks("x4", "x3", "x1")), 0)
    assert laid(context) == "x1 a x3 x4"


def test_text_waits_while_a_pool_before_it_may_change_but_not_for_ever() -> None:
    context = context_of(False, True, hold_s=1.0)
    context.take(0, Replace(chunks("x1")), 0)
    laid(context)
    context.take(1, Append(chunks("a")), 0.5)
    assert not context.arrange(0.6)
    assert context.due_s == 1.5
    assert laid(context, 1.5) == "x1 a"
    assert context.due_s is None
    context.take(1, Append(chunks("b")), 1.6)
    assert laid(context, 1.6) == "x1 a"
    context.end(0)
    assert laid(context, 1.7) == "x1 a b"


def invalidated(prompt: Prompt, update: ContextUpdate, section: str, mode: ContextMode, order: Any = None) -> int:
    """Tokens that an update makes be prefilled again."""
    before = prompt.ids
    prompt.section(section, mode, order=order).apply(update)
    same = next((i for i, (old, new) in enumerate(zip(before, prompt.ids, strict=False)) if old != new), None)
    return len(before) - min(len(before), len(prompt.ids)) if same is None else len(before) - same


@cache
def assembler() -> PromptAssembler:
    return PromptAssembler(byte_tokenizer(), max_model_len=1 << 20, max_answer_tokens=8)


Event = tuple[int, ContextUpdate | None]


def a_search_and_a_crawl(seed: int) -> list[Event]:
    """Pages that come one by one (source 0) while two searches refine their pools (1 and 2) and end."""
    random_ = random.Random(seed)
    letters = iter(string.ascii_letters)  # no two texts have a first token in common
    events: list[list[Event]] = [[(0, Append(chunks(f"{next(letters)} page " * 20))) for i in range(6)]]
    for source in (1, 2):
        pool = [f"{next(letters)} passage " * 5 for _ in range(5)]
        updates: list[Event] = [(source, Replace(chunks(*pool)))]
        for _ in range(random_.randint(0, 2)):
            pool[random_.randrange(5)] = f"{next(letters)} better " * 5
            updates.append((source, Replace(chunks(*pool))))
        events.append([*updates, (source, None)])
    events[0].append((0, None))
    merged = []
    while any(events):
        merged.append(random_.choice([left for left in events if left]).pop(0))
    return merged


def invalidated_merged(events: Sequence[Event], hold_s: float) -> int:
    context, prompt, num = context_of(True, False, False, hold_s=hold_s), assembler().begin("q"), 0
    for now_s, (source, update) in enumerate(events):
        if update is None:
            context.end(source)
        else:
            context.take(source, update, now_s)
        if context.arrange(now_s):
            num += invalidated(prompt, Replace(context.chunks), "merge", UPDATE, Merge.chunk_order)
    assert len(context.chunks) == 16
    return num


def invalidated_alone(events: Sequence[Event], *sources: int) -> int:
    """By retrievers side by side in one prompt, which has a section for what is appended and one for each pool."""
    prompt = assembler().begin("q")
    for source in sources:
        prompt.section(str(source), UPDATE if source else APPEND)
    return sum(
        invalidated(prompt, update, str(source), UPDATE if source else APPEND)
        for source, update in events
        if source in sources and update is not None
    )


def test_held_back_merged_sources_invalidate_no_more_than_each_alone() -> None:
    for seed in range(16):
        events = a_search_and_a_crawl(seed)
        alone = sum(invalidated_alone(events, source) for source in (0, 1, 2))
        assert invalidated_merged(events, math.inf) <= alone


def test_merged_sources_invalidate_far_less_than_side_by_side() -> None:
    totals = {"alone": 0, "held": 0, "not held": 0, "side by side": 0}
    for seed in range(16):
        events = a_search_and_a_crawl(seed)
        totals["alone"] += sum(invalidated_alone(events, source) for source in (0, 1, 2))
        totals["held"] += invalidated_merged(events, math.inf)
        totals["not held"] += invalidated_merged(events, 0.0)
        totals["side by side"] += invalidated_alone(events, 0, 1, 2)
    assert totals["held"] <= totals["alone"] < totals["not held"] < totals["side by side"] / 2, totals


# ---- budgets ---------------------------------------------------------------------------------------------------------


@given(
    st.integers(0, 100),
    st.lists(st.tuples(st.floats(0.1, 10), st.sampled_from([0, 1, 3, 50, math.inf])), min_size=1, max_size=6),
)
def test_shares_use_the_whole_budget_and_no_more(total: int, sources: list[tuple[float, float]]) -> None:
    weights, demands = [weight for weight, _ in sources], [demand for _, demand in sources]
    shares = whole_shares(total, weights, demands)
    assert all(0 <= share <= demand for share, demand in zip(shares, demands, strict=True))
    assert sum(shares) <= total
    assert total - sum(shares) < len(sources) or sum(shares) == sum(demands)


def test_shares_are_by_weight_and_what_is_not_needed_goes_to_the_others() -> None:
    assert whole_shares(12, [1, 2], [math.inf, math.inf]) == [4, 8]
    assert whole_shares(12, [1, 2], [math.inf, 3]) == [9, 3]
    assert whole_shares(None, [1, 1], [math.inf, 3]) == [math.inf, 3]


async def test_sources_fill_their_shares_and_then_what_others_leave() -> None:
    many = ScriptedRetriever([f"page {i}" for i in range(10)])
    few = ScriptedRetriever([Replace(chunks("x"))], UPDATE)
    assert sorted(final(await all_of(Merge(many, few, max_chunks=6)))) == [*(f"page {i}" for i in range(5)), "x"]
    capped = Merge(Weighted(many, max_chunks=2), few, max_chunks=6)
    assert sorted(final(await all_of(capped))) == ["page 0", "page 1", "x"]


async def test_while_others_run_a_source_has_its_weighted_share_only() -> None:
    going = asyncio.Event()
    many = ScriptedRetriever([Append(chunks(*(f"page {i}" for i in range(10))))])
    running = ScriptedRetriever([going], UPDATE)
    async with aclosing(Merge(Weighted(many, weight=3), running, max_chunks=8).stream("q")) as stream:
        assert len(texts(await anext(stream))) == 6
        going.set()
        assert len(texts(await anext(stream))) == 8


async def test_tokens_are_counted_as_told() -> None:
    pages = ScriptedRetriever(["one two three", "four five", "six"])
    merge = Merge(pages, max_tokens=4, count_tokens=lambda text: len(text.split()))
    items = await all_of(merge)
    assert final(items) == ["one two three", "six"]
    assert not failures(items)
    assert about_tokens("12345") == 2


async def test_a_source_without_room_is_reported() -> None:
    pages = ScriptedRetriever(["one two three"])
    merge = Merge(
        Weighted(pages, name="pages"),
        ScriptedRetriever(["a"]),
        max_tokens=2,
        count_tokens=lambda text: len(text.split()),
    )
    assert "none of its 1 chunks fits" in failures(await all_of(merge))["pages"]


SOURCES = st.lists(st.tuples(st.booleans(), st.floats(0.5, 4)), min_size=1, max_size=3)
STEPS = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 12), max_size=6), st.booleans()), max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    SOURCES, STEPS, st.none() | st.integers(1, 8), st.none() | st.integers(1, 60), st.sampled_from([0.0, 2.0, math.inf])
)
def test_whatever_comes_budgets_hold_and_what_was_appended_stays(
    sources: list[tuple[bool, float]],
    steps: list[tuple[int, list[int], bool]],
    max_chunks: int | None,
    max_tokens: int | None,
    hold_s: float,
) -> None:
    rules = [SourceRules(appends, weight) for appends, weight in sources]
    context = context_of(rules=rules, max_chunks=max_chunks, max_tokens=max_tokens, hold_s=hold_s)
    ended: set[int] = set()
    wanted: dict[int, set[str]] = {i: set() for i in range(len(rules))}
    now_s = 0.0
    for source, numbers, ends in [*steps, *((i, [], True) for i in range(len(rules)))]:
        source %= len(rules)
        appends = rules[source].appends
        before = [chunk.text for chunk in context.chunks]
        if source not in ended:
            named = [f"{source if number > 3 else 'all'}-{number}" for number in numbers]
            if named:
                context.take(source, Append(chunks(*named)) if appends else Replace(chunks(*named)), now_s)
                wanted[source] = (wanted[source] if appends else set()) | set(named)
        if ends:
            ended.add(source)
            context.end(source)
        context.arrange(now_s)
        now = [chunk.text for chunk in context.chunks]
        assert len(now) == len(set(now)) <= (max_chunks or 99)
        assert sum(map(len, now)) <= (max_tokens or 9999)
        assert set(now) <= set().union(*wanted.values())
        if appends and set(before) <= set(now):
            assert now[: len(before)] == before
        now_s += 1
    assert context.due_s is None
    if max_chunks is None and max_tokens is None:
        assert set(now) == set().union(*wanted.values())


# ---- duplicates ------------------------------------------------------------------------------------------------------


async def test_the_same_text_goes_in_once() -> None:
    merge = Merge(ScriptedRetriever(["the  same text", "b"]), ScriptedRetriever(["the same\ntext", "c"]))
    assert len(final(await all_of(merge))) == 3
    both = Merge(ScriptedRetriever(["same"]), ScriptedRetriever(["same"], source="other"), drop_duplicates=False)
    assert final(await all_of(both)) == ["same", "same"]


async def test_a_page_that_another_source_brought_a_part_of_goes_in_once_and_passages_of_a_page_all() -> None:
    passages = ScriptedRetriever([Append(chunks("part 1", "part 2", source="https://Site.test/page/"))])
    page = ScriptedRetriever([Append(chunks("whole page", source="http://site.test/page#top"))])
    assert sorted(final(await all_of(Merge(passages, page)))) == ["part 1", "part 2"]
    assert sorted(final(await all_of(Merge(page, passages)))) == ["whole page"]


def test_when_a_pool_lets_a_duplicate_go_the_other_source_has_it() -> None:
    context = context_of(False, True)
    context.take(0, Replace(chunks("same", "x")), 0)
    laid(context)
    context.take(1, Append(chunks("same")), 0)
    assert laid(context) == "same x"
    context.take(0, Replace(chunks("x")), 0)
    assert laid(context) == "same x"
    assert context.num_placed(1) == 1


# ---- failures, time, ends --------------------------------------------------------------------------------------------


async def test_a_source_that_fails_is_named_and_does_not_hold_the_others() -> None:
    merge = Merge(
        Weighted(ScriptedRetriever(["a", ValueError("broken")]), name="first"),
        ScriptedRetriever([SourceFailure("http://x", "404"), "b"]),
    )
    items = await all_of(merge)
    assert sorted(final(items)) == ["a", "b"]
    assert failures(items) == {"first": "ValueError: broken", "http://x": "404"}


async def test_if_all_fail_that_is_an_error_that_names_them() -> None:
    merge = Merge(
        Weighted(ScriptedRetriever([ValueError("broken")]), name="one"),
        Weighted(ScriptedRetriever([OSError()]), name="two"),
    )
    with pytest.raises(RetrievalError, match=r"one: ValueError: broken; two: OSError"):
        await all_of(merge)


async def test_all_failing_after_some_text_is_no_error() -> None:
    items = await all_of(Merge(ScriptedRetriever(["a", ValueError("broken")])))
    assert final(items) == ["a"]


async def test_nothing_found_is_no_error() -> None:
    assert await all_of(Merge(ScriptedRetriever([]), ScriptedRetriever([], UPDATE))) == []


async def test_a_source_of_the_wrong_mode_fails_alone() -> None:
    items = await all_of(
        Merge(Weighted(ScriptedRetriever([Replace(chunks("x"))]), name="odd"), ScriptedRetriever(["b"]))
    )
    assert final(items) == ["b"]
    assert "append mode yields Append" in failures(items)["odd"]


async def test_a_late_source_is_ended_and_what_it_brought_stays() -> None:
    late = ScriptedRetriever(["a", asyncio.Event()])
    items = await all_of(Merge(Weighted(late, timeout_s=0.05, name="late"), ScriptedRetriever(["b"])))
    assert sorted(final(items)) == ["a", "b"]
    assert "timeout_s=0.05" in failures(items)["late"]
    assert late.num_closed == 1


async def test_a_late_source_that_is_slow_to_clean_up_holds_nobody() -> None:
    may_end, has_ended = asyncio.Event(), asyncio.Event()

    async def slow(query: str) -> AsyncIterator[str]:
        try:
            await asyncio.Event().wait()
            yield "never"
        finally:
            await may_end.wait()
            has_ended.set()

    merge = Merge(Weighted(slow, timeout_s=0.05, name="late"), ScriptedRetriever(["b"]))
    items = await all_of(merge)
    assert final(items) == ["b"]
    assert "timeout_s=0.05" in failures(items)["late"]
    assert not has_ended.is_set()
    closing = asyncio.create_task(merge.aclose())
    may_end.set()
    await closing
    assert has_ended.is_set()


async def test_a_sources_own_timeout_and_cancellation_are_its_failures() -> None:
    items = await all_of(
        Merge(
            Weighted(ScriptedRetriever([TimeoutError("its own")]), timeout_s=5, name="one"),
            Weighted(ScriptedRetriever([asyncio.CancelledError()]), name="two"),
            ScriptedRetriever(["b"]),
        )
    )
    assert failures(items) == {"one": "TimeoutError: its own", "two": "CancelledError"}


async def test_a_slow_reader_does_not_use_up_a_sources_time_and_bounds_what_is_read_ahead() -> None:
    taken = 0

    async def endless(query: str) -> AsyncIterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield f"{query} {taken}"

    async with aclosing(Merge(Weighted(endless, timeout_s=0.05)).stream("q")) as stream:
        await anext(stream)
        await asyncio.sleep(0.2)
        assert taken <= 8
        assert isinstance(await anext(stream), Append)


async def test_closing_and_cancelling_end_the_sources() -> None:
    sources = [
        ScriptedRetriever(["a", asyncio.Event()]),
        ScriptedRetriever([Replace(chunks("x")), asyncio.Event()], UPDATE),
    ]
    merge = Merge(*sources)
    before = asyncio.all_tasks()
    stream = merge.stream("q")
    await anext(stream)
    await stream.aclose()
    assert [source.num_closed for source in sources] == [1, 1]

    reader = asyncio.create_task(all_of(merge))
    while any(source.num_live == 0 for source in sources):
        await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert [source.num_live for source in sources] == [0, 0]
    assert asyncio.all_tasks() == before


async def test_it_closes_and_warms_up_its_sources() -> None:
    class Cold(ScriptedRetriever):
        error: Exception | None = None
        is_warm = False

        async def warm_up(self) -> None:
            if self.error is not None:
                raise self.error
            self.is_warm = True

    warm, broken = Cold([]), Cold([])
    broken.error = OSError("not there")
    async with Merge(warm, broken, ScriptedRetriever([])) as merge:
        await merge.warm_up()
        with pytest.raises(OSError, match="not there"):
            await Merge(broken).warm_up()
        broken.error = MissingExtraError("part", "extra")
        with pytest.raises(MissingExtraError):
            await merge.warm_up()
    assert warm.is_warm
    assert warm.is_closed
    assert broken.is_closed


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Merge(), "no source"),
        (lambda: Merge("index"), "not a retriever"),
        (lambda: Merge(ScriptedRetriever([]), max_chunks=0), "max_chunks=0"),
        (lambda: Merge(ScriptedRetriever([]), max_tokens=1.5), "max_tokens=1.5"),
        (lambda: Merge(ScriptedRetriever([]), hold_s=-1), "hold_s=-1"),
        (lambda: Merge(ScriptedRetriever([]), hold_s=math.nan), "hold_s=nan"),
        (lambda: Merge(ScriptedRetriever([]), count_tokens=4), "count_tokens=4"),
        (lambda: Weighted(ScriptedRetriever([]), weight=0), "weight=0"),
        (lambda: Weighted(ScriptedRetriever([]), weight=math.inf), "weight=inf"),
        (lambda: Weighted(ScriptedRetriever([]), timeout_s=0), "timeout_s=0"),
        (lambda: Weighted(ScriptedRetriever([]), max_chunks=True), "max_chunks=True"),
        (lambda: Merge(*[Weighted(ScriptedRetriever([]), name="a")] * 2), "same name"),
    ],
)
def test_a_wrong_value_is_named(make: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make()
