"""Questions and answers: what is sent while retrieval runs, and what the answer says about it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from stream2llm_sdk import (
    Append,
    Chunk,
    ChunkOrder,
    ContextEnd,
    ContextEvent,
    ContextMode,
    DropReason,
    EventType,
    Replace,
    SourceFailure,
)
from stream2llm_sdk.context import ContextUpdate
from stream2llm_sdk.errors import (
    ConfigurationError,
    PromptError,
    PromptTooLongError,
    RetrievalError,
)
from stream2llm_sdk.testing import FakeEngine, ScriptedRetriever

from .rag_parts import context_of, engine_of, kinds_of, nothing_left, rag_of, text_in_prompt, tokenizer, until

A, B, C, D = (Chunk(f"text of {name}", source=f"http://{name}.example", title=name) for name in "abcd")


# One question


@pytest.fixture(autouse=True)
def every_change_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted retrievers are quick: without this most of their updates would go to the engine together."""
    monkeypatch.setattr("stream2llm_sdk.answer_stream._TOGETHER_S", 0.0)


async def test_an_answer_has_text_sources_timings_and_trail() -> None:
    failure = SourceFailure("http://x.example", "timed out")
    rag = rag_of({"web": ScriptedRetriever([A, failure, 0.01, B])}, FakeEngine("It is blue."))
    answer = await rag.ask("Why?")
    (request,) = engine_of(rag).requests
    assert (answer.question, answer.text, answer.finish_reason) == ("Why?", "It is blue.", "stop")
    assert answer.failures == (failure,)
    assert (answer.context_end, answer.dropped) == (ContextEnd.RETRIEVED, ())
    assert [(source.retriever, source.title, source.source) for source in answer.sources] == [
        ("web", "a", "http://a.example"),
        ("web", "b", "http://b.example"),
    ]
    assert kinds_of(request) in (["open", "append", "finish"], ["open", "append", "append", "finish"])
    assert (request.is_streaming_prompt, request.is_prompt_update) == (True, False)
    assert answer.tokens.prompt == answer.tokens.prefilled == len(request.token_ids)
    assert (answer.tokens.output, len(answer.token_ids)) == (3, 3)
    timings = answer.timings
    assert timings.first_context_s is not None
    assert timings.ttft_from_request_s is not None
    assert 0 <= timings.first_context_s < timings.retrieval_s <= timings.context_complete_s
    assert timings.context_complete_s <= timings.ttft_from_request_s <= timings.total_s
    assert timings.ttft_from_context_complete_s == timings.ttft_from_request_s - timings.retrieval_s
    assert (answer.trail[0].type, answer.trail[-1].type) == (EventType.QUEUED, EventType.FINISHED)
    assert json.loads(json.dumps(answer.to_dict()))["sources"][1]["end"] == answer.sources[1].end


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_sources_tokens_are_where_the_answer_says(streaming: bool) -> None:
    retrievers = {
        "index": ScriptedRetriever([Replace([C]), Replace([D, C])], "update"),
        "web": ScriptedRetriever([A, Append([B])]),
    }
    rag = rag_of(retrievers, streaming=streaming)
    answer = await rag.ask("Why?")
    (request,) = engine_of(rag).requests
    assert [source.retriever for source in answer.sources] == ["web", "web", "index", "index"]
    assert {source.chunk for source in answer.sources} == {A, B, C, D}
    for source in answer.sources:
        read = tokenizer().decode(list(request.token_ids[source.start : source.end]))
        assert read == text_in_prompt(source.chunk)
        assert source.num_tokens == len(text_in_prompt(source.chunk))


