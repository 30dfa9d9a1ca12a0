"""Nothing is left behind: questions that are cancelled, left or closed, and engines that die."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from stream2llm_sdk import Answer, Chunk, ContextEnd, Replace, StreamingRAG
from stream2llm_sdk.errors import (
    ConfigurationError,
    EngineDeadError,
    EngineStartError,
    RetrievalError,
    Stream2LLMError,
    StreamAbortedError,
)
from stream2llm_sdk.testing import FakeEngine, ScriptedRetriever

from .rag_parts import engine_of, kinds_of, nothing_left, rag_of, tokenizer, until

A, B, C = (Chunk(f"text of {name}", source=name) for name in "abc")

Parts = tuple[StreamingRAG, list[ScriptedRetriever]]


def one_crawler(**options: Any) -> Parts:
    retriever = ScriptedRetriever([0, A, 0, B], closing=[0, 0])
    return rag_of(retriever, **options), [retriever]


def crawler_and_index() -> Parts:
    web = ScriptedRetriever([0, A, 0, 0, B], closing=[0, 0])
    index = ScriptedRetriever([Replace([C]), 0, 0, 0, Replace([A, C])], "update", closing=[0])
    return rag_of([web, index], order="rank"), [web, index]


def failing() -> Parts:
    retriever = ScriptedRetriever([0, ValueError("lost")], closing=[0, 0])
    return rag_of(retriever), [retriever]


def deadline() -> Parts:
    retriever = ScriptedRetriever([A, asyncio.Event()], closing=[0, 0, 0])
    return rag_of(retriever, deadline_s=1e-4), [retriever]


SCENARIOS: dict[str, Callable[[], Parts]] = {
    "crawler": one_crawler,
    "not streaming": lambda: one_crawler(streaming=False),
    "crawler and index": crawler_and_index,
    "failing": failing,
    "deadline": deadline,
}


async def ask(rag: StreamingRAG) -> None:
    await rag.ask("Why?")


async def iterate(rag: StreamingRAG) -> None:
    async with rag.stream("Why?") as answer:
        async for _ in answer:
            await asyncio.sleep(0)


async def iterate_bare(rag: StreamingRAG) -> None:
    async for _ in rag.stream("Why?"):
        await asyncio.sleep(0)


async def steps_of(task: asyncio.Future[Any], num_steps: int) -> bool:
    """Lets a task run for so many iterations of the loop. False if it has ended before."""
    for _ in range(num_steps):
        await asyncio.sleep(0)
    return not task.done()


async def cancel_at_every_step(
    scenario: Callable[[], Parts], act: Callable[[StreamingRAG], Awaitable[None]], *, again_after: int | None = None
) -> int:
    """Cancels `act` after 0, 1, 2, … iterations of the loop until it ends by itself. Returns how many there were."""
    for num_steps in range(1000):
        rag, retrievers = scenario()
        async with nothing_left(
            engine_of(rag), *retrievers, within=0 if act is ask else 20
        ):  # an iterator left is asyncio's care
            task = asyncio.ensure_future(act(rag))
            was_cancelled = await steps_of(task, num_steps)
            task.cancel()
            if again_after is not None:
                await steps_of(task, again_after)
                task.cancel()
            with suppress(asyncio.CancelledError, Stream2LLMError):
                await task
        if not was_cancelled:
            return num_steps
        assert task.cancelled()
    raise AssertionError("the question never ends")


@pytest.fixture(autouse=True)
def every_change_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted retrievers are quick: without this most of their updates would go to the engine together."""
    monkeypatch.setattr("stream2llm_sdk.answer_stream._TOGETHER_S", 0.0)


@pytest.mark.parametrize("act", [ask, iterate, iterate_bare])
@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_a_question_may_be_cancelled_at_any_moment(
    scenario: str, act: Callable[[StreamingRAG], Awaitable[None]]
) -> None:
    assert await cancel_at_every_step(SCENARIOS[scenario], act) > 10


@pytest.mark.parametrize("again_after", [1, 2, 5])
async def test_a_second_cancellation_leaves_nothing_behind_either(again_after: int) -> None:
    for scenario in (one_crawler, crawler_and_index, deadline):
        await cancel_at_every_step(scenario, ask, again_after=again_after)


