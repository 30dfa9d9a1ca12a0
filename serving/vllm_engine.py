"""The embedded engine: stock vLLM's `AsyncLLM` with our scheduler plugged in."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stream2llm_sdk.context import ContextMode
from stream2llm_sdk.errors import (
    ConfigurationError,
    EngineDeadError,
    EngineError,
    PromptError,
    Stream2LLMError,
)
from stream2llm_sdk.main_guard import require_main_guard
from stream2llm_sdk.serving.admission import DEFAULT_LIMITS, Admission, StreamLimits
from stream2llm_sdk.serving.engine import EngineLimits, StreamOutput
from stream2llm_sdk.serving.engine_metrics import EngineMetrics
from stream2llm_sdk.serving.lcp import TokenArray
from stream2llm_sdk.serving.options import SchedulingOptions
from stream2llm_sdk.serving.policies import make_policy, policy_name
from stream2llm_sdk.serving.sampling import make_sampling_params, verify_for_model
from stream2llm_sdk.serving.vllm_start import build, end, end_start, supported
from stream2llm_sdk.serving.vllm_stream import Stream2LLMStream, checked_token_ids, end_idle_streams
from stream2llm_sdk.tasks import uncancelled
from stream2llm_sdk.tokenizer import locate_model

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector

    from stream2llm_sdk.serving.metrics import SchedulerMetrics

__all__ = ["Stream2LLMEngine"]

_WATCH_S = 0.5  # how often the core's process and idle streams are looked at


class Stream2LLMEngine:
    """Serves streaming prompts and plain ones with one model, embedded in this process.

    The model runs in processes of its own, which `start` (or entering the context) brings up and `aclose` ends:

        async with Stream2LLMEngine("HuggingFaceTB/SmolLM2-135M-Instruct") as engine:
            stream = await engine.open(head_ids)
            await stream.append(chunk_ids)
            await stream.finish(tail_ids)
            async for output in stream: ...

    Args:
        model: a folder or a hub name, as vLLM takes it.
        policy: scheduling policy by name; left out, the environment's SCHEDULER_TYPE, else FCFS.
        scheduling: the scheduler's other options, see `SchedulingOptions`.
        max_model_len: prompt and answer together, in tokens; left out, what the model was trained for.
        enable_prefix_caching: whether KV of ended requests is found again by prompts that begin alike.
        metrics: what is fed with the trails of ended requests and, by `observe_metrics`, with how the engine stands.
        limits: how much may be open at once, and how long a stream may wait for its next chunk; left out, a thousand
            open streams and four thousand complete requests. What is over it is refused with EngineBusyError.
        progress: called with one line when the engine starts and when it is ready; left out, the lines go to
            stderr; None for silence.
        engine_args: any other of vLLM's `AsyncEngineArgs`. Some cannot be combined with streaming prompts and are
            refused.

    Raises:
        ConfigurationError, UnsupportedFeatureError: an argument cannot work; raised at once.
        MissingExtraError: vLLM is not installed; raised by `start`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        policy: str | None = None,
        scheduling: SchedulingOptions | None = None,
        max_model_len: int | None = None,
        enable_prefix_caching: bool = True,
        limits: StreamLimits | None = None,
        metrics: SchedulerMetrics | None = None,
        progress: Callable[[str], None] | bool | None = True,
        **engine_args: Any,
    ) -> None:
        for name, value, kind in (
            ("scheduling", scheduling, SchedulingOptions),
            ("limits", limits, StreamLimits),
            ("policy", policy, str),
        ):
            if value is not None and not isinstance(value, kind):
                raise ConfigurationError(f"{name} must be a {kind.__name__}, not {type(value).__name__}")
        if not isinstance(enable_prefix_caching, bool):
            raise ConfigurationError(f"enable_prefix_caching={enable_prefix_caching!r:.80}: give True or False")
        if not (progress is None or isinstance(progress, bool) or callable(progress)):
            raise ConfigurationError(f"progress={progress!r:.80}: give a function, or None for silence")
        self.model = os.fspath(model)
        self.policy = make_policy(policy_name(policy, "FCFS")).name
        self.scheduling = scheduling or SchedulingOptions()
        self._engine_args = {
            "max_model_len": max_model_len,
            "enable_prefix_caching": enable_prefix_caching,
            **supported(engine_args),
        }
        self._progress = _print_to_stderr if progress is True else progress or None
        self._llm: AsyncLLM | None = None
        self._limits: EngineLimits | None = None
        self._on_cpu = False
        self._streams: dict[str, Stream2LLMStream] = {}
        self.admission = Admission(limits or DEFAULT_LIMITS)
        self._metrics = EngineMetrics(metrics, self._snapshot)
        self._start_lock = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._llm is not None else "not started"
        return f"<Stream2LLMEngine {self.model!r} {self.policy} {state}, {len(self._streams)} streams>"

    # ---- start and end ------------------------------------------------------------------------------------------

    async def start(self) -> Stream2LLMEngine:
        """Starts the engine's processes and loads the model, which takes tens of seconds. Idempotent.

        Raises:
            MissingExtraError: vLLM is not installed.
            ConfigurationError: vLLM refuses an argument, or the main script has no `__main__` guard.
            EngineStartError: the processes did not come up.
        """
        async with self._start_lock:
            if self._closed:
                raise EngineError("the engine was closed; make a new one")
            if self._llm is None:
                await self._start()
        return self

    async def _start(self) -> None:
        require_main_guard("Stream2LLMEngine")
        locate_model(self.model)
        started_s = time.monotonic()
        self._report(f"starting the engine with {self.model} (policy {self.policy}); this takes a while")
        self._loop = asyncio.get_running_loop()
        abandoned = threading.Event()
        building = asyncio.ensure_future(
            asyncio.to_thread(build, self.model, self.policy, self.scheduling, self._engine_args, abandoned)
        )
        try:
            llm = await asyncio.shield(building)
        except asyncio.CancelledError:
            abandoned.set()
            self._report("the start was cancelled; ending the engine's processes")
            await uncancelled(end_start(building))
            if building.exception() is None and (built := building.result()) is not None:
                await uncancelled(asyncio.to_thread(end, built))
            raise
        assert llm is not None  # it is given up only after a cancellation
        self._llm = llm
        self._on_cpu = llm.vllm_config.device_config.device_type == "cpu"
        try:
            self._limits = EngineLimits(**_only(EngineLimits, await self.call("limits", [])))
        except BaseException:
            await self._shut_down()
            raise
        self._watcher = asyncio.create_task(self._watch(), name="stream2llm-engine-watcher")
        self._report(f"engine ready after {time.monotonic() - started_s:.0f} s: {self._describe()}")

    def _describe(self) -> str:
        limits = self.limits
        return (
            f"{limits.num_blocks} KV blocks of {limits.block_size} tokens, prompts up to "
            f"{limits.max_prompt_tokens} tokens"
        )

    def _report(self, line: str) -> None:
        if callable(self._progress):
            self._progress(line)

    async def aclose(self) -> None:
        """Aborts every request and ends the engine's processes. Idempotent."""
        self._closed = True
        async with self._start_lock:
            if asyncio.get_running_loop() is self._loop:
                for stream in list(self._streams.values()):
                    await stream.abort()
                if self._watcher is not None:
                    self._watcher.cancel()
                    await asyncio.wait({self._watcher})
            self._watcher = None
            await self._shut_down()

    async def _shut_down(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            if asyncio.get_running_loop() is self._loop and llm.output_handler is not None:
                llm.output_handler.cancel()  # or it would report the end of the core as a failure
                await asyncio.wait({llm.output_handler})
            await asyncio.to_thread(end, llm)

    async def __aenter__(self) -> Stream2LLMEngine:
        return await self.start()

    async def __aexit__(self, *exc_info: object) -> None:
        await uncancelled(self.aclose())

    # ---- requests -----------------------------------------------------------------------------------------------

    @property
    def limits(self) -> EngineLimits:
        """What one request may use. Known once the engine has started."""
        if self._limits is None:
            raise EngineError("the engine has not been started: call start(), or use it in `async with`")
        return self._limits

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this number."""
        return int(self._running().model_config.get_vocab_size())

    @property
    def num_open_streams(self) -> int:
        """Streams that have not ended."""
        return len(self._streams)

    async def open(
        self,
        token_ids: Sequence[int],
        sampling: Mapping[str, Any] | SamplingParams | None = None,
        *,
        mode: ContextMode | str = ContextMode.APPEND,
        finished: bool = False,
        request_id: str | None = None,
        arrival_time: float | None = None,
        tenant: str = "",
        tag: str = "",
    ) -> Stream2LLMStream:
        """Opens a request.

        Args:
            token_ids: the beginning of the prompt, or all of it. May be empty while the prompt is open.
            sampling: fields of vLLM's `SamplingParams`; left out, greedy and at most 256 tokens.
            mode: 'append', or 'update' for a prompt that may be replaced.
            finished: whether the prompt is complete already (a plain request).
            request_id: a name for it, made up if left out.
            arrival_time: seconds since the epoch by which FCFS ranks it; now, if left out.
            tenant: who it belongs to: limits and fair shares are kept for each tenant.
            tag: what kind of context it gets, such as the retriever's name; forecasts are learned for each tag.

        Raises:
            PromptError, PromptTooLongError, EmptyPromptError: the prompt is refused.
            ConfigurationError, UnsupportedFeatureError: the sampling parameters or the mode are refused.
            EngineBusyError: a limit is reached; try again later.
            EngineDeadError: the engine ended.
        """
        llm = self._running()
        try:
            context_mode = ContextMode(mode)
        except ValueError:
            raise ConfigurationError(f"mode={mode!r}: choose 'append' or 'update'") from None
        request_id = self._new_request_id(request_id)
        if arrival_time is not None and (
            isinstance(arrival_time, bool)
            or not isinstance(arrival_time, (int, float))
            or not math.isfinite(arrival_time)
        ):
            raise ConfigurationError(f"arrival_time={arrival_time!r}: give seconds since the epoch")
        params = make_sampling_params(sampling, on_cpu=self._on_cpu)
        verify_for_model(params, llm.input_processor)
        tokens = checked_token_ids(token_ids, int(llm.model_config.get_vocab_size()))
        for name, value in (("tenant", tenant), ("tag", tag)):
            if not isinstance(value, str):
                raise ConfigurationError(f"{name}={value!r}: give a string")
        stream = Stream2LLMStream(
            self,
            request_id,
            params,
            context_mode,
            finished=finished,
            arrival_time=time.time() if arrival_time is None else float(arrival_time),
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
            await stream.abort()
            raise
        return stream

    def _new_request_id(self, request_id: str | None) -> str:
        if request_id is None:
            return f"stream-{uuid.uuid4().hex[:12]}"
        if not isinstance(request_id, str) or not request_id or not request_id.isprintable():
            raise ConfigurationError(f"request_id={request_id!r}: give a string of printable characters")
        if request_id in self._streams:
            raise ConfigurationError(f"request_id={request_id!r} is that of a live request; give another")
        return request_id

    async def generate(
        self, token_ids: Sequence[int], sampling: Mapping[str, Any] | SamplingParams | None = None
    ) -> AsyncIterator[StreamOutput]:
        """A plain request: a whole prompt in, outputs as they come. Closing the iterator aborts it.

        Args:
            token_ids: the prompt.
            sampling: as for `open`.
        """
        async with await self.open(token_ids, sampling, finished=True) as stream:
            async for output in stream:
                yield output

    async def observe_metrics(self) -> SchedulerMetrics:
        """Feeds the metrics with the requests that have ended since, and with how the engine stands now; `render` then
        gives them in Prometheus' text format.

        Raises:
            ConfigurationError: the engine was made without `metrics`.
        """
        return await self._metrics.observe()

    async def _snapshot(self) -> dict[str, Any]:
        return {**self.admission.snapshot(), **await self.call("snapshot", [])}

    async def reset_prefix_cache(self) -> bool:
        """Forgets the KV of ended requests. False if it could not, because requests are under way."""
        llm = self._running()
        try:
            return bool(await llm.reset_prefix_cache())
        except Exception as error:
            raise self.translated(error) from error

    # ---- for streams --------------------------------------------------------------------------------------------

    async def submit(
        self, request_id: str, token_ids: list[int], params: SamplingParams, arrival_time: float
    ) -> RequestOutputCollector:
        """Hands a request to vLLM. On any failure vLLM is left without it.

        Args:
            request_id: its name.
            token_ids: its prompt so far.
            params: its sampling parameters.
            arrival_time: seconds since the epoch.
        """
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import TokensPrompt

        llm = self._running()
        try:
            return await llm.add_request(
                request_id, TokensPrompt(prompt_token_ids=token_ids), params, arrival_time=arrival_time
            )
        except BaseException as error:
            if not llm.errored:
                await uncancelled(llm.abort(request_id))
            if isinstance(error, (ValueError, VLLMClientError)):
                raise PromptError(f"{request_id}: vLLM refuses the request: {error}") from error
            if isinstance(error, Exception):
                raise self.translated(error) from error
            raise

    async def cancel(self, engine_request_id: str) -> None:
        """Aborts a request in vLLM; nothing to do if the engine is dead."""
        if self._llm is not None and not self._llm.errored:
            await self._llm.abort(engine_request_id, internal=True)

    async def call(self, operation: str, arguments: list[Any]) -> Any:
        """Calls an `operation` of the scheduler in the engine-core process with these `arguments`; ends with an error
        if that process does."""
        llm = self._running()
        answer = asyncio.ensure_future(llm.engine_core.call_utility_async("scheduler", operation, arguments))
        try:
            while not answer.done():
                await asyncio.wait({answer}, timeout=0.5)
                if not answer.done():
                    self.check_alive()
            return answer.result()
        except Stream2LLMError:
            raise
        except Exception as error:
            raise self.translated(error) from error
        finally:
            answer.cancel()

    def set_final_prompt(self, engine_request_id: str, params: SamplingParams, tokens: TokenArray) -> None:
        """Tells vLLM's front end the whole prompt, so that detokenisation starts behind its last token and the
        request's output reports its length.

        Args:
            engine_request_id: vLLM's name for the request.
            params: its sampling parameters.
            tokens: the prompt.
        """
        from types import SimpleNamespace

        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        processor = self._running().output_processor
        state = processor.request_states.get(engine_request_id)
        if state is None:
            return
        state.prompt_token_ids = tokens.tolist()
        state.prompt_len = len(tokens)
        prompt: Any = SimpleNamespace(
            prompt_token_ids=state.prompt_token_ids,
            prompt_embeds=None,
            sampling_params=params,
            request_id=engine_request_id,
        )
        tokenizer = processor.tokenizer if params.detokenize else None
        state.detokenizer = IncrementalDetokenizer.from_new_request(tokenizer=tokenizer, request=prompt)

    def forget(self, stream: Stream2LLMStream) -> None:
        """Drops an ended stream from the books."""
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self.admission.release(stream.request_id)
            self._metrics.ended(stream)

    def _forget_unread(self) -> None:
        """Drops requests that have ended and whose last output nobody has fetched yet; it can still be fetched."""
        assert self._llm is not None
        live = self._llm.output_processor.request_states
        for stream in list(self._streams.values()):
            if stream.engine_request_id not in live and stream.engine_request_id is not None:
                self.forget(stream)

    def check_alive(self) -> None:
        """Raises EngineDeadError if the engine's core process has ended."""
        if self._llm is None or self._llm.errored:
            raise EngineDeadError(
                "the engine's core process ended; every request in it is lost. Make a new engine; "
                "VLLM_LOGGING_LEVEL=INFO shows why it ended"
            )

    def translated(self, error: Exception) -> Exception:
        """vLLM's error as one of the SDK's."""
        from vllm.v1.engine.exceptions import EngineDeadError as VLLMEngineDeadError

        if isinstance(error, Stream2LLMError):
            return error
        if isinstance(error, VLLMEngineDeadError) or (self._llm is not None and self._llm.errored):
            return EngineDeadError("the engine's core process ended; every request in it is lost. Make a new engine")
        return EngineError(f"the engine failed: {error}")

    def _running(self) -> AsyncLLM:
        if self._closed:
            raise EngineError("the engine was closed; make a new one")
        if self._llm is None:
            raise EngineError("the engine has not been started: call start(), or use it in `async with`")
        if asyncio.get_running_loop() is not self._loop:
            raise EngineError(
                "the engine was started in another event loop, which it belongs to. Do all of it in one asyncio.run(), "
                "or make an engine for each loop"
            )
        self.check_alive()
        return self._llm

    async def _watch(self) -> None:
        """Tells every stream when the engine's core process ends, also those that wait for nothing in particular."""
        while self._llm is not None and not self._llm.errored:
            await asyncio.sleep(_WATCH_S)
            try:
                self._forget_unread()
                await end_idle_streams(self._streams, self.admission)
                if self._metrics.is_due:
                    await self.observe_metrics()
            except EngineError:
                continue  # a core that died meanwhile: the loop's condition sees it
        if self._llm is not None:
            from vllm.v1.engine.exceptions import EngineDeadError as VLLMEngineDeadError

            self._llm.output_processor.propagate_error(VLLMEngineDeadError())
            for stream in list(self._streams.values()):
                stream.fail()
                self.forget(stream)


def _print_to_stderr(line: str) -> None:
    print(f"stream2llm: {line}", file=sys.stderr, flush=True)  # noqa: T201


def _only(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    names = kind.__dataclass_fields__  # type: ignore[attr-defined]
    return {name: value for name, value in values.items() if name in names}