async def test_a_cut_source_says_so_and_what_was_dropped_names_its_retriever() -> None:
    web, feed = ScriptedRetriever([Chunk("w" * 80)]), ScriptedRetriever([0.01, Chunk("f" * 50)])
    rag = rag_of({"web": web, "feed": feed}, max_context_tokens=110, max_chunk_tokens=70)
    answer = await rag.ask("Why?")
    (request,) = engine_of(rag).requests
    assert context_of(request) == "w" * 68 + "\n\n" + "f" * 38 + "\n\n"
    assert [(source.retriever, source.num_tokens, source.was_cut) for source in answer.sources] == [
        ("web", 70, True),
        ("feed", 40, True),
    ]
    assert [(drop.section, drop.reason, drop.num_tokens, drop.kept_tokens) for drop in answer.dropped] == [
        ("web", DropReason.CHUNK_BUDGET, 12, 68),
        ("feed", DropReason.CONTEXT_BUDGET, 12, 38),
    ]


async def test_pieces_come_while_the_model_speaks_and_the_answer_has_them_all() -> None:
    engine = FakeEngine("one two three")
    rag = rag_of(ScriptedRetriever([A]), engine)
    stream = rag.stream("Why?")
    pieces = []
    async for piece in stream:
        pieces.append(piece)
        if len(pieces) == 1:
            engine.pause()
            assert await stream.progress() is not None
            engine.resume()
    answer = await stream.answer()
    assert [piece.text for piece in pieces] == ["one", " two", " three"]
    assert tuple(token for piece in pieces for token in piece.token_ids) == answer.token_ids
    assert answer.text == "one two three"
    assert [piece async for piece in stream] == []


async def test_an_answer_asked_for_first_leaves_its_pieces_to_read() -> None:
    async with rag_of(ScriptedRetriever([A])).stream("Why?") as stream:
        answer = await stream.answer()
        assert "".join([piece.text async for piece in stream]) == answer.text


async def test_the_answer_is_no_longer_than_asked_for() -> None:
    rag = rag_of(ScriptedRetriever([A]), FakeEngine("one two three"), sampling={"temperature": 0.5})
    answer = await rag.ask("Why?", max_answer_tokens=2, sampling={"top_p": 0.9})
    assert (answer.text, answer.finish_reason) == ("one two", "length")
    assert engine_of(rag).requests[0].sampling == {"temperature": 0.5, "max_tokens": 2, "top_p": 0.9}


async def test_time_that_the_engine_takes_is_not_retrieval() -> None:
    retriever = ScriptedRetriever([A])
    engine = FakeEngine()
    rag = rag_of(retriever, engine)
    asked = asyncio.create_task(rag.ask("Why?", observe=lambda _: engine.pause()))
    await until(lambda: retriever.num_exhausted == 1)
    await asyncio.sleep(0.05)
    engine.resume()
    timings = (await asked).timings
    assert timings.context_complete_s - timings.retrieval_s >= 0.04
    assert timings.ttft_from_context_complete_s is not None
    assert timings.ttft_from_context_complete_s >= 0.04


# Several questions, several retrievers


async def test_questions_asked_at_once_share_the_engine_and_nothing_else() -> None:
    gate = asyncio.Event()
    retriever = ScriptedRetriever(lambda query: [f"fact of {query}", gate, f"more of {query}"], source="")
    engine = FakeEngine(lambda ids: tokenizer().decode(list(ids)).split("Documents:\n\n")[1])
    rag = rag_of(retriever, engine)
    questions = [f"q{i}" for i in range(8)]
    asked = [asyncio.create_task(rag.ask(question)) for question in questions]
    await until(lambda: engine.num_open_streams == len(questions) == retriever.num_live)
    gate.set()
    for question, answer in zip(questions, await asyncio.gather(*asked), strict=True):
        assert answer.text.startswith(f"fact of {question}\n\nmore of {question}\n\nQuestion: {question}")