@pytest.mark.parametrize("what", [("answer",), ("rag",), ("rag", "answer")], ids="-".join)
async def test_a_question_may_be_closed_at_any_moment(what: tuple[str, ...]) -> None:
    outcomes: list[object] = []
    for num_steps in range(1000):
        rag, retrievers = one_crawler()
        async with nothing_left(engine_of(rag), *retrievers):
            stream = rag.stream("Why?")
            task = asyncio.ensure_future(stream.answer())
            is_running = await steps_of(task, num_steps)
            close = {"rag": rag.aclose, "answer": stream.aclose}
            await asyncio.gather(*(close[name]() for name in what))
            outcomes += await asyncio.gather(task, return_exceptions=True)
        if not is_running:
            break
    # What was closed in its last steps is complete.
    assert len([outcome for outcome in outcomes if isinstance(outcome, Stream2LLMError)]) > len(outcomes) - 6 > 10
    assert all(isinstance(outcome, Stream2LLMError | Answer) for outcome in outcomes)


async def test_a_cancelled_question_does_no_harm_to_the_next() -> None:
    rag, _ = one_crawler()
    task = asyncio.create_task(rag.ask("Why?"))
    await steps_of(task, 8)
    task.cancel()
    await asyncio.wait({task})
    assert (await rag.ask("Why?")).sources


async def test_leaving_the_iteration_ends_the_question() -> None:
    retriever = ScriptedRetriever([A, asyncio.Event()])
    engine = FakeEngine("word " * 1000)
    rag = rag_of(retriever, engine, max_answer_tokens=2000)
    async with nothing_left(engine, retriever, within=20):
        async for piece in rag.stream("Why?", deadline_s=0.01):
            assert piece.text == "word"
            break
        gc.collect()
    assert kinds_of(engine.requests[0])[-1] == "abort"


async def test_an_error_in_the_iterations_body_ends_the_question() -> None:
    retriever = ScriptedRetriever([A])
    rag = rag_of(retriever, FakeEngine("one two three"))

    async def read() -> None:
        async with rag.stream("Why?") as stream:
            async for piece in stream:
                raise KeyError(piece.text)

    async with nothing_left(engine_of(rag), retriever, within=2):  # asyncio's own care for the iterator
        with pytest.raises(KeyError, match="one"):
            await read()


async def test_closing_twice_is_closing_once() -> None:
    retriever = ScriptedRetriever([A, asyncio.Event()])
    rag = rag_of(retriever)
    async with nothing_left(engine_of(rag), retriever):
        stream = rag.stream("Why?")
        asked = asyncio.create_task(stream.answer())
        await until(lambda: retriever.num_live == 1)
        await asyncio.gather(stream.aclose(), stream.aclose())
        await stream.aclose()
        with pytest.raises(StreamAbortedError, match="closed before it was complete"):
            await asked
        with pytest.raises(StreamAbortedError):
            [piece async for piece in stream]
        await rag.aclose()
        await rag.aclose()
    assert retriever.num_closed == 1


async def test_closing_again_does_not_cut_short_what_the_first_closing_does() -> None:
    retriever = ScriptedRetriever([A, asyncio.Event()])
    engine = FakeEngine()
    rag = rag_of(retriever, engine)
    async with nothing_left(engine, retriever):
        stream = await rag.stream("Why?", observe=lambda _: engine.pause()).__aenter__()
        await until(lambda: retriever.num_live == 1)
        for _ in range(20):  # until the sender waits for the paused engine
            await asyncio.sleep(0)
        closing = []
        for _ in range(3):  # the engine is busy with an update, and must be told of the end after it
            closing.append(asyncio.create_task(stream.aclose()))
            assert await steps_of(closing[-1], 10)
        engine.resume()
        await asyncio.gather(*closing)
    assert engine.requests[0].is_aborted


async def test_an_answer_that_was_closed_before_it_began_does_not_begin() -> None:
    rag, (retriever,) = one_crawler()
    stream = rag.stream("Why?")
    await stream.aclose()
    with pytest.raises(StreamAbortedError, match="before it was begun"):
        await stream.answer()
    assert retriever.queries == []


async def test_an_abandoned_answer_is_ended_with_the_rag() -> None:
    retriever = ScriptedRetriever([A, asyncio.Event()])
    rag = rag_of(retriever)
    async with nothing_left(engine_of(rag), retriever):
        await rag.start()
        await rag.stream("Why?").__aenter__()
        await until(lambda: retriever.num_live == 1)
        await rag.aclose()
    assert retriever.is_closed
    with pytest.raises(Stream2LLMError, match="was closed"):
        await rag.ask("Why?")


# Retrievers that take long to end


