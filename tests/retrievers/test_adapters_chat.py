from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

pytest.importorskip("langchain_core")

from langchain_core.callbacks import AsyncCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from tiny_tokenizer import byte_tokenizer

from stream2llm_sdk import StreamingRAG
from stream2llm_sdk.errors import ConfigurationError, RetrievalError, UnsupportedFeatureError
from stream2llm_sdk.retrievers.adapters import StreamingRAGChat
from stream2llm_sdk.testing import FakeEngine, ScriptedRetriever

pytestmark = pytest.mark.slow

TOKENIZER = byte_tokenizer()


def rag_of(retriever: Any, engine: FakeEngine | None = None, **options: Any) -> StreamingRAG:
    options = {"max_answer_tokens": 64, "system": "Answer.", **options}
    return StreamingRAG(
        "no-model", retriever, engine=engine or FakeEngine("The sky is blue."), tokenizer=TOKENIZER, **options
    )


def prompt_of(rag: StreamingRAG) -> str:
    engine = rag.engine
    assert isinstance(engine, FakeEngine)
    text: str = TOKENIZER.decode(list(engine.requests[-1].token_ids))
    return text


async def test_it_answers_with_its_sources_and_counts() -> None:
    async with rag_of(ScriptedRetriever(["the sky"])) as rag:
        chat = StreamingRAGChat(rag)
        assert isinstance(chat, BaseChatModel)
        message = await chat.ainvoke("Why?")
    assert message.content == "The sky is blue."
    assert message.response_metadata["finish_reason"] == "stop"
    assert message.response_metadata["model_name"] == "no-model"
    [source] = message.response_metadata["sources"]
    assert source["source"] == "script"
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_tokens"] == 4
    assert message.usage_metadata["total_tokens"] == message.usage_metadata["input_tokens"] + 4


async def test_it_streams_in_a_chain() -> None:
    tokens: list[str] = []

    class Handler(AsyncCallbackHandler):
        async def on_llm_new_token(self, token: str, **rest: Any) -> None:
            tokens.append(token)

    async with rag_of(ScriptedRetriever(["the sky"])) as rag:
        chat = StreamingRAGChat(rag=rag)
        chain = ChatPromptTemplate.from_messages([("human", "Why is {what} so?")]) | chat | StrOutputParser()
        pieces = [piece async for piece in chain.astream({"what": "it"}, {"callbacks": [Handler()]})]
        assert [piece for piece in pieces if piece] == ["The", " sky", " is", " blue."]
        assert "".join(tokens) == "The sky is blue."
        assert "Question: Why is it so?" in prompt_of(rag)

        whole: Any = None
        async for chunk in chat.astream("Why?"):
            whole = chunk if whole is None else whole + chunk
    assert isinstance(whole, AIMessageChunk)
    assert whole.content == "The sky is blue."
    assert whole.response_metadata["context_end"] == "retrieved"
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == 4


async def test_earlier_turns_go_before_the_question_and_retrievers_are_asked_the_question() -> None:
    retriever = ScriptedRetriever(["text"])
    async with rag_of(retriever) as rag:
        chat = StreamingRAGChat(rag)
        await chat.ainvoke(
            [
                SystemMessage("Answer."),  # the rag's own
                SystemMessage("Be brief."),
                HumanMessage("What is the sky?"),
                AIMessage("Air."),
                HumanMessage([{"type": "text", "text": "Why is it "}, {"type": "text", "text": "blue?"}]),
            ]
        )
        prompt = prompt_of(rag)
    turns = "The conversation so far:\nUser: What is the sky?\nAssistant: Air."
    assert f"Question: Instructions: Be brief.\n\n{turns}\n\nWhy is it blue?" in prompt
    assert retriever.queries == ["Why is it blue?"]