async def test_chunks_of_several_crawlers_are_appended_in_the_order_in_which_they_come() -> None:
    turns = [asyncio.Event() for _ in range(4)]
    first, second = ScriptedRetriever([turns[0], A, turns[2], B]), ScriptedRetriever([turns[1], C, turns[3], D])
    rag = rag_of([first, second])
    seen: list[ContextEvent] = []
    asked = asyncio.create_task(rag.ask("Why?", observe=seen.append))
    for number, turn in enumerate(turns):
        await until(lambda number=number: len(seen) == number)  # type: ignore[misc]
        turn.set()
    answer = await asked
    (request,) = engine_of(rag).requests
    assert context_of(request) == text_in_prompt(A, C, B, D)
    assert set(kinds_of(request)) == {"open", "append", "finish"}
    assert [source.retriever for source in answer.sources] == ["ScriptedRetriever", "ScriptedRetriever-2"] * 2


async def test_a_crawlers_chunks_go_before_what_an_index_may_replace() -> None:
    index_first = asyncio.Event()
    web = ScriptedRetriever([index_first, A, B])
    index = ScriptedRetriever([Replace([C]), Replace([D, C])], "update")
    rag = rag_of({"web": web, "index": index}, order="rank")
    asked = asyncio.create_task(rag.ask("Why?"))
    await until(lambda: index.num_exhausted == 1)
    index_first.set()
    await asked
    (request,) = engine_of(rag).requests
    assert context_of(request) == text_in_prompt(A, B, D, C)
    assert request.is_prompt_update


async def test_one_retriever_may_fail_before_and_one_after_its_first_chunk() -> None:
    retrievers = {
        "early": ScriptedRetriever([ValueError("no such index")]),
        "late": ScriptedRetriever([A, RetrievalError("connection lost")]),
        "sound": ScriptedRetriever([0.01, B]),
    }
    answer = await rag_of(retrievers).ask("Why?")
    assert [source.chunk for source in answer.sources] == [A, B]
    assert answer.failures == (
        SourceFailure("early", "ValueError: no such index"),
        SourceFailure("late", "RetrievalError: connection lost"),
    )
    assert answer.context_end is ContextEnd.RETRIEVED


@pytest.mark.parametrize("streaming", [True, False])
async def test_retrievers_that_all_fail_are_an_error_with_their_reasons(streaming: bool) -> None:
    one, two = ScriptedRetriever([ValueError("no such index")]), ScriptedRetriever([TimeoutError()])
    rag = rag_of({"one": one, "two": two, "three": ScriptedRetriever([])}, streaming=streaming)
    async with nothing_left(engine_of(rag), one, two):
        with pytest.raises(RetrievalError, match="one: ValueError: no such index; two: TimeoutError") as raised:
            await rag.ask("Why?")
        assert isinstance(raised.value.__cause__, ValueError)
        with pytest.raises(RetrievalError, match="no such index"):
            [piece async for piece in rag.stream("Why?")]


async def test_the_only_retrievers_own_error_is_raised_as_it_is() -> None:
    error = RetrievalError("every page failed")
    with pytest.raises(RetrievalError) as raised:
        await rag_of(ScriptedRetriever([SourceFailure("x", "404"), error])).ask("Why?")
    assert raised.value is error


@pytest.mark.parametrize("steps", [[], [Append([])], [SourceFailure("x", "404")], ["   "]])
async def test_nothing_found_is_answered_without_context(steps: list[Any]) -> None:
    rag = rag_of(ScriptedRetriever(steps))
    answer = await rag.ask("Why?")
    (request,) = engine_of(rag).requests
    assert (answer.sources, answer.context_end) == ((), ContextEnd.RETRIEVED)
    assert (context_of(request), kinds_of(request)) == ("", ["open", "finish"])


async def test_an_async_generator_function_is_a_retriever() -> None:
    closed = []

    async def typing(query: str) -> AsyncIterator[str]:
        try:
            yield f"you asked {query}"
            yield "and waited"
        finally:
            closed.append(query)

    answer = await rag_of(typing).ask("Why?")
    assert [(source.chunk.text, source.retriever) for source in answer.sources] == [
        ("you asked Why?", "typing"),
        ("and waited", "typing"),
    ]
    assert closed == ["Why?"]


# Enough


