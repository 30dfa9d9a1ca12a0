"""One request of the embedded vLLM engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stream2llm_sdk.context import ContextMode
from stream2llm_sdk.errors import (
    EmptyPromptError,
    EngineDeadError,
    PromptError,
    PromptTooLongError,
    StreamAbortedError,
    StreamError,
    StreamFinishedError,
    StreamIdleError,
    UnknownRequestError,
    UnsupportedFeatureError,
)
from stream2llm_sdk.serving.engine import PromptUpdate, StreamOutput, StreamProgress
from stream2llm_sdk.serving.lcp import TokenArray, longest_common_prefix
from stream2llm_sdk.serving.streaming_prompt import EXTRA_ARGS_KEY
from stream2llm_sdk.tasks import ended
from stream2llm_sdk.trail import EventTrail

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.logprobs import Logprob
    from vllm.v1.engine.output_processor import RequestOutputCollector

    from stream2llm_sdk.serving.admission import Admission
    from stream2llm_sdk.serving.vllm_engine import Stream2LLMEngine

__all__ = ["Stream2LLMStream", "checked_token_ids", "end_idle_streams"]


def checked_token_ids(token_ids: Sequence[int], vocabulary_size: int) -> TokenArray:
    """Token ids as an int32 array.

    Raises:
        PromptError: they are not a flat sequence of whole numbers in [0, vocabulary_size).
    """
    if isinstance(token_ids, (str, bytes)):
        raise PromptError(f"a prompt is a sequence of token ids, not {type(token_ids).__name__}: {token_ids!r:.60}")
    try:
        array = np.asarray(token_ids)
    except (TypeError, ValueError) as error:
        raise PromptError(f"a prompt is a flat sequence of token ids: {error}") from error
    if array.size == 0:
        return np.empty(0, dtype=np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise PromptError(
            f"a prompt is a flat sequence of whole numbers, not {array.ndim}-dimensional {array.dtype}: "
            f"{token_ids!r:.60}"
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocabulary_size:
        raise PromptError(
            f"token id {low if low < 0 else high} is not in the model's vocabulary of {vocabulary_size} tokens"
        )
    return array.astype(np.int32)


class Stream2LLMStream:
    """A request with a prompt that may still change, made by `Stream2LLMEngine.open`."""

    def __init__(
        self,
        engine: Stream2LLMEngine,
        request_id: str,
        params: SamplingParams,
        mode: ContextMode,
        *,
        finished: bool,
        arrival_time: float,
        opened_s: float,
        tenant: str = "",
        tag: str = "",
    ) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.tag = tag
        self.mode = mode
        self._engine = engine
        self._params = params
        self._arrival_time = arrival_time
        self._opened_s = opened_s
        self._streaming = not finished
        self._finished = finished
        self._aborted = False
        self._end_reason: StreamError | None = None
        self._ended = False
        self._tokens: TokenArray = np.empty(0, dtype=np.int32)
        self._collector: RequestOutputCollector | None = None
        self._started = asyncio.Event()
        self._lock = asyncio.Lock()
        self._operation: asyncio.Task[Any] | None = None
        self._aborting: asyncio.Task[None] | None = None
        self._being_read = False
        self._trail: EventTrail | None = None
        self._trail_lock = asyncio.Lock()

    def __repr__(self) -> str:
        state = "aborted" if self._aborted else "ended" if self._ended else "finished" if self._finished else "open"
        return f"<Stream2LLMStream {self.request_id!r} {self.mode.value} {state}, {self.num_tokens} tokens>"

    @property
    def is_streaming_prompt(self) -> bool:
        """Whether the prompt was opened to grow."""
        return self._streaming

    @property
    def is_streaming_prompt_finished(self) -> bool:
        """Whether the prompt is complete."""
        return self._finished

    @property
    def is_prompt_update(self) -> bool:
        """Whether updates replace the prompt (update mode) or only append to it."""
        return self.mode is ContextMode.UPDATE

    @property
    def num_tokens(self) -> int:
        """The prompt's length so far."""
        return len(self._tokens)

    @property
    def has_ended(self) -> bool:
        """Whether the last output was received, or the request was aborted."""
        return self._ended or self._aborted

    @property
    def is_being_updated(self) -> bool:
        """Whether an update is on its way to the engine."""
        return self._operation is not None and not self._operation.done()

    @property
    def end_reason(self) -> str | None:
        """Why the engine itself ended the stream ('idle'); None where it did not."""
        return "idle" if isinstance(self._end_reason, StreamIdleError) else None

    @property
    def engine_request_id(self) -> str | None:
        """The id under which the engine knows the request; None while its prompt is empty."""
        return None if self._collector is None else self._collector.request_id

    # ---- the prompt ---------------------------------------------------------------------------------------------

    async def append(self, token_ids: Sequence[int]) -> PromptUpdate:
        """Puts tokens behind the prompt. Returns when the engine has taken them.

        Raises:
            PromptError, PromptTooLongError: the tokens are refused; the stream goes on without them.
            StreamFinishedError, StreamAbortedError, UnknownRequestError: the stream takes no more.
            EngineDeadError: the engine ended.
        """
        return await self._update("append", token_ids, final=False)

    async def replace(self, token_ids: Sequence[int], *, final: bool = False) -> PromptUpdate:
        """Gives the whole prompt anew as `token_ids`. What it has in common with the prompt before is not computed
        again. `final` finishes the prompt with it.

        Raises:
            UnsupportedFeatureError: the stream was opened in append mode.
            Others as `append`.
        """
        if not self.is_prompt_update:
            raise UnsupportedFeatureError(
                f"{self.request_id}: a stream in append mode cannot replace its prompt; open it with mode='update'"
            )
        return await self._update("replace", token_ids, final=final)

    async def finish(self, token_ids: Sequence[int] = ()) -> PromptUpdate:
        """Puts last tokens behind the prompt, if any, and lets sampling begin.

        Raises:
            EmptyPromptError: the prompt has no tokens; the stream stays open.
            Others as `append`.
        """
        return await self._update("append", token_ids, final=True)

    async def _update(self, kind: str, token_ids: Sequence[int], *, final: bool) -> PromptUpdate:
        sent_s = time.monotonic()
        new = checked_token_ids(token_ids, self._engine.vocabulary_size)
        update: PromptUpdate = await self._run(self._locked_update(kind, new, final, sent_s))
        return update

    async def _locked_update(self, kind: str, new: TokenArray, final: bool, sent_s: float) -> PromptUpdate:
        async with self._lock:
            self._check_open()
            old = self._tokens
            whole = np.concatenate((old, new)) if kind == "append" else new
            self.check_length(len(whole), final=final)
            if not final:
                self._engine.admission.resize(self.request_id, len(whole))
            try:
                update = await self._send(kind, new, whole, final, sent_s)
            except BaseException:
                if not final and self.request_id in self._engine.admission:
                    self._engine.admission.resize(self.request_id, len(old))
                raise
            self._tokens = whole
            self._finished = final
            if final:
                self._engine.admission.finished(self.request_id)
            return update

    async def _send(self, kind: str, new: TokenArray, whole: TokenArray, final: bool, sent_s: float) -> PromptUpdate:
        if self._collector is None:
            if len(whole):
                await self._start(whole, final=final)
            return PromptUpdate(len(whole), longest_common_prefix(self._tokens, whole), 0)
        if final:
            self._engine.set_final_prompt(self._collector.request_id, self._params, whole)
        answer = await self._engine.call("update", [self._collector.request_id, kind, new.tobytes(), final, sent_s])
        if "error" in answer:
            self._raise(answer["error"], len(whole))
        return PromptUpdate(**answer)

    def _check_open(self) -> None:
        if self._aborted:
            raise self._end_reason or StreamAbortedError(f"{self.request_id} was aborted")
        if self._finished:
            raise StreamFinishedError(f"{self.request_id}: the prompt was finished; open a new stream")

    def check_length(self, num_tokens: int, *, final: bool) -> None:
        """Raises PromptTooLongError or EmptyPromptError for a prompt of `num_tokens` tokens, complete if it is `final`,
        that the engine cannot serve."""
        limit = self._engine.limits.max_prompt_tokens
        if num_tokens > limit:
            raise PromptTooLongError(
                f"{self.request_id}: the prompt would have {num_tokens} tokens; this engine holds {limit} "
                f"(max_model_len={self._engine.limits.max_model_len}, {self._engine.limits.num_blocks} KV blocks of "
                f"{self._engine.limits.block_size}). Send less, or give the engine more"
            )
        if final and not num_tokens:
            raise EmptyPromptError(f"{self.request_id}: the prompt has no tokens; append some before finish()")

    def _raise(self, error: str, num_tokens: int) -> None:
        if error == "finished":
            raise StreamFinishedError(f"{self.request_id}: the prompt was finished; open a new stream")
        if error == "empty":
            raise EmptyPromptError(f"{self.request_id}: the prompt has no tokens")
        if error == "too_long":
            raise PromptTooLongError(f"{self.request_id}: {num_tokens} tokens are too many for this engine")
        raise UnknownRequestError(f"{self.request_id} is not in the engine: it ended, or was aborted")

    # ---- its life in the engine ---------------------------------------------------------------------------------

    async def begin(self, tokens: TokenArray) -> None:
        """Sends the first part of the prompt. An empty one is held back until there is something to send."""
        if len(tokens):
            await self._run(self._start(tokens, final=self._finished))
        self._tokens = tokens

    async def _start(self, tokens: TokenArray, *, final: bool) -> None:
        flags = {
            "is_streaming_prompt": self._streaming,
            "is_streaming_prompt_finished": final,
            "is_prompt_update": self.is_prompt_update,
            "sent_s": self._opened_s,
            "tenant": self.tenant,
            "tag": self.tag,
        }
        self._params.extra_args = {**(self._params.extra_args or {}), EXTRA_ARGS_KEY: flags}
        self._collector = await self._engine.submit(self.request_id, tokens.tolist(), self._params, self._arrival_time)
        self._started.set()

    async def _run(self, operation: Coroutine[Any, Any, Any]) -> Any:
        """Runs an operation to its end even if the caller is cancelled, so that both sides agree on the prompt."""
        task = asyncio.ensure_future(operation)
        self._operation = task
        task.add_done_callback(_consume_exception)
        return await asyncio.shield(task)

    async def abort(self, reason: StreamError | None = None) -> None:
        """Ends the request wherever it stands, and returns when the engine was told. Idempotent; once begun it is
        carried out, whoever is cancelled while waiting for it. `reason` is what later calls raise."""
        if self._aborting is None:
            if self.has_ended:
                return
            self._aborted = True
            self._end_reason = reason
            self._started.set()
            self._aborting = asyncio.create_task(self._abort(), name=f"stream2llm-abort-{self.request_id}")
        await ended(self._aborting)

    async def _abort(self) -> None:
        try:
            if self._operation is not None and not self._operation.done():
                await asyncio.wait({self._operation})
            if self._collector is not None:
                await self._engine.cancel(self._collector.request_id)
        finally:
            self._engine.forget(self)

    async def __aenter__(self) -> Stream2LLMStream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.abort()

    def fail(self) -> None:
        """Called when the engine died: whoever waits for the first output gets the error."""
        self._started.set()

    # ---- outputs ------------------------------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncIterator[StreamOutput]:
        """The outputs as they come; ends after the one with a finish reason. One reader at a time.

        Raises:
            EngineDeadError: the engine ended before the request did.
            StreamError: somebody else reads the outputs already.
            StreamIdleError: the engine ended the stream, because no chunk came for too long.
        """
        if self._being_read:
            raise StreamError(f"{self.request_id}: the outputs are being read already; one reader gets all of them")
        self._being_read = True
        try:
            await self._started.wait()
            while not self.has_ended:
                output = await self._next_output()
                if output.finish_reason is not None:
                    self._ended = True
                    self._engine.forget(self)
                    if self._end_reason is not None:
                        raise self._end_reason
                yield output
            if self._aborted and not self._ended:
                self._ended = True
                if self._end_reason is not None:
                    raise self._end_reason
                yield StreamOutput((), finish_reason="abort")
        finally:
            self._being_read = False

    async def _next_output(self) -> StreamOutput:
        if self._collector is None:
            self._engine.check_alive()
            raise EngineDeadError(f"{self.request_id}: the engine ended before the request was started")
        try:
            output = self._collector.get_nowait()
            if output is None:
                self._engine.check_alive()  # a dead engine tells each stream once; later readers are told here
                output = await self._collector.get()
        except Exception as error:
            raise self._engine.translated(error) from error
        completion = output.outputs[0]
        reason = completion.finish_reason
        if reason is None and output.finished:
            reason = "abort"
        return StreamOutput(
            tuple(completion.token_ids),
            completion.text,
            str(reason) if reason is not None else None,
            None if completion.logprobs is None else tuple(map(_logprobs, completion.logprobs)),
        )

    async def progress(self) -> StreamProgress:
        """Where the request stands; all zero before the first token was sent and after the end."""
        if self._collector is None or self.has_ended:
            return StreamProgress()
        found = await self._engine.call("progress", [[self._collector.request_id]])
        return StreamProgress(**found.get(self._collector.request_id, {}))

    async def trail(self) -> EventTrail:
        """The events so far. After the end it is complete, and is kept here."""
        async with self._trail_lock:
            if self._trail is None:
                return await self._take_trail()
            return self._trail

    async def _take_trail(self) -> EventTrail:
        records: Sequence[Any] = ()
        if self._collector is not None:
            taken = await self._engine.call("trail", [[self._collector.request_id]])
            records = taken.get(self._collector.request_id, ())
        trail = EventTrail.from_records(self.request_id, records)
        if trail.is_complete:
            self._trail = trail
        return trail


async def end_idle_streams(streams: Mapping[str, Stream2LLMStream], admission: Admission) -> None:
    """Ends those of an engine's streams that got no chunk for too long."""
    for stream in streams.values():
        if stream.is_being_updated:
            admission.touched(stream.request_id)  # its chunk came in time, whenever the engine takes it
    for request_id, error in admission.expired().items():
        if (idle := streams.get(request_id)) is not None:
            await idle.abort(error)


def _logprobs(position: Mapping[int, Logprob]) -> dict[int, float]:
    return {token_id: entry.logprob for token_id, entry in position.items()}


def _consume_exception(task: asyncio.Task[Any]) -> None:
    # A caller that was cancelled meanwhile does not fetch it, and asyncio would report it as lost.
    if not task.cancelled():
        task.exception()