async def test_what_retrievers_are_asked_may_be_made_of_all_messages() -> None:
    retriever = ScriptedRetriever(["text"])

    async def condense(messages: Sequence[BaseMessage]) -> str:
        return " ".join(str(message.content) for message in messages)

    async with rag_of(retriever) as rag:
        await StreamingRAGChat(rag, condense=condense).ainvoke(
            [HumanMessage("sky"), AIMessage("ok"), HumanMessage("why?")]
        )
        await StreamingRAGChat(rag, condense=lambda messages: "plain").ainvoke("why?")
        await StreamingRAGChat(rag).bind(query="bound").ainvoke("why?")
    assert retriever.queries == ["sky ok why?", "plain", "bound"]


async def test_options_reach_the_engine() -> None:
    engine = FakeEngine("one two three")
    async with rag_of(ScriptedRetriever(["text"]), engine) as rag:
        chat = StreamingRAGChat(rag)
        message = await chat.bind(max_tokens=2, temperature=0.5, tenant="t").ainvoke("why?", stop=["x"])
        await chat.ainvoke("why?", max_answer_tokens=3, sampling={"top_p": 0.9})
    assert message.content == "one two"
    assert message.response_metadata["finish_reason"] == "length"
    first, second = (request.sampling for request in engine.requests)
    assert (first["max_tokens"], first["temperature"], first["stop"]) == (2, 0.5, ["x"])
    assert (second["max_tokens"], second["top_p"]) == (3, 0.9)


async def test_leaving_the_answer_ends_the_request() -> None:
    scripted = ScriptedRetriever(["text"])
    engine = FakeEngine("one two three")
    async with rag_of(scripted, engine) as rag:
        before = asyncio.all_tasks()
        pieces = StreamingRAGChat(rag).astream("why?")
        await anext(pieces)
        await pieces.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(5):
            while asyncio.all_tasks() - before:
                await asyncio.sleep(0)
        assert engine.num_open_streams == 0
    assert scripted.num_live == 0


async def test_what_cannot_be_put_is_refused() -> None:
    async with rag_of(ScriptedRetriever(["text"])) as rag:
        chat = StreamingRAGChat(rag)
        image = {"type": "image", "url": "http://x"}
        tool = AIMessage("", tool_calls=[{"name": "f", "args": {}, "id": "1"}])
        for messages in (
            [HumanMessage([image])],
            [tool, HumanMessage("q")],
            [ToolMessage("r", tool_call_id="1"), HumanMessage("q")],
        ):
            with pytest.raises(UnsupportedFeatureError):
                await chat.ainvoke(messages)
        with pytest.raises(ConfigurationError, match="the last message must be the user's"):
            await chat.ainvoke([AIMessage("a")])
    with pytest.raises(ConfigurationError, match="rag='model'"):
        StreamingRAGChat("model")  # type: ignore[arg-type]


async def test_what_goes_wrong_is_raised_as_it_is() -> None:
    async with rag_of(ScriptedRetriever([RetrievalError("nothing there")])) as rag:
        with pytest.raises(RetrievalError, match="nothing there"):
            await StreamingRAGChat(rag).ainvoke("why?")


def test_it_works_without_an_event_loop() -> None:
    async def pages(query: str) -> AsyncIterator[str]:
        yield query

    rag = rag_of(pages)
    chat = StreamingRAGChat(rag)
    assert chat.invoke("why?").content == "The sky is blue."
    assert [piece.content for piece in chat.stream("why?") if piece.content] == ["The", " sky", " is", " blue."]
    pieces = chat.stream("why?")
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    engine = rag.engine
    assert isinstance(engine, FakeEngine)
    assert engine.num_open_streams == 0
    chat.close()
    assert "stream2llm-loop" not in [thread.name for thread in threading.enumerate()]


async def test_from_a_thread_it_runs_on_the_loop_of_the_engine() -> None:
    async with rag_of(ScriptedRetriever(["text"])) as rag:
        chat = StreamingRAGChat(rag)
        message = await asyncio.to_thread(chat.invoke, "why?")
        assert message.content == "The sky is blue."
        with pytest.raises(ConfigurationError, match="ainvoke"):
            chat.invoke("why?")