@pytest.mark.parametrize("streaming", [True, False])
async def test_at_the_deadline_the_model_answers_with_what_is_there(streaming: bool) -> None:
    slow, quick = ScriptedRetriever([A, asyncio.Event(), B]), ScriptedRetriever([C])
    rag = rag_of([slow, quick], streaming=streaming)
    async with nothing_left(engine_of(rag), slow, quick):
        answer = await rag.ask("Why?", deadline_s=0.05)
    assert answer.context_end is ContextEnd.DEADLINE
    assert [source.chunk for source in answer.sources] == [A, C]
    assert answer.failures == ()
    assert (slow.num_closed, quick.num_exhausted) == (1, 1)
    assert answer.timings.retrieval_s >= 0.05


async def test_a_deadline_before_any_context_is_an_answer_without_context() -> None:
    rag = rag_of(ScriptedRetriever([asyncio.Event()]), deadline_s=0.01)
    answer = await rag.ask("Why?")
    assert (answer.sources, answer.context_end) == ((), ContextEnd.DEADLINE)


async def test_a_failure_before_the_deadline_leaves_an_answer_without_context() -> None:
    retrievers = {"failing": ScriptedRetriever([ValueError("lost")]), "slow": ScriptedRetriever([asyncio.Event()])}
    answer = await rag_of(retrievers).ask("Why?", deadline_s=0.05)
    assert (answer.sources, answer.context_end) == ((), ContextEnd.DEADLINE)
    assert answer.failures == (SourceFailure("failing", "ValueError: lost"),)


async def test_a_retriever_that_is_slow_to_close_does_not_delay_the_answer() -> None:
    closing = asyncio.Event()
    retriever = ScriptedRetriever([A, asyncio.Event()], closing=[closing])
    rag = rag_of(retriever, FakeEngine("one two three"))
    async with nothing_left(engine_of(rag), retriever):
        pieces = []
        async for piece in rag.stream("Why?", deadline_s=0.01):
            pieces.append(piece.text)
            if len(pieces) == 3:
                assert (retriever.num_live, engine_of(rag).num_open_streams) == (1, 0)
                closing.set()
        assert pieces == ["one", " two", " three"]


async def test_answer_now_ends_the_retrieval() -> None:
    retriever = ScriptedRetriever([A, asyncio.Event()])
    rag = rag_of(retriever)
    async with nothing_left(engine_of(rag), retriever):
        async with rag.stream("Why?") as stream:
            await until(lambda: len(engine_of(rag).requests) == 1 and len(engine_of(rag).requests[0].operations) == 2)
            stream.answer_now()
            answer = await stream.answer()
    assert (answer.context_end, [source.chunk for source in answer.sources]) == (ContextEnd.ASKED, [A])


async def test_answer_now_before_the_question_was_begun_retrieves_nothing() -> None:
    retriever = ScriptedRetriever([A])
    stream = rag_of(retriever).stream("Why?")
    stream.answer_now()
    answer = await stream.answer()
    assert (answer.context_end, answer.sources, retriever.queries) == (ContextEnd.ASKED, (), [])


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_full_context_ends_the_retrieval(streaming: bool) -> None:
    retriever = ScriptedRetriever([A, Chunk("z" * 500), asyncio.Event()])
    rag = rag_of(retriever, streaming=streaming)
    async with nothing_left(engine_of(rag), retriever):
        answer = await rag.ask("Why?", max_context_tokens=200)
    assert answer.context_end is ContextEnd.FULL
    assert [source.was_cut for source in answer.sources] == [False, True]
    assert sum(source.num_tokens for source in answer.sources) == 200
    assert [drop.reason for drop in answer.dropped] == [DropReason.CONTEXT_BUDGET]
    assert retriever.num_closed == 1


