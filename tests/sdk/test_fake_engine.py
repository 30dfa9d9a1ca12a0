"""The engine without a model behaves as the embedded one does, and says what it was asked to do."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from stream2llm_sdk.context import Append, Chunk, ContextMode, Replace, SourceFailure
from stream2llm_sdk.errors import (
    ConfigurationError,
    EmptyPromptError,
    EngineDeadError,
    EngineError,
    PromptError,
    PromptTooLongError,
    StreamAbortedError,
    StreamFinishedError,
    UnsupportedFeatureError,
)
from stream2llm_sdk.serving.engine import PromptUpdate, Stream
from stream2llm_sdk.testing import FakeEngine, Operation, ScriptedRetriever
from stream2llm_sdk.trail import EventType

from .rag_parts import until


async def text_of(stream: Stream) -> tuple[str, str | None]:
    outputs = [output async for output in stream]
    assert all(output.finish_reason is None for output in outputs[:-1])
    return "".join(output.text for output in outputs), outputs[-1].finish_reason


async def test_a_prompt_grows_and_is_answered() -> None:
    engine = FakeEngine(lambda ids: f"read {len(ids)} tokens")
    async with await engine.open([1, 2], {"max_tokens": 9}, request_id="r") as stream:
        assert await stream.append([3]) == PromptUpdate(num_tokens=3, lcp=2, num_invalidated=0)
        assert not stream.is_streaming_prompt_finished
        assert await stream.finish([4, 5]) == PromptUpdate(5, 3, 0)
        assert await text_of(stream) == ("read 5 tokens", "stop")
    (request,) = engine.requests
    assert request.operations == [
        Operation("open", (1, 2)),
        Operation("append", (3,)),
        Operation("finish", (4, 5)),
    ]
    assert (request.request_id, request.token_ids, request.sampling["max_tokens"]) == ("r", (1, 2, 3, 4, 5), 9)
    assert engine.num_open_streams == 0


async def test_a_replaced_prompt_keeps_its_common_prefix() -> None:
    async with await FakeEngine().open([1, 2, 3, 4], mode="update") as stream:
        assert await stream.replace([1, 2, 9]) == PromptUpdate(3, lcp=2, num_invalidated=1)
        assert await stream.replace([7]) == PromptUpdate(1, lcp=0, num_invalidated=2)
        progress = await stream.progress()
        assert (progress.num_tokens, progress.num_computed, progress.num_tokens_invalidated) == (1, 0, 3)
        await stream.finish([8])
        await text_of(stream)
        ended = (await stream.trail()).last(EventType.FINISHED)
        assert ended is not None
        # 3 of the first prompt, none of the two that followed (their last token is held), 2 at the end, 3 of the answer
        assert ended.data["num_tokens_computed"] == 3 + 0 + 0 + 2 + 3
        assert ended.data["num_updates"] == 3


async def test_the_trail_has_states_and_marks_as_the_scheduler_records_them() -> None:
    engine = FakeEngine("one two", prefill_tokens_per_s=1000)
    async with await engine.open(range(10)) as stream:
        await stream.append(range(5))
        await asyncio.sleep(0.02)
        await stream.finish([1])
        await text_of(stream)
        trail = await stream.trail()
    assert [event.type for event in trail if event.type.is_state] == [
        EventType.QUEUED,
        EventType.SCHEDULED,
        EventType.KV_ON_GPU,
        EventType.SCHEDULED,
        EventType.KV_ON_GPU,
        EventType.SCHEDULED,
        EventType.FINISHED,
    ]
    assert [event.type for event in trail if not event.type.is_state] == [
        EventType.CHUNK_ARRIVED,
        EventType.PROMPT_UPDATED,
        EventType.CHUNK_ARRIVED,
        EventType.CONTEXT_COMPLETE,
        EventType.PROMPT_UPDATED,
        EventType.FIRST_TOKEN,
    ]
    # 9 tokens, then 5: the last of an open prompt waits for what comes behind it.
    assert trail.duration_s(EventType.SCHEDULED) >= 0.0149
    assert trail.duration_s(EventType.KV_ON_GPU) >= 0.01


async def test_a_slow_engine_takes_one_thing_at_a_time() -> None:
    engine = FakeEngine(prefill_tokens_per_s=1000)
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    async with await engine.open(range(31)) as first, await engine.open(range(21)) as second:
        assert loop.time() - started_s >= 0.029
        await asyncio.gather(first.finish([1]), second.finish([1]))
        assert await text_of(first) == await text_of(second) == ("This is the answer.", "stop")
        assert loop.time() - started_s >= 0.049


async def test_the_answer_takes_its_time() -> None:
    loop = asyncio.get_running_loop()
    async with await FakeEngine("one two three", decode_tokens_per_s=100).open([1], finished=True) as stream:
        started_s = loop.time()
        assert (await text_of(stream))[0] == "one two three"
        assert loop.time() - started_s >= 0.029


async def test_a_plain_request_is_answered_whole() -> None:
    engine = FakeEngine("one two three")
    stream = await engine.open([1, 2], {"max_tokens": 2}, finished=True)
    assert await text_of(stream) == ("one two", "length")
    assert not engine.requests[0].is_streaming_prompt
    assert (await stream.trail()).count(EventType.CONTEXT_COMPLETE) == 1


async def test_nothing_comes_out_before_the_prompt_is_finished() -> None:
    async with await FakeEngine().open([1]) as stream:
        reading = asyncio.create_task(text_of(stream))
        await stream.append([2])
        for _ in range(20):
            await asyncio.sleep(0)
        assert not reading.done()
        await stream.finish()
        assert (await reading)[0] == "This is the answer."


async def test_what_the_embedded_engine_refuses_is_refused() -> None:
    engine = FakeEngine(max_model_len=100, max_prompt_tokens=5, vocabulary_size=50)
    refused: Any
    for refused, error in [
        (range(6), PromptTooLongError),
        ([50], PromptError),
        ("text", PromptError),
        ([0.5], PromptError),
    ]:
        with pytest.raises(error):
            await engine.open(refused)
    with pytest.raises(EmptyPromptError):
        await engine.open([], finished=True)
    with pytest.raises(ConfigurationError, match="mode='both'"):
        await engine.open([1], mode="both")
    for sampling, kind in [
        ({"max_tokens": 0}, ConfigurationError),
        ({"n": 2}, UnsupportedFeatureError),
        (3, ConfigurationError),
    ]:
        refused = sampling
        with pytest.raises(kind):
            await engine.open([1], refused)
    assert (engine.num_open_streams, engine.requests) == (0, [])

    async with await engine.open([], request_id="r") as stream:
        with pytest.raises(ConfigurationError, match="request_id='r'"):
            await engine.open([1], request_id="r")
        with pytest.raises(EmptyPromptError):
            await stream.finish()
        with pytest.raises(UnsupportedFeatureError):
            await stream.replace([1])
        await stream.append([1, 2, 3])
        with pytest.raises(PromptTooLongError):
            await stream.append([4, 5, 6])
        await stream.finish([4])
        with pytest.raises(StreamFinishedError):
            await stream.append([5])
    assert engine.requests[0].token_ids == (1, 2, 3, 4)


async def test_an_aborted_stream_says_so_to_all() -> None:
    engine = FakeEngine()
    stream = await engine.open([1])
    reading = asyncio.create_task(text_of(stream))
    await asyncio.sleep(0)
    await stream.abort()
    await stream.abort()
    assert await reading == ("", "abort")
    with pytest.raises(StreamAbortedError):
        await stream.append([2])
    trail = await stream.trail()
    assert (trail[-1].type, engine.requests[0].is_aborted, engine.num_open_streams) == (EventType.ABORTED, True, 0)


async def test_leaving_a_stream_or_the_engine_aborts() -> None:
    async with FakeEngine() as engine:
        async with await engine.open([1]):
            pass
        await engine.open([2])
    assert [request.is_aborted for request in engine.requests] == [True, True]
    assert engine.num_open_streams == 0
    with pytest.raises(EngineError, match="was closed"):
        await engine.open([1])


async def test_a_dead_engine_fails_every_stream() -> None:
    engine = FakeEngine("one two three")
    engine_streams = [await engine.open([1]), await engine.open([1]), await engine.open([], mode="update")]
    speaking = await engine.open([1], finished=True)
    said = aiter(speaking)
    await anext(said)
    readers = [asyncio.create_task(text_of(stream)) for stream in engine_streams]
    await asyncio.sleep(0)
    engine.pause()
    sending = asyncio.create_task(engine_streams[0].append([2]))
    await asyncio.sleep(0)
    engine.die()
    outcomes = await asyncio.gather(*readers, sending, anext(said), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [EngineDeadError] * 5
    with pytest.raises(EngineDeadError):
        await engine.open([1])
    for stream in (*engine_streams, speaking):
        await stream.abort()
    assert engine.num_open_streams == 0


async def test_a_paused_engine_takes_nothing() -> None:
    engine = FakeEngine()
    stream = await engine.open([1])
    engine.pause()
    sending = asyncio.create_task(stream.append([2]))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not sending.done()
    assert len(engine.requests[0].operations) == 1
    engine.resume()
    await sending
    assert engine.requests[0].token_ids == (1, 2)
    await stream.abort()


@pytest.mark.parametrize(
    "option", ["max_model_len", "prefill_tokens_per_s", "decode_tokens_per_s", "max_prompt_tokens"]
)
def test_the_engines_figures_are_positive(option: str) -> None:
    options: Any = {option: 0}
    with pytest.raises(ConfigurationError, match=f"{option}=0"):
        FakeEngine(**options)


# The scripted retriever


async def test_a_script_is_followed_step_by_step() -> None:
    gate = asyncio.Event()
    failure = SourceFailure("x", "404")
    retriever = ScriptedRetriever(["text", Chunk("b"), Append([]), failure, gate, ValueError("lost")])
    items = retriever.stream("q")
    assert retriever.num_live == 0
    assert [await anext(items) for _ in range(4)] == [
        Append([Chunk("text", source="script")]),
        Append([Chunk("b")]),
        Append([]),
        failure,
    ]
    waiting = asyncio.ensure_future(anext(items))
    await until(lambda: retriever.num_live == 1)
    assert not waiting.done()
    gate.set()
    with pytest.raises(ValueError, match="lost"):
        await waiting
    assert (retriever.num_live, retriever.num_closed, retriever.num_exhausted) == (0, 1, 0)
    assert retriever.queries == ["q"]


async def test_a_script_may_depend_on_the_question_and_closing_has_its_own() -> None:
    closing = asyncio.Event()
    retriever = ScriptedRetriever(lambda query: [query, 1000], ContextMode.UPDATE, closing=[closing])
    items: Any = retriever.stream("q")
    assert await anext(items) == Replace([Chunk("q", source="script")])
    ending = asyncio.create_task(items.aclose())
    await asyncio.sleep(0)
    assert retriever.num_live == 1
    closing.set()
    await ending
    assert (retriever.num_live, retriever.num_closed) == (0, 1)


def test_steps_that_make_no_sense_are_refused() -> None:
    step: Any
    for step in (True, None, ["list"]):
        with pytest.raises(ConfigurationError, match="give an update, text"):
            ScriptedRetriever([step])
    with pytest.raises(ConfigurationError, match="cannot yield"):
        ScriptedRetriever([], closing=["text"])
    with pytest.raises(ConfigurationError, match="mode='both'"):
        ScriptedRetriever([], "both")


def test_the_testing_kit_needs_no_vllm() -> None:
    code = (
        "import sys; from stream2llm_sdk.testing import FakeEngine, FakeRequest, Operation, ScriptedRetriever; "
        "print({'vllm', 'torch', 'transformers'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.strip() == "set()"