async def test_cancelling_waits_until_retrievers_have_released_what_they_hold() -> None:
    closing = asyncio.Event()
    retriever = ScriptedRetriever([A, asyncio.Event()], closing=[closing])
    rag = rag_of(retriever)
    async with nothing_left(engine_of(rag), retriever):
        asked = asyncio.create_task(rag.ask("Why?"))
        await until(lambda: retriever.num_live == 1)
        for _ in range(3):
            asked.cancel()
            assert await steps_of(asked, 20)
        assert engine_of(rag).num_open_streams == 0
        closing.set()
        with pytest.raises(asyncio.CancelledError):
            await asked
    assert retriever.num_closed == 1


async def test_a_retriever_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stream2llm_sdk.gathering._CLEANUP_S", 0.02)
    retriever = ScriptedRetriever([A, asyncio.Event()], closing=[asyncio.Event()])
    rag = rag_of(retriever)
    async with nothing_left(engine_of(rag), retriever):
        async with asyncio.timeout(20):
            answer = await rag.ask("Why?", deadline_s=0.01)
    assert [source.chunk for source in answer.sources] == [A]


# The engine ends


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_dead_engine_is_an_error_at_once(streaming: bool) -> None:
    retriever = ScriptedRetriever([A])
    rag = rag_of(retriever, streaming=streaming)
    engine_of(rag).die()
    async with nothing_left(engine_of(rag), retriever):
        with pytest.raises(EngineDeadError):
            await rag.ask("Why?")


async def test_an_engine_may_die_while_nothing_happens() -> None:
    retriever = ScriptedRetriever([A, asyncio.Event()])
    rag = rag_of(retriever)
    engine = engine_of(rag)
    async with nothing_left(engine, retriever):
        asked = [asyncio.create_task(rag.ask("Why?")) for _ in range(3)]
        await until(lambda: [kinds_of(request) for request in engine.requests] == [["open", "append"]] * 3)
        engine.die()
        async with asyncio.timeout(20):
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [EngineDeadError] * 3


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("is_busy", [False, True])
async def test_an_engine_may_die_at_any_moment(scenario: str, is_busy: bool) -> None:
    outcomes = []
    for num_steps in range(1000):
        rag, retrievers = SCENARIOS[scenario]()
        engine = engine_of(rag)
        async with nothing_left(engine, *retrievers):
            task = asyncio.create_task(rag.ask("Why?"))
            is_running = await steps_of(task, num_steps)
            if is_busy and is_running:
                engine.pause()
                await steps_of(task, 10)
            engine.die()
            async with asyncio.timeout(20):
                outcomes.append((await asyncio.gather(task, return_exceptions=True))[0])
        if not is_running:
            break
    expected = EngineDeadError if scenario != "failing" else Stream2LLMError
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert all(isinstance(outcome, expected) for outcome in failed)
    assert len(failed) > 10
    # Only what was complete already, or its last step, has an answer.
    assert len(failed) >= len(outcomes) - 12


async def test_an_engine_that_is_closed_under_a_question_ends_it() -> None:
    retriever = ScriptedRetriever([A, asyncio.Event()])
    rag = rag_of(retriever)
    async with nothing_left(engine_of(rag), retriever):
        asked = asyncio.create_task(rag.ask("Why?"))
        await until(lambda: retriever.num_live == 1)
        await engine_of(rag).aclose()
        with pytest.raises(StreamAbortedError):
            async with asyncio.timeout(20):
                await asked


# The engine that was started here