async def test_what_a_retriever_gives_after_the_end_is_left_out() -> None:
    class Stubborn:
        mode = ContextMode.APPEND
        num_ignored = 0

        async def stream(self, query: str) -> AsyncIterator[ContextUpdate]:
            yield Append([A])
            for _ in range(3):
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    self.num_ignored += 1
                    yield Append([B])

    retriever = Stubborn()
    answer = await rag_of(retriever).ask("Why?", deadline_s=0.01)
    assert ([source.chunk for source in answer.sources], retriever.num_ignored) == ([A], 1)


# What is sent


@pytest.mark.parametrize("mode", list(ContextMode))
async def test_changes_that_come_while_the_engine_is_busy_go_out_as_one(mode: ContextMode) -> None:
    chunks = [Chunk(f"chunk {i}") for i in range(20)]
    steps = [Append([c]) if mode == "append" else Replace(chunks[i : i + 3]) for i, c in enumerate(chunks)]
    final = text_in_prompt(*(chunks if mode == "append" else chunks[19:]))
    go = asyncio.Event()
    retriever = ScriptedRetriever([steps[0], go, *steps[1:], asyncio.Event()], mode)
    engine = FakeEngine()
    seen: list[ContextEvent] = []
    async with rag_of(retriever, engine).stream("Why?", observe=seen.append) as stream:
        await until(lambda: bool(engine.requests) and kinds_of(engine.requests[0]) == ["open", "append"])
        (request,) = engine.requests
        engine.pause()
        go.set()
        await until(lambda: len(seen) == len(steps))
        engine.resume()
        await until(lambda: str(tokenizer().decode(list(request.token_ids))).endswith(final))
        stream.answer_now()
        await stream.answer()
    assert kinds_of(request)[2] == {"append": "append", "update": "replace"}[mode]
    assert len(request.operations) <= 5
    assert context_of(request) == final


async def test_changes_that_cancel_out_while_the_engine_is_busy_are_not_sent() -> None:
    turns = [asyncio.Event(), asyncio.Event()]
    steps: list[Any] = [
        Replace([A]),
        turns[0],
        Replace([A, B]),
        turns[1],
        Replace([C]),
        Replace([A, B]),
        asyncio.Event(),
    ]
    engine = FakeEngine()
    seen: list[ContextEvent] = []
    async with rag_of(ScriptedRetriever(steps, "update"), engine).stream("Why?", observe=seen.append) as stream:
        await until(lambda: bool(engine.requests) and kinds_of(engine.requests[0]) == ["open", "append"])
        engine.pause()
        turns[0].set()
        await until(lambda: len(seen) == 2)
        for _ in range(10):
            await asyncio.sleep(0)  # the second update is on its way
        turns[1].set()
        await until(lambda: len(seen) == 4)
        engine.resume()
        await until(lambda: len(engine.requests[0].operations) == 3)
        for _ in range(20):
            await asyncio.sleep(0)
        stream.answer_now()
        await stream.answer()
    assert kinds_of(engine.requests[0]) == ["open", "append", "append", "finish"]
    assert context_of(engine.requests[0]) == text_in_prompt(A, B)


def random_script(seed: int) -> tuple[dict[str, ScriptedRetriever], Callable[[ContextEvent], None]]:
    """Some crawlers and indexes whose updates come in one order, whatever the engine does; and who keeps that order."""
    rng = random.Random(seed)
    documents = [Chunk("x" * rng.randint(1, 90), source=f"{i}") for i in range(12)]
    modes = [rng.choice(list(ContextMode)) for _ in range(rng.randint(1, 3))]
    steps: list[list[Any]] = [[] for _ in modes]
    turns = [asyncio.Event() for _ in range(rng.randint(1, 14))]
    for turn in turns:
        number = rng.randrange(len(modes))
        update = Append if modes[number] is ContextMode.APPEND else Replace
        steps[number] += [turn, rng.choice([0, 0.001]), update(rng.sample(documents, rng.randint(0, 5)))]
    waiting = iter(turns)
    next(waiting).set()

    def next_turn(_event: ContextEvent | None = None) -> None:
        for turn in waiting:
            turn.set()
            break

    retrievers = {
        f"{mode.value} {number}": ScriptedRetriever(script, mode)
        for number, (mode, script) in enumerate(zip(modes, steps, strict=True))
    }
    return retrievers, next_turn


