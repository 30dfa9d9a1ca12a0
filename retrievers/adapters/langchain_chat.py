"""The engine with its retrieval as a LangChain chat model."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from stream2llm_sdk.answer import Answer
from stream2llm_sdk.errors import ConfigurationError, MissingExtraError, UnsupportedFeatureError
from stream2llm_sdk.rag import StreamingRAG
from stream2llm_sdk.retrievers.adapters.loops import LoopOfOthers

try:
    from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
    from langchain_core.messages.ai import UsageMetadata
    from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
    from pydantic import PrivateAttr
except ImportError as error:
    raise MissingExtraError("langchain-core", "langchain") from error

__all__ = ["StreamingRAGChat"]

# Options of a call that are StreamingRAG.stream's; all others are sampling parameters.
_RAG_OPTIONS = ("deadline_s", "max_context_tokens", "max_answer_tokens", "query", "sampling", "streaming", "tenant")
_SPEAKERS = {"human": "User", "ai": "Assistant"}


class StreamingRAGChat(BaseChatModel):
    """A `StreamingRAG` as a LangChain chat model: each call retrieves, and the answer streams.

        chat = StreamingRAGChat(rag=rag)
        async for piece in chat.astream([HumanMessage("How does a TaskGroup cancel its tasks?")]):
            print(piece.content, end="")

    Messages become one question, since the prompt's instructions and template are the `StreamingRAG`'s own:

    | message | what becomes of it |
    |---|---|
    | the last, which must be the user's | the question, and what the retrievers are asked for |
    | earlier ones of user and assistant | written out before it in the question; retrievers are not asked for them |
    | system | written out before these; left out if it is the same as the `StreamingRAG`'s own `system` |
    | images, tool calls and their results | refused with UnsupportedFeatureError |

    A follow-up such as "and how is it closed?" finds little by itself: `condense` may make the query of all messages.

    Call options (`chat.bind(...)`, `chat.ainvoke(..., ...)`): those of `StreamingRAG.stream`, `max_tokens`, and vLLM's
    sampling parameters such as `temperature`; `stop` as usual. The last piece, or the message, has `usage_metadata`
    (tokens) and in `response_metadata` the `finish_reason`, `context_end`, `sources`, `failures` and `timings`.

    `ainvoke` and `astream` run on the event loop of the `StreamingRAG`; `invoke` and `stream` may be called from other
    threads, or, where nothing runs on a loop yet, from anywhere: they then use one in a thread, until `close`.

    Args:
        rag: the `StreamingRAG`; it stays its owner's to close.
        condense: makes what the retrievers are asked for of all messages; may be a coroutine function.
        fields: others of LangChain's `BaseChatModel`, such as `callbacks`.
    """

    rag: Any
    condense: Callable[[Sequence[BaseMessage]], str | Awaitable[str]] | None = None

    _loop: LoopOfOthers = PrivateAttr(default_factory=LoopOfOthers)

    def __init__(self, rag: StreamingRAG, **fields: Any) -> None:
        if not isinstance(rag, StreamingRAG):
            raise ConfigurationError(f"rag={rag!r:.80}: give a StreamingRAG")
        super().__init__(**{"rag": rag, **fields})

    @property
    def _llm_type(self) -> str:
        return "stream2llm"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model": self.rag.model}

    def close(self) -> None:
        """Ends the thread of `invoke` and `stream`, if there is one. Idempotent."""
        self._loop.close()

    # ---- what LangChain calls -----------------------------------------------------------------------------------

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        self._loop.note()
        async with await self._answer_stream(messages, stop, kwargs) as stream:
            answer = await stream.answer()
        message = AIMessage(
            content=answer.text, usage_metadata=_usage(answer), response_metadata=self._metadata(answer)
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        self._loop.note()
        async with aclosing(self._pieces(messages, stop, kwargs)) as pieces:
            async for piece in pieces:
                yield piece

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._loop.run(self._agenerate(messages, stop, **kwargs))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        yield from self._loop.iterate(self._pieces(messages, stop, kwargs))

    # ---- parts --------------------------------------------------------------------------------------------------

    async def _pieces(
        self, messages: list[BaseMessage], stop: list[str] | None, options: dict[str, Any]
    ) -> AsyncGenerator[ChatGenerationChunk, None]:
        async with await self._answer_stream(messages, stop, options) as stream:
            async with aclosing(aiter(stream)) as pieces:
                async for piece in pieces:
                    yield ChatGenerationChunk(message=AIMessageChunk(content=piece.text))
            answer = await stream.answer()
        last = AIMessageChunk(
            content="", usage_metadata=_usage(answer), response_metadata=self._metadata(answer), chunk_position="last"
        )
        yield ChatGenerationChunk(message=last)

    async def _answer_stream(self, messages: list[BaseMessage], stop: list[str] | None, options: dict[str, Any]) -> Any:
        given = {name: value for name, value in options.items() if name in _RAG_OPTIONS and value is not None}
        sampling = {name: value for name, value in options.items() if name not in _RAG_OPTIONS}
        if (max_tokens := sampling.pop("max_tokens", None)) is not None:
            given.setdefault("max_answer_tokens", max_tokens)
        if stop:
            sampling["stop"] = stop
        given["sampling"] = {**given.get("sampling", {}), **sampling}
        question, query = self._question(messages)
        if self.condense is not None and "query" not in given:
            condensed = self.condense(messages)
            query = await condensed if inspect.isawaitable(condensed) else condensed
        return self.rag.stream(question, **{"query": query, **given})

    def _question(self, messages: Sequence[BaseMessage]) -> tuple[str, str]:
        """The question to the model, and what the retrievers are asked for."""
        if not messages or messages[-1].type != "human":
            last = messages[-1].type if messages else "none"
            raise ConfigurationError(f"the last message must be the user's (HumanMessage), not {last!r}")
        *earlier, last_message = messages
        query = _text(last_message)
        texts = {id(message): _text(message) for message in earlier}
        system = [texts[id(message)] for message in earlier if message.type == "system"]
        turns = [
            f"{_SPEAKERS[message.type]}: {_text(message)}"
            for message in earlier
            if _text(message) and message.type != "system"
        ]
        parts = [f"Instructions: {text}" for text in system if text and text != self.rag.system]
        if turns:
            parts.append("\n".join(["The conversation so far:", *turns]))
        return "\n\n".join([*parts, query]), query

    def _metadata(self, answer: Answer) -> dict[str, Any]:
        told = answer.to_dict()
        names = ("finish_reason", "context_end", "sources", "failures", "timings")
        return {"model_name": self.rag.model, **{name: told[name] for name in names}}


def _usage(answer: Answer) -> UsageMetadata:
    tokens = answer.tokens
    return UsageMetadata(
        input_tokens=tokens.prompt,
        output_tokens=tokens.output,
        total_tokens=tokens.prompt + tokens.output,
        input_token_details={"cache_read": tokens.cached},
    )


def _text(message: BaseMessage) -> str:
    if message.type not in ("system", *_SPEAKERS) or getattr(message, "tool_calls", None):
        raise UnsupportedFeatureError(
            f"a message of type {message.type!r}, or with tool calls, cannot be put to a StreamingRAG: give text of "
            "user, assistant and system"
        )
    parts = [message.content] if isinstance(message.content, str) else message.content
    texts = []
    for part in parts:
        text = part if isinstance(part, str) else part.get("text") if part.get("type") == "text" else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise UnsupportedFeatureError(f"content of type {kind!r} cannot be put to a StreamingRAG: give text only")
        texts.append(text)
    return "".join(texts)
