"""Questions in, answers out, with retrieval streaming into the model while it still runs."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from stream2llm_sdk.answer import Answer
from stream2llm_sdk.answer_stream import AnswerStream
from stream2llm_sdk.context import Retriever, RetrieverLike, named_retrievers
from stream2llm_sdk.errors import ConfigurationError, Stream2LLMError
from stream2llm_sdk.gathering import ContextEvent
from stream2llm_sdk.growing_prompt import Prompt, positive_or_none
from stream2llm_sdk.main_guard import require_main_guard
from stream2llm_sdk.placement import ChunkOrder
from stream2llm_sdk.prompt import DEFAULT_SYSTEM, PromptAssembler
from stream2llm_sdk.tasks import cancel_and_wait, uncancelled
from stream2llm_sdk.tokenizer import Tokenizer, load_tokenizer
from stream2llm_sdk.traffic_recording import TrafficRecording

if TYPE_CHECKING:
    from stream2llm_sdk.serving.engine import Engine
    from stream2llm_sdk.traffic_recorder import TrafficRecorder

__all__ = ["RetrieverLike", "StreamingRAG"]

_ASSEMBLER_OPTIONS = (
    "max_chunk_tokens",
    "markers",
    "order",
    "system",
    "user",
    "format_chunk",
    "separator",
    "chat_template",
    "template_arguments",
)


_MAX_MODEL_LEN_UNKNOWN = 1 << 31


class StreamingRAG:
    """Answers questions with context that streams into the model while it is being retrieved.

        async with StreamingRAG("HuggingFaceTB/SmolLM2-135M-Instruct", CrawlerRetriever(urls=[...])) as rag:
            async for piece in rag.stream("How does a TaskGroup cancel its tasks?"):
                print(piece.text, end="")
            answer = await rag.ask("...")  # .text .sources .timings .trail

    Any number of questions may be under way at once; they share one engine.

    Args:
        model: a folder or a hub name.
        retrievers: a retriever, an async generator function of the query (it yields text, chunks or updates), a list
            of these, or a mapping of names to them. Several are retrieved at once into one prompt.
        engine: an engine to use and leave running; left out, one is started with `engine_options` and ended with this.
        tokenizer: the model's, if it is already at hand.
        max_answer_tokens: most tokens of an answer.
        max_context_tokens: most tokens of context; left out, what the model's length leaves.
        deadline_s: seconds from the question after which the model answers with the context that is there.
        sampling: fields of vLLM's `SamplingParams`; left out, greedy.
        streaming: False retrieves everything first and sends the prompt whole, for comparison.
        policy: the scheduling policy of an engine that is started here.
        engine_options: arguments of `Stream2LLMEngine` for an engine that is started here.
        record: a folder into which every question is recorded as a trace, to be looked at and replayed with
            `stream2llm trace` and `stream2llm replay`; or a `TrafficRecording`, which says more: texts hashed or left
            out, a sample of the questions, a bound on the folder. Recording costs no time of a question worth
            mentioning, and never fails one.
        prompt_options: arguments of `PromptAssembler` by name: `max_chunk_tokens`, `system`, `user`, `markers`, …

    Retrievers belong to this object: `aclose` closes those that can be closed.

    Raises:
        ConfigurationError: an argument cannot work.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        retrievers: RetrieverLike | Sequence[RetrieverLike] | Mapping[str, RetrieverLike],
        *,
        engine: Engine | None = None,
        tokenizer: Tokenizer | None = None,
        max_answer_tokens: int = 256,
        max_context_tokens: int | None = None,
        deadline_s: float | None = None,
        sampling: Mapping[str, Any] | None = None,
        streaming: bool = True,
        policy: str | None = None,
        engine_options: Mapping[str, Any] | None = None,
        record: str | os.PathLike[str] | TrafficRecording | None = None,
        **prompt_options: Any,
    ) -> None:
        unknown = sorted(set(prompt_options) - set(_ASSEMBLER_OPTIONS))
        if unknown:
            raise ConfigurationError(
                f"unknown argument {', '.join(unknown)}: prompt options are {', '.join(_ASSEMBLER_OPTIONS)}; those of "
                "the engine (scheduling, limits, metrics, and vLLM's own) go into engine_options"
            )
        if engine_options is not None and not isinstance(engine_options, Mapping):
            raise ConfigurationError(f"engine_options={engine_options!r:.80}: give a mapping of arguments by name")
        if policy is not None and "policy" in (engine_options or {}):
            raise ConfigurationError("policy is given twice, beside engine_options and in it: leave one out")
        if engine is not None and (policy is not None or engine_options):
            raise ConfigurationError(
                "policy and engine_options are for an engine that is started here; engine= is given"
            )
        self.model = os.fspath(model)
        self.retrievers = named_retrievers(retrievers)
        if sampling is not None and not isinstance(sampling, Mapping):
            raise ConfigurationError(f"sampling must be a mapping of fields, not {type(sampling).__name__}")
        if policy is not None:
            from stream2llm_sdk.serving.policies import make_policy

            make_policy(policy)
        if positive_or_none("max_answer_tokens", max_answer_tokens) is None:
            raise ConfigurationError("max_answer_tokens=None: give a number of tokens")
        if (order := prompt_options.get("order")) is not None and order not in list(ChunkOrder):
            raise ConfigurationError(f"order={order!r}: choose one of {', '.join(ChunkOrder)}")
        self.max_answer_tokens = max_answer_tokens
        self.max_context_tokens = positive_or_none("max_context_tokens", max_context_tokens)
        self.deadline_s = _deadline(deadline_s)
        self.streaming = streaming
        self._sampling = dict(sampling or {})
        self._engine = engine
        self._owns_engine = engine is None
        self._policy = policy
        self._engine_options = dict(engine_options or {})
        self._prompt_options = prompt_options
        self._tokenizer = tokenizer
        self._assembler: PromptAssembler | None = None
        self._start_lock = asyncio.Lock()
        self._answers: set[AnswerStream] = set()
        self._closed = False
        self._recorder = None if record is None else _recorder(record)

    # ---- start and end ------------------------------------------------------------------------------------------

    async def start(self) -> StreamingRAG:
        """Starts the engine, loads the tokenizer and warms the retrievers up, all at once. Idempotent; the first
        question does it if it was not done before.

        Raises:
            ConfigurationError, MissingExtraError, EngineStartError: as the parts do.
        """
        async with self._start_lock:
            if self._closed:
                raise Stream2LLMError("this StreamingRAG was closed; make a new one")
            if self._assembler is None:
                await self._start()
        return self

    async def _start(self) -> None:
        tasks = [asyncio.create_task(self._start_engine())]
        tasks += [asyncio.create_task(_warm_up(retriever)) for retriever in self.retrievers.values()]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
            self._assembler = self._make_assembler()
        except BaseException:
            await uncancelled(self._abandon(tasks))
            raise

    async def _abandon(self, tasks: list[asyncio.Task[None]]) -> None:
        await cancel_and_wait(*tasks)
        await self._close_engine()

    def _make_assembler(self) -> PromptAssembler:
        assert self._engine is not None
        limits = self._engine.limits
        return self._assembler_for(min(limits.max_model_len, limits.max_prompt_tokens + 1))

    def _assembler_for(self, max_model_len: int) -> PromptAssembler:
        assert self._tokenizer is not None
        return PromptAssembler(
            self._tokenizer,
            max_model_len=max_model_len,
            max_answer_tokens=self.max_answer_tokens,
            max_context_tokens=self.max_context_tokens,
            **self._prompt_options,
        )

    async def _start_engine(self) -> None:
        # What is wrong with the options is said now, and not when the engine is up.
        if self._owns_engine:
            from stream2llm_sdk.serving.vllm_engine import Stream2LLMEngine
            from stream2llm_sdk.serving.vllm_start import require_vllm

            self._engine = Stream2LLMEngine(self.model, policy=self._policy, **self._engine_options)
            require_vllm()
            require_main_guard("StreamingRAG")
        await self._load_tokenizer()
        await asyncio.to_thread(self._assembler_for, _MAX_MODEL_LEN_UNKNOWN)
        start = getattr(self._engine, "start", None)
        if start is not None:
            await start()

    async def _load_tokenizer(self) -> None:
        if self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(load_tokenizer, self.model)

    async def aclose(self) -> None:
        """Ends every question under way, the retrievers, and the engine if it was started here; what is recorded is
        written then. Idempotent."""
        self._closed = True
        await asyncio.gather(*(answer.aclose() for answer in self._answers))
        # One that cannot be closed does not keep the others open.
        async with self._start_lock, AsyncExitStack() as stack:
            if self._recorder is not None:
                stack.push_async_callback(asyncio.to_thread, self._recorder.close)
            stack.push_async_callback(self._close_engine)
            for retriever in self.retrievers.values():
                close = getattr(retriever, "aclose", None)
                if close is not None:
                    stack.push_async_callback(close)

    async def _close_engine(self) -> None:
        if self._owns_engine and self._engine is not None:
            engine, self._engine = self._engine, None
            await engine.aclose()

    async def __aenter__(self) -> StreamingRAG:
        try:
            return await self.start()
        except BaseException:
            await uncancelled(self.aclose())
            raise

    async def __aexit__(self, *exc_info: object) -> None:
        await uncancelled(self.aclose())

    # ---- questions ----------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine, once started."""
        if self._closed:
            raise Stream2LLMError("this StreamingRAG was closed; make a new one")
        if self._engine is None:
            raise Stream2LLMError("the engine has not been started: call start(), or use StreamingRAG in `async with`")
        return self._engine

    @property
    def recording(self) -> TrafficRecorder | None:
        """What records the questions (`num_written`, `num_dropped`, …); None without `record`."""
        return self._recorder

    @property
    def system(self) -> str | None:
        """The instructions that every prompt begins with; None leaves the template its own."""
        system: str | None = self._prompt_options.get("system", DEFAULT_SYSTEM)
        return system

    def stream(
        self,
        question: str,
        *,
        query: str | None = None,
        deadline_s: float | None = None,
        max_context_tokens: int | None = None,
        max_answer_tokens: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        streaming: bool | None = None,
        observe: Callable[[ContextEvent], None] | None = None,
        tenant: str = "",
    ) -> AnswerStream:
        """The answer to a question, piece by piece. What is left out is as this object was made.

        Args:
            question: the question.
            query: what the retrievers are asked for, if not the question as it is.
            deadline_s: seconds after which the model answers with the context that is there.
            max_context_tokens: most tokens of context; once an appended context has reached it, the rest of the
                retrieval is cancelled.
            max_answer_tokens: most tokens of the answer.
            sampling: fields of vLLM's `SamplingParams` that differ from this object's.
            streaming: False retrieves everything first and sends the prompt whole.
            observe: called with each `ContextEvent`, on the event loop.
            tenant: who asks: the engine's limits and fair shares are kept for each tenant.

        Raises:
            ConfigurationError: an argument cannot work. What goes wrong later is raised where the answer is read.
        """
        if not isinstance(question, str):
            raise ConfigurationError(f"the question must be a str, not {type(question).__name__}: {question!r:.80}")
        if query is not None and not isinstance(query, str):
            raise ConfigurationError(f"query must be a str, not {type(query).__name__}: {query!r:.80}")
        if not isinstance(tenant, str):
            raise ConfigurationError(f"tenant={tenant!r}: give a string")
        answer_tokens = max_answer_tokens if max_answer_tokens is not None else self.max_answer_tokens

        async def prepare() -> tuple[Engine, Prompt]:
            await self.start()
            assert self._assembler is not None
            prompt = self._assembler.begin(
                question, max_context_tokens=max_context_tokens, max_answer_tokens=max_answer_tokens
            )
            return self.engine, prompt

        return AnswerStream(
            prepare,
            question,
            self.retrievers,
            {"temperature": 0.0, "max_tokens": answer_tokens, **self._sampling, **(sampling or {})},
            streaming=self.streaming if streaming is None else streaming,
            deadline_s=self.deadline_s if deadline_s is None else _deadline(deadline_s),
            observe=observe,
            query=query,
            tenant=tenant,
            recorder=self._recorder,
            on_begin=self._answers.add,
            on_end=self._answers.discard,
        )

    async def ask(self, question: str, **options: Any) -> Answer:
        """The whole answer to a question.

        Args:
            question: the question.
            options: as `stream` takes them.

        Raises:
            RetrievalError: no retriever gave any context.
            PromptError, EngineDeadError, …: as the parts do.
        """
        async with self.stream(question, **options) as answer:
            return await answer.answer()


async def _warm_up(retriever: Retriever) -> None:
    warm_up = getattr(retriever, "warm_up", None)
    if warm_up is not None:
        await warm_up()


def _recorder(record: str | os.PathLike[str] | TrafficRecording) -> TrafficRecorder:
    from stream2llm_sdk.traffic_recorder import TrafficRecorder

    return TrafficRecorder(record if isinstance(record, TrafficRecording) else TrafficRecording(record))


def _deadline(deadline_s: float | None) -> float | None:
    if deadline_s is None:
        return None
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, (int, float)) or not deadline_s > 0:
        raise ConfigurationError(f"deadline_s={deadline_s!r}: give a number of seconds above 0")
    try:
        seconds = float(deadline_s)
    except OverflowError:
        return None
    return None if math.isinf(seconds) else seconds