@pytest.mark.parametrize("order", list(ChunkOrder))
async def test_the_prompt_that_grew_is_the_prompt_sent_whole(order: ChunkOrder) -> None:
    num_replaced = 0
    for seed in range(40):
        sent, sources = [], []
        for streaming in (True, False):
            retrievers, next_turn = random_script(seed)
            engine = FakeEngine(prefill_tokens_per_s=None if seed % 2 else 200_000)
            rag = rag_of(retrievers, engine, order=order, max_context_tokens=500, streaming=streaming)
            answer = await rag.ask("Why?", observe=next_turn)
            (request,) = engine.requests
            sent.append(request.token_ids)
            sources.append((answer.sources, answer.dropped, answer.context_end))
            num_replaced += kinds_of(request).count("replace")
        assert sent[0] == sent[1], seed
        assert sources[0] == sources[1], seed
    assert num_replaced > 20


# What is refused


async def test_a_question_must_be_text() -> None:
    rag = rag_of(ScriptedRetriever([A]))
    question: Any = b"Why?"
    with pytest.raises(ConfigurationError, match="the question must be a str, not bytes"):
        rag.stream(question)


@pytest.mark.parametrize(
    ("question", "error", "options"),
    [
        ("", PromptError, {}),
        (" \n\x00", PromptError, {}),
        ("why " * 4000, PromptTooLongError, {}),
        ("Why?", PromptTooLongError, {"max_answer_tokens": 8190}),
        ("Why?", ConfigurationError, {"max_answer_tokens": 0}),
        ("Why?", ConfigurationError, {"max_context_tokens": -1}),
    ],
)
async def test_a_question_that_cannot_work_is_refused_before_anything_is_begun(
    question: str, error: type[Exception], options: dict[str, Any]
) -> None:
    retriever = ScriptedRetriever([A])
    rag = rag_of(retriever)
    async with nothing_left(engine_of(rag), retriever):
        with pytest.raises(error):
            await rag.ask(question, **options)
    assert (engine_of(rag).requests, retriever.queries) == ([], [])


@pytest.mark.parametrize("deadline_s", [0, -1, float("nan"), "soon", True])
def test_a_deadline_is_a_number_of_seconds(deadline_s: Any) -> None:
    with pytest.raises(ConfigurationError, match="deadline_s="):
        rag_of(ScriptedRetriever([]), deadline_s=deadline_s)
    with pytest.raises(ConfigurationError, match="deadline_s="):
        rag_of(ScriptedRetriever([])).stream("Why?", deadline_s=deadline_s)


def test_arguments_that_cannot_work_are_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match="no retriever"):
        rag_of([])
    with pytest.raises(ConfigurationError, match="'x' is not a retriever"):
        rag_of("x")
    with pytest.raises(ConfigurationError, match="unknown argument max_model_len"):
        rag_of(ScriptedRetriever([]), max_model_len=5)
    with pytest.raises(ConfigurationError, match="policy and engine_options"):
        rag_of(ScriptedRetriever([]), policy="FCFS")


# Retrievers that do as they should not


async def test_a_replacement_in_append_mode_is_that_retrievers_failure() -> None:
    update: Any = Replace([B])
    with pytest.raises(RetrievalError, match="retriever 'web' has mode 'append' and yielded Replace"):
        await rag_of({"web": ScriptedRetriever([update])}).ask("Why?")
    answer = await rag_of({"web": ScriptedRetriever([A, update])}).ask("Why?")
    assert [source.chunk for source in answer.sources] == [A]
    assert "yielded Replace" in answer.failures[0].reason


