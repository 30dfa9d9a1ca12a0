"""One question on its way: retrieval, prefill and answer at once."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any

from stream2llm_sdk.answer import Answer, AnswerPiece, ContextEnd, Timings, TokenCounts
from stream2llm_sdk.context import Retriever
from stream2llm_sdk.context_log import AskedQuestion, ContextLog
from stream2llm_sdk.errors import StreamAbortedError
from stream2llm_sdk.gathering import ContextEvent, Gathering
from stream2llm_sdk.growing_prompt import Prompt
from stream2llm_sdk.tasks import cancel_and_wait, ended
from stream2llm_sdk.trail import EventTrail, EventType

if TYPE_CHECKING:
    from stream2llm_sdk.serving.engine import Engine, Stream, StreamOutput, StreamProgress
    from stream2llm_sdk.traffic_recorder import TrafficRecorder

__all__ = ["AnswerStream"]


class AnswerStream:
    """An answer while it is being made, made by `StreamingRAG.stream`. Iterate for pieces of text; then `answer()` has
    everything.

    The work begins when it is first waited for. Leaving the iteration, closing the stream or cancelling whoever
    reads it ends retrieval and generation, and leaves nothing behind.
    """

    def __init__(
        self,
        prepare: Callable[[], Any],
        question: str,
        retrievers: Mapping[str, Retriever],
        sampling: Mapping[str, Any],
        *,
        streaming: bool,
        deadline_s: float | None,
        observe: Callable[[ContextEvent], None] | None,
        query: str | None = None,
        tenant: str,
        recorder: TrafficRecorder | None = None,
        on_begin: Callable[[AnswerStream], object],
        on_end: Callable[[AnswerStream], object],
    ) -> None:
        # What the scheduler learns chunk statistics by, and shares the engine between.
        self._tenant, self._tag = tenant, "+".join(sorted(retrievers))
        self._recorder = recorder
        self._on_begin = on_begin
        self._on_end = on_end
        self.question = question
        self._query = question if query is None else query
        self._prepare = prepare
        self._retrievers = retrievers
        self._sampling = sampling
        self._streaming = streaming
        self._deadline_s = deadline_s
        self._observe = observe
        # Bounded by the answer's length, which `max_tokens` bounds. None ends it.
        self._pieces: asyncio.Queue[AnswerPiece | None] = asyncio.Queue()
        self._work: asyncio.Task[Answer] | None = None
        self._gathering: Gathering | None = None
        self._stream: Stream | None = None
        self._asked_to_stop = False
        self._closed = False
        self._cancelled = False

    # ---- for the reader -----------------------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncIterator[AnswerPiece]:
        """The answer's pieces, as the model makes them. Each is given once, to whoever reads first.

        Raises:
            RetrievalError: no retriever gave any context.
            Stream2LLMError: the prompt or the engine failed.
        """
        work = self._begin()
        try:
            while (piece := await self._pieces.get()) is not None:
                yield piece
            self._pieces.put_nowait(None)  # whoever else reads comes to the end as well
            if work.cancelled():
                raise StreamAbortedError("the answer was closed before it was complete")
            work.result()
        finally:
            await self.aclose()

    async def answer(self) -> Answer:
        """The whole answer; pieces that nobody read are not lost to it.

        Raises:
            RetrievalError, Stream2LLMError: as iterating does.
            StreamAbortedError: the stream was closed before the answer was complete.
        """
        work = self._begin()
        try:
            await asyncio.wait({work})
        finally:
            if not work.done():
                await self.aclose()
        if work.cancelled():
            raise StreamAbortedError("the answer was closed before it was complete")
        return work.result()

    def answer_now(self) -> None:
        """Ends the retrieval: the model answers with the context that is there."""
        self._asked_to_stop = True
        if self._gathering is not None:
            self._gathering.stop(ContextEnd.ASKED)

    async def progress(self) -> StreamProgress | None:
        """Where the request stands in the engine; None before it is there."""
        return None if self._stream is None else await self._stream.progress()

    async def aclose(self) -> None:
        """Ends everything that this question started, and returns when it has ended. Idempotent."""
        self._closed = True
        if self._work is not None and not self._work.done():
            if not self._cancelled:  # a second cancellation would interrupt what the first one set going
                self._cancelled = True
                self._work.cancel()
            await ended(self._work)

    async def __aenter__(self) -> AnswerStream:
        self._begin()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def _begin(self) -> asyncio.Task[Answer]:
        if self._work is None:
            if self._closed:
                raise StreamAbortedError("the answer was closed before it was begun")
            self._work = asyncio.create_task(self._run(), name="stream2llm-answer")
            self._work.add_done_callback(self._work_done)
            self._on_begin(self)
        return self._work

    def _work_done(self, work: asyncio.Task[Answer]) -> None:
        if not work.cancelled():
            work.exception()  # the reader gets it from the task; unread, it is not "never retrieved"
        self._pieces.put_nowait(None)
        self._on_end(self)

    # ---- the work -----------------------------------------------------------------------------------------------

    async def _run(self) -> Answer:
        started_s = time.monotonic()
        engine, prompt = await self._prepare()
        log = ContextLog() if self._recorder is not None and self._recorder.wants_next() else None
        gathering = Gathering(prompt, self._retrievers, started_s, self._observe, query=self._query, log=log)
        self._gathering = gathering
        if self._asked_to_stop:
            gathering.stop(ContextEnd.ASKED)
        output = _Output(self._pieces, started_s)
        run = self._answer_streamed if self._streaming else self._answer_whole
        try:
            # Retrievers that are still ending hold neither the model's answer nor the engine's memory back.
            end, complete_s = await run(engine, prompt, gathering, output)
        finally:
            if log is not None:
                self._record(log, gathering, output, started_s)
            await gathering.aclose()
        return self._answer(gathering, output, end, complete_s)

    def _record(self, log: ContextLog, gathering: Gathering, output: _Output, started_s: float) -> None:
        assert self._recorder is not None
        error = sys.exception()  # the error itself would keep all frames that it went through alive
        self._recorder.take(
            AskedQuestion(
                arrived_s=started_s,
                question=self.question,
                tenant=self._tenant,
                tag=self._tag,
                mode=gathering.mode,
                prompt=gathering.prompt,
                log=log,
                retrieved_s=gathering.ended_s,
                context_end=gathering.end,
                ended_s=output.now_s(),
                num_output_tokens=len(output.token_ids),
                error=None if error is None else (type(error).__name__, str(error)),
            )
        )

    async def _answer_streamed(
        self, engine: Engine, prompt: Prompt, gathering: Gathering, output: _Output
    ) -> tuple[ContextEnd, float]:
        async with await engine.open(
            prompt.head_ids, self._sampling, mode=gathering.mode, tenant=self._tenant, tag=self._tag
        ) as stream:
            self._stream = stream
            read = asyncio.create_task(output.read(stream), name="stream2llm-read")
            # Output that ends while the context is retrieved means that the request is lost: sending the rest of
            # the prompt then raises why.
            read.add_done_callback(lambda _: gathering.stop())
            try:
                end = await _Sender(stream, gathering).run(self._deadline_s)
                complete_s = output.now_s()
                await read
            finally:
                await cancel_and_wait(read)
        return end, complete_s

    async def _answer_whole(
        self, engine: Engine, prompt: Prompt, gathering: Gathering, output: _Output
    ) -> tuple[ContextEnd, float]:
        end = await gathering.run(self._deadline_s)
        async with await engine.open(
            prompt.final_ids, self._sampling, finished=True, tenant=self._tenant, tag=self._tag
        ) as stream:
            self._stream = stream
            complete_s = output.now_s()
            await output.read(stream)
        return end, complete_s

    def _answer(self, gathering: Gathering, output: _Output, end: ContextEnd, complete_s: float) -> Answer:
        return Answer(
            question=self.question,
            text=output.text,
            token_ids=tuple(output.token_ids),
            finish_reason=output.finish_reason,
            sources=gathering.sources,
            dropped=gathering.dropped,
            failures=tuple(gathering.failures),
            context_end=end,
            timings=Timings(
                first_context_s=gathering.first_context_s,
                retrieval_s=gathering.ended_s,
                # The first token may be here before the word that the whole prompt was taken.
                context_complete_s=min(complete_s, output.first_token_s or complete_s),
                first_token_s=output.first_token_s,
                total_s=output.ended_s,
            ),
            tokens=_token_counts(output.trail, len(gathering.prompt.final_ids), len(output.token_ids)),
            trail=output.trail,
        )


class _Output:
    """Reads what the engine makes of a request, and passes it on piece by piece."""

    def __init__(self, pieces: asyncio.Queue[AnswerPiece | None], started_s: float) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.finish_reason = "abort"
        self.first_token_s: float | None = None
        self.ended_s = 0.0
        self.trail = EventTrail("", ())
        self._pieces = pieces
        self._started_s = started_s

    def now_s(self) -> float:
        """Seconds since the question."""
        return time.monotonic() - self._started_s

    async def read(self, stream: Stream) -> None:
        outputs = aiter(stream)
        try:
            async for output in outputs:
                self._take(output)
        finally:
            # A generator that is left to the garbage collector is closed some time later, by a task of nobody.
            if (close := getattr(outputs, "aclose", None)) is not None:
                await close()
        self.ended_s = self.now_s()
        self.trail = await stream.trail()

    def _take(self, output: StreamOutput) -> None:
        if self.first_token_s is None and output.token_ids:
            self.first_token_s = self.now_s()
        self.text += output.text
        self.token_ids += output.token_ids
        self.finish_reason = output.finish_reason or self.finish_reason
        if output.text or output.token_ids:
            self._pieces.put_nowait(AnswerPiece(output.text, output.token_ids))


# A change waits this long for others, and for the end of the retrieval: the last page and the tail behind it should be
# one step of the engine, not two. The end of the retrieval is never waited for: it cuts the wait short.
_TOGETHER_S = 0.03


class _Sender:
    """Sends a prompt to the engine as it changes. What changes together, or while the engine is busy, goes out as one
    update."""

    def __init__(self, stream: Stream, gathering: Gathering) -> None:
        self._stream = stream
        self._gathering = gathering
        self._sent = gathering.prompt.head_ids

    async def run(self, deadline_s: float | None) -> ContextEnd:
        """Retrieves and sends until the retrieval has ended, then sends the tail.

        Raises:
            RetrievalError: as `Gathering.run` does.
            PromptError, StreamError, EngineDeadError: as the stream does.
        """
        changed = self._gathering.changed
        gather = asyncio.create_task(self._gathering.run(deadline_s), name="stream2llm-gather")
        gather.add_done_callback(lambda _: changed.set())
        try:
            while not gather.done():
                await changed.wait()
                await asyncio.wait({gather}, timeout=_TOGETHER_S)
                changed.clear()
                if not gather.done():
                    await self._send()
        finally:
            await cancel_and_wait(gather)
        end = gather.result()
        await self._finish()
        return end

    async def _send(self) -> None:
        ids = self._gathering.prompt.ids
        if ids[: len(self._sent)] == self._sent:
            if len(ids) > len(self._sent):
                await self._stream.append(ids[len(self._sent) :])
        else:
            await self._stream.replace(ids)
        self._sent = ids

    async def _finish(self) -> None:
        # What is left, then the tail.
        prompt = self._gathering.prompt
        ids = prompt.ids
        if ids[: len(self._sent)] == self._sent:
            await self._stream.finish([*ids[len(self._sent) :], *prompt.tail_ids])
        else:
            await self._stream.replace([*ids, *prompt.tail_ids], final=True)


def _token_counts(trail: EventTrail, num_prompt: int, num_output: int) -> TokenCounts:
    ended = trail.last(EventType.FINISHED) or trail.last(EventType.ABORTED)
    counters = ended.data if ended is not None else {}
    return TokenCounts(
        prompt=num_prompt,
        output=num_output,
        # The last output token is never run through the model, the others are.
        prefilled=max(0, counters.get("num_tokens_computed", 0) - max(0, num_output - 1)),
        recomputed=counters.get("num_tokens_recomputed", 0),
        invalidated=counters.get("num_tokens_invalidated", 0),
        cached=counters.get("num_tokens_cached", 0),
    )