class StartedEngine(FakeEngine):
    """Stands where the embedded engine does when a `StreamingRAG` starts its own."""

    made: list[StartedEngine]
    error: Exception | None

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__()
        type(self).made.append(self)
        self.is_started = False

    async def start(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        self.is_started = True
        if self.error is not None:
            raise self.error
        await asyncio.sleep(0)

    async def aclose(self) -> None:
        await asyncio.sleep(0)
        await super().aclose()


@pytest.fixture
def started_engine(monkeypatch: pytest.MonkeyPatch) -> type[StartedEngine]:
    StartedEngine.made, StartedEngine.error = [], None
    monkeypatch.setattr("stream2llm_sdk.serving.vllm_engine.Stream2LLMEngine", StartedEngine)
    return StartedEngine


def rag_with_its_own_engine(*retrievers: Any, **options: Any) -> StreamingRAG:
    return StreamingRAG("no-model", list(retrievers), tokenizer=tokenizer(), **options)


@pytest.mark.parametrize("again_after", [None, 1])
async def test_a_start_may_be_cancelled_at_any_moment(
    started_engine: type[StartedEngine], again_after: int | None
) -> None:
    before = asyncio.all_tasks()
    for num_steps in range(1000):
        retriever = ScriptedRetriever([A])
        rag = rag_with_its_own_engine(retriever)
        task = asyncio.create_task(rag.start())
        is_running = await steps_of(task, num_steps)
        task.cancel()
        if again_after is not None:
            await steps_of(task, again_after)
            task.cancel()
        await asyncio.wait({task})
        assert asyncio.all_tasks() == before
        if not is_running:
            break
        assert task.cancelled()
        assert all(engine.is_closed for engine in started_engine.made)
        assert (await rag.ask("Why?")).sources, "it can still be used"
        await rag.aclose()
        assert all(engine.is_closed for engine in started_engine.made)
    assert num_steps > 4


@pytest.mark.parametrize(("option", "value"), [("user", "no slots"), ("separator", 5), ("chat_template", "{{")])
async def test_bad_prompt_options_are_said_before_an_engine_starts(
    started_engine: type[StartedEngine], option: str, value: Any
) -> None:
    rag = rag_with_its_own_engine(ScriptedRetriever([A]), **{option: value})
    with pytest.raises(ConfigurationError, match=option):
        await rag.start()
    assert not any(engine.is_started for engine in started_engine.made)


async def test_a_start_that_fails_closes_what_it_started(started_engine: type[StartedEngine]) -> None:
    before = asyncio.all_tasks()
    started_engine.error = EngineStartError("no memory")
    rag = rag_with_its_own_engine(ScriptedRetriever([A]))
    with pytest.raises(EngineStartError, match="no memory"):
        await rag.ask("Why?")
    started_engine.error = None
    too_long = rag_with_its_own_engine(ScriptedRetriever([A]), max_answer_tokens=9000)
    with pytest.raises(ConfigurationError, match="max_model_len"):
        await too_long.start()
    assert [(engine.is_started, engine.is_closed) for engine in started_engine.made] == [(True, True)] * 2
    assert asyncio.all_tasks() == before
    async with rag:
        assert (await rag.ask("Why?")).sources
    assert all(engine.is_closed for engine in started_engine.made)


async def test_retrievers_are_warmed_up_while_the_engine_starts(started_engine: type[StartedEngine]) -> None:
    class Warm(ScriptedRetriever):
        is_warm = False

        async def warm_up(self) -> None:
            while not started_engine.made:
                await asyncio.sleep(0)
            assert not started_engine.made[0].is_started
            self.is_warm = True

    retriever = Warm([A])
    async with rag_with_its_own_engine(retriever):
        assert retriever.is_warm
    assert retriever.is_closed


async def test_one_retriever_that_cannot_be_closed_keeps_nothing_else_open(started_engine: type[StartedEngine]) -> None:
    class Stuck(ScriptedRetriever):
        async def aclose(self) -> None:
            raise RuntimeError("stuck")

    before, after = ScriptedRetriever([A]), ScriptedRetriever([A])
    rag = rag_with_its_own_engine(before, Stuck([A]), after)
    await rag.start()
    with pytest.raises(RuntimeError, match="stuck"):
        await rag.aclose()
    assert before.is_closed
    assert after.is_closed
    assert started_engine.made[0].is_closed


async def test_an_engine_that_was_given_is_left_running() -> None:
    engine = FakeEngine()
    async with rag_of(ScriptedRetriever([A]), engine) as rag:
        assert (await rag.ask("Why?")).text
    assert not engine.is_closed


async def test_leaving_the_context_ends_questions_even_while_cancelled() -> None:
    retriever = ScriptedRetriever([A, asyncio.Event()], closing=[0, 0, 0])
    rag = rag_of(retriever)

    async def use() -> None:
        async with rag:
            await rag.stream("Why?").__aenter__()
            await until(lambda: retriever.num_live == 1)

    async with nothing_left(engine_of(rag), retriever):
        task = asyncio.create_task(use())
        await until(lambda: rag._closed)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert retriever.is_closed


async def test_a_source_that_never_waits_does_not_keep_the_deadline_from_coming() -> None:
    async def endless(question: str) -> AsyncIterator[str]:
        while True:
            yield " "

    rag = rag_of(endless)
    async with asyncio.timeout(20):
        answer = await rag.ask("Why?", deadline_s=0.1)
    assert answer.context_end is ContextEnd.DEADLINE


async def test_a_panic_of_a_native_library_is_the_retrievers_failure() -> None:
    class PanicError(BaseException):
        pass

    async def panics(question: str) -> AsyncIterator[str]:
        raise PanicError("gone")
        yield ""

    with pytest.raises(RetrievalError, match="gone"):
        await rag_of(panics).ask("Why?")