async def test_a_mode_given_as_text_is_a_mode() -> None:
    class Plain:
        mode: Any = "append"

        async def stream(self, query: str) -> AsyncIterator[ContextUpdate]:
            yield Append([A])
            yield Replace([B])

    answer = await rag_of(Plain()).ask("Why?")
    assert [source.chunk for source in answer.sources] == [A]
    assert "yielded Replace" in answer.failures[0].reason
    Plain.mode = "sometimes"
    with pytest.raises(ConfigurationError, match="mode='sometimes'"):
        await rag_of(Plain()).ask("Why?")


class Iterator:
    """A retriever whose iterator is no generator. `fail` says where it fails."""

    mode = ContextMode.APPEND

    def __init__(self, fail: str) -> None:
        self._fail = fail
        self._num_left = 1

    def stream(self, query: str) -> Iterator:
        if self._fail == "stream":
            raise RuntimeError("cannot stream")
        return self

    def __aiter__(self) -> Iterator:
        return self

    async def __anext__(self) -> ContextUpdate:
        await asyncio.sleep(0)
        if self._fail == "next":
            raise asyncio.CancelledError
        if not self._num_left:
            raise StopAsyncIteration
        self._num_left -= 1
        return Append([B])

    async def aclose(self) -> None:
        await asyncio.sleep(0)
        if self._fail == "aclose":
            raise RuntimeError("cannot close")


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        ("stream", "RuntimeError: cannot stream"),
        ("next", "CancelledError"),
        ("aclose", "RuntimeError: cannot close"),
        ("", None),
    ],
)
async def test_a_retriever_may_fail_anywhere(fail: str, reason: str | None) -> None:
    sound = ScriptedRetriever([A])
    rag = rag_of({"sound": sound, "other": Iterator(fail)})
    async with nothing_left(engine_of(rag), sound):
        answer = await rag.ask("Why?")
    assert [failure.reason for failure in answer.failures] == ([reason] if reason else [])
    assert A in [source.chunk for source in answer.sources]


async def test_an_observers_error_is_the_callers() -> None:
    def observe(event: ContextEvent) -> None:
        raise KeyError(event.retriever)

    retriever = ScriptedRetriever([A, asyncio.Event()])
    rag = rag_of({"web": retriever})
    async with nothing_left(engine_of(rag), retriever):
        with pytest.raises(KeyError, match="web"):
            await rag.ask("Why?", observe=observe)


async def test_an_observer_sees_updates_and_failures_as_they_come() -> None:
    seen: list[ContextEvent] = []
    failure = SourceFailure("x", "404")
    await rag_of({"web": ScriptedRetriever([A, failure, ValueError("lost")])}).ask("Why?", observe=seen.append)
    assert [event.item for event in seen] == [Append([A]), failure, SourceFailure("web", "ValueError: lost")]
    assert [event.num_context_tokens for event in seen] == [len(text_in_prompt(A))] * 3
    assert 0 <= seen[0].at_s <= seen[1].at_s <= seen[2].at_s


async def test_the_last_chunk_and_the_tail_are_one_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stream2llm_sdk.answer_stream._TOGETHER_S", 30.0)  # and the end cuts it short
    for retriever in (ScriptedRetriever([A, B]), ScriptedRetriever([Replace([C]), Replace([D, C])], "update")):
        rag = rag_of(retriever)
        answer = await rag.ask("Why?")
        (request,) = engine_of(rag).requests
        assert kinds_of(request)[0] == "open"
        assert len(request.operations) == 2
        assert answer.tokens.prompt == len(request.token_ids)


async def test_the_repr_of_an_answer_is_short_however_much_it_read() -> None:
    page = Chunk("words " * 500, source="http://a.example", title="a")
    async with rag_of(ScriptedRetriever([page]), FakeEngine("answer " * 10), max_answer_tokens=64) as rag:
        answer = await rag.ask("Why?")
    assert repr(answer).startswith("<Answer to 'Why?': 'answer answer")
    assert " 1 source, retrieval 0." in repr(answer)
    assert "words" not in repr(answer)
    assert len(repr(answer)) < 250
    assert len(repr(answer.sources)) < 300
    assert str(answer) == answer.text
