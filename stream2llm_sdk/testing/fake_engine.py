"""An engine without a model."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from stream2llm_sdk.context import ContextMode
from stream2llm_sdk.errors import ConfigurationError, EngineDeadError, EngineError, UnsupportedFeatureError
from stream2llm_sdk.serving.admission import Admission, StreamLimits
from stream2llm_sdk.serving.engine import EngineLimits
from stream2llm_sdk.serving.lcp import TokenArray
from stream2llm_sdk.serving.streaming_prompt import EXTRA_ARGS_KEY
from stream2llm_sdk.serving.trail_recorder import TrailRecorder
from stream2llm_sdk.serving.vllm_stream import Stream2LLMStream, checked_token_ids, end_idle_streams
from stream2llm_sdk.testing.fake_request import FakeRequest

__all__ = ["FakeEngine"]

_BLOCK_SIZE = 16


class FakeEngine:
    """An engine that needs no model and no vLLM. It keeps what it is asked to do, and answers what it is told to.

    Its streams are the embedded engine's own, so prompts are checked, refused, cancelled and failed alike; times are
    the host's. One thing is computed at a time, and an update is taken when the one before has been computed.

    Args:
        answer: what every request is answered with: text, or a function of the final prompt's token ids that returns
            text. A word is a token.
        max_model_len: prompt and answer together, in tokens.
        max_prompt_tokens: the longest prompt; left out, one less than `max_model_len`.
        prefill_tokens_per_s: how fast prompts are computed; None takes no time.
        decode_tokens_per_s: how fast one request's answer comes; None takes no time.
        vocabulary_size: token ids are below this number.
        stream_limits: how much may be open at once; left out, anything.

    Attributes:
        requests: every request that was opened, in order.

    Raises:
        ConfigurationError: a value is not positive.
    """

    def __init__(
        self,
        answer: str | Callable[[tuple[int, ...]], str] = "This is the answer.",
        *,
        max_model_len: int = 8192,
        max_prompt_tokens: int | None = None,
        prefill_tokens_per_s: float | None = None,
        decode_tokens_per_s: float | None = None,
        vocabulary_size: int = 1_000_000,
        stream_limits: StreamLimits | None = None,
    ) -> None:
        longest = max_model_len - 1 if max_prompt_tokens is None else max_prompt_tokens
        for name, value in {
            "max_model_len": max_model_len,
            "max_prompt_tokens": longest,
            "prefill_tokens_per_s": prefill_tokens_per_s,
            "decode_tokens_per_s": decode_tokens_per_s,
            "vocabulary_size": vocabulary_size,
        }.items():
            if value is not None and not value > 0:
                raise ConfigurationError(f"{name}={value!r} must be more than 0")
        self.limits = EngineLimits(max_model_len, longest, -(-longest // _BLOCK_SIZE), _BLOCK_SIZE)
        self.vocabulary_size = vocabulary_size
        self.requests: list[FakeRequest] = []
        self.recorder = TrailRecorder()
        self._answer = answer
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._decode_s = 0.0 if decode_tokens_per_s is None else 1 / decode_tokens_per_s
        self._streams: dict[str, Stream2LLMStream] = {}
        self.admission = Admission(stream_limits or StreamLimits())
        self._live: dict[str, FakeRequest] = {}
        self._busy_until_s = 0.0
        self._going = asyncio.Event()
        self._going.set()
        self._died = asyncio.Event()
        self._closed = False

    def __repr__(self) -> str:
        state = "dead" if self.is_dead else "closed" if self._closed else "running"
        return f"<FakeEngine {state}, {self.num_open_streams} streams>"

    # ---- for tests ----------------------------------------------------------------------------------------------

    @property
    def num_open_streams(self) -> int:
        """Streams that have not ended."""
        return len(self._streams)

    @property
    def is_dead(self) -> bool:
        """Whether `die` was called."""
        return self._died.is_set()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def pause(self) -> None:
        """Takes nothing and says nothing until `resume`."""
        self._going.clear()

    def resume(self) -> None:
        """Goes on after `pause`."""
        self._going.set()

    async def expire(self) -> None:
        """Ends the streams that got no chunk for `idle_timeout_s`."""
        await end_idle_streams(self._streams, self.admission)

    def die(self) -> None:
        """Ends as if the engine's core process had: every open stream raises EngineDeadError."""
        self._died.set()
        self._going.set()
        for request in self._live.values():
            request.fail()
        for stream in self._streams.values():
            stream.fail()

    # ---- the engine ---------------------------------------------------------------------------------------------

    async def open(
        self,
        token_ids: Sequence[int],
        sampling: Mapping[str, Any] | None = None,
        *,
        mode: ContextMode | str = ContextMode.APPEND,
        finished: bool = False,
        request_id: str | None = None,
        arrival_time: float | None = None,
        tenant: str = "",
        tag: str = "",
    ) -> Stream2LLMStream:
        """Opens a request; see `Engine.open` for the arguments. Of the sampling parameters `max_tokens` and `n` are
        checked, the others only kept.

        Raises:
            PromptError, PromptTooLongError, EmptyPromptError: the prompt is refused.
            ConfigurationError, UnsupportedFeatureError: the sampling parameters or the mode are refused.
            EngineBusyError: a limit is reached.
            EngineDeadError: the engine died.
        """
        self.check_alive()
        try:
            context_mode = ContextMode(mode)
        except ValueError:
            raise ConfigurationError(f"mode={mode!r}: choose 'append' or 'update'") from None
        request_id = request_id or f"stream-{uuid.uuid4().hex[:12]}"
        if not isinstance(request_id, str) or request_id in self._streams:
            raise ConfigurationError(f"request_id={request_id!r} is not a new string: a live request has it")
        params = SimpleNamespace(extra_args=None, sampling=_checked(sampling))
        tokens = checked_token_ids(token_ids, self.vocabulary_size)
        stream = Stream2LLMStream(
            cast(Any, self),
            request_id,
            cast(Any, params),
            context_mode,
            finished=finished,
            arrival_time=time.time() if arrival_time is None else arrival_time,
            opened_s=time.monotonic(),
            tenant=tenant,
            tag=tag,
        )
        stream.check_length(len(tokens), final=finished)
        self.admission.admit(request_id, tenant, len(tokens), finished=finished)
        self._streams[request_id] = stream
        try:
            await stream.begin(tokens)
        except BaseException:
            await asyncio.shield(stream.abort())
            raise
        return stream

    async def aclose(self) -> None:
        """Aborts every request. Idempotent."""
        self._closed = True
        for stream in list(self._streams.values()):
            await stream.abort()

    async def __aenter__(self) -> FakeEngine:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    # ---- for streams and requests -------------------------------------------------------------------------------

    async def submit(
        self, request_id: str, token_ids: list[int], params: SimpleNamespace, arrival_time: float
    ) -> FakeRequest:
        """Takes a new request; see `Stream2LLMEngine.submit` for the arguments."""
        await self.turn()
        flags = params.extra_args[EXTRA_ARGS_KEY]
        request = FakeRequest(self, request_id, token_ids, params.sampling, flags, arrival_time)
        self._live[request_id] = request
        self.requests.append(request)
        return request

    async def call(self, operation: str, arguments: list[Any]) -> Any:
        """What streams ask of the scheduler: the `operation` 'update', 'progress' or 'trail', with its `arguments`."""
        if operation == "update":
            request_id, kind, data, final, sent_s = arguments
            await self.turn()
            request = self._live.get(request_id)
            return {"error": "unknown"} if request is None else request.update(kind, data, final, sent_s)
        await asyncio.sleep(0)
        self.check_alive()
        (request_ids,) = arguments
        if operation == "trail":
            return self.recorder.take(request_ids)
        return {name: self._live[name].progress() for name in request_ids if name in self._live}

    async def cancel(self, request_id: str) -> None:
        """Aborts a request."""
        await asyncio.sleep(0)
        request = self._live.get(request_id)
        if request is not None:
            request.abort()

    async def turn(self, *, speaking: bool = False) -> None:
        """Returns when the engine has computed what it took, is not paused, and has decoded one token if `speaking`.

        Raises:
            EngineDeadError: the engine died.
        """
        await asyncio.sleep(0)
        if speaking:
            await self._work_for(self._decode_s)
        while True:
            await self._going.wait()
            self.check_alive(closed_is_alive=True)
            remaining_s = self._busy_until_s - time.monotonic()
            if remaining_s <= 0:
                return
            await self._work_for(remaining_s)

    async def _work_for(self, seconds: float) -> None:
        if seconds <= 0:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._died.wait()
        except TimeoutError:
            pass

    def work(self, num_tokens: int) -> float:
        """Begins to compute; returns when it will have been done, in seconds on the monotonic clock."""
        now_s = time.monotonic()
        if self._prefill_tokens_per_s is None:
            return now_s
        self._busy_until_s = now_s + num_tokens / self._prefill_tokens_per_s
        return self._busy_until_s

    def answer_to(self, prompt_ids: tuple[int, ...]) -> str:
        """What is answered to this prompt."""
        return self._answer if isinstance(self._answer, str) else self._answer(prompt_ids)

    def set_final_prompt(self, request_id: str, params: object, tokens: TokenArray) -> None:
        """There is no front end that would have to know; see `Stream2LLMEngine.set_final_prompt` for the arguments."""

    def drop(self, request: FakeRequest) -> None:
        """Forgets an ended request; `requests` keeps it."""
        self._live.pop(request.request_id, None)

    def forget(self, stream: Stream2LLMStream) -> None:
        """Drops an ended stream from the books."""
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self.admission.release(stream.request_id)

    def check_alive(self, *, closed_is_alive: bool = False) -> None:
        """Raises EngineDeadError if the engine died, EngineError if it was closed."""
        if self.is_dead:
            raise EngineDeadError("the fake engine died; every request in it is lost")
        if self._closed and not closed_is_alive:
            raise EngineError("the engine was closed; make a new one")

    def translated(self, error: Exception) -> Exception:
        """Errors here are the SDK's already."""
        return error


def _checked(sampling: Mapping[str, Any] | None) -> dict[str, Any]:
    if sampling is not None and not isinstance(sampling, Mapping):
        raise ConfigurationError(f"sampling must be a mapping, not {type(sampling).__name__}")
    fields = {"temperature": 0.0, "max_tokens": 256, **(sampling or {})}
    if fields.get("n", 1) not in (1, None):
        raise UnsupportedFeatureError(f"n={fields['n']!r} is not supported for streaming prompts: open one for each")
    if not isinstance(fields["max_tokens"], int) or fields["max_tokens"] < 1:
        raise ConfigurationError(f"max_tokens={fields['max_tokens']!r}: give a number of tokens, at least 1")
    return fields
