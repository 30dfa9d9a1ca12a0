"""One request of a replay on an engine in real time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from stream2llm_sdk.context import ContextMode
from stream2llm_sdk.errors import EngineDeadError, EngineError, Stream2LLMError
from stream2llm_sdk.serving.engine import Engine, PromptUpdate, Stream
from stream2llm_sdk.serving.lcp import TokenArray
from stream2llm_sdk.tasks import uncancelled
from stream2llm_sdk.traces.pacing import ReplayClock
from stream2llm_sdk.traces.prompt_script import PromptScript, ScriptStep
from stream2llm_sdk.traces.replay_options import ReplayOptions
from stream2llm_sdk.traces.replayed_request import (
    DRIVER,
    ReplayedRequest,
    ReplayEvent,
    trail_counters,
    trail_events,
)
from stream2llm_sdk.trail import EventTrail, EventType

__all__ = ["LiveRequest", "RunTime", "ScheduledPrompt", "first_failure"]

_UNASKED_ENDS = ("abort", "error")


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledPrompt:
    """A prompt and when its question comes.

    Attributes:
        request_id: its request's name.
        script: its messages.
        arrival_s: on the run's clock.
        wait_s: from the arrival before.
    """

    request_id: str
    script: PromptScript
    arrival_s: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class RunTime:
    """The run's clock: seconds since its begin, of the replay's clock.

    Attributes:
        clock: the replay's clock.
        zero_s: the run's begin on it.
    """

    clock: ReplayClock
    zero_s: float

    def now_s(self) -> float:
        return self.clock.monotonic_s() - self.zero_s

    async def sleep_until(self, run_s: float) -> None:
        await self.clock.sleep_until(self.zero_s + run_s)

    def event(self, name: str, duration_s: float | None = None, **data: Any) -> ReplayEvent:
        """An event of the driver, now."""
        now_s = self.clock.monotonic_s()
        return ReplayEvent(DRIVER, name, now_s - self.zero_s, now_s, self.clock.wall_s(), duration_s, data)


class LiveRequest:
    """Sends one prompt's messages when they are due, and notes what comes of it.

    Messages are sent without waiting until the engine has taken the one before: an engine takes the calls on a stream
    in the order in which they were made, between two of its steps.

    Attributes:
        events: what happened to it, in the order of time.
    """

    def __init__(
        self, engine: Engine, prompt: ScheduledPrompt, options: ReplayOptions, time: RunTime, segment: int
    ) -> None:
        self.events: list[ReplayEvent] = []
        self._engine, self._prompt, self._options, self._time = engine, prompt, options, time
        trace = prompt.script.trace
        self._trace = trace
        self._facts: dict[str, Any] = {
            "request_id": prompt.request_id,
            "query_id": trace.trace_id,
            "segment": segment,
            "tenant": trace.tenant,
            "tag": trace.tag,
            "mode": trace.mode.value,
            "is_streaming": options.streaming,
            "arrival_due_s": prompt.arrival_s,
            "arrival_s": time.now_s(),
            "finish_reason": "abort",  # until it ends by itself
        }
        self._due_s: list[float] = []
        self._sent_s: list[float] = []
        self._taken_s: list[float | None] = []
        self._num_tokens: list[int] = []
        self._num_output_tokens = 0
        self._stream: Stream | None = None
        self._trail = EventTrail(prompt.request_id, ())
        self._note("query_delay", prompt.wait_s)

    def result(self) -> ReplayedRequest:
        """How it fared so far."""
        return ReplayedRequest(
            **self._facts,
            send_due_s=tuple(self._due_s),
            send_s=tuple(self._sent_s),
            send_taken_s=tuple(self._taken_s),
            send_tokens=tuple(self._num_tokens),
            num_output_tokens=self._num_output_tokens,
            **trail_counters(self._trail),
        )

    async def run(self) -> None:
        """Replays it from now on. Whatever ends it, it is noted, and nothing of it is left in the engine.

        Raises:
            Stream2LLMError: it failed.
        """
        begin_s = self._time.now_s()
        self._facts["held_s"] = begin_s - self._facts["arrival_s"]
        self._note("query_start")
        try:
            async with AsyncExitStack() as streams:
                async with asyncio.TaskGroup() as calls:
                    await self._send_all(begin_s, streams, calls)
        except asyncio.CancelledError:
            self._facts["finish_reason"] = "abort"
            raise
        except BaseExceptionGroup as failures:
            error = first_failure(failures)
            self._fail(error)
            raise error from None
        except Exception as error:
            self._fail(error)
            raise
        finally:
            await uncancelled(self._take_trail())

    # ---- messages -----------------------------------------------------------------------------------------------

    async def _send_all(self, begin_s: float, streams: AsyncExitStack, calls: asyncio.TaskGroup) -> None:
        steps = self._steps()
        self._facts["context_complete_due_s"] = begin_s + steps[-1].offset_s
        prompt: TokenArray = np.empty(0, dtype=np.int32)
        before_s = begin_s
        for step in steps:
            due_s = begin_s + step.offset_s
            await self._time.sleep_until(due_s)
            is_last = step is steps[-1]
            self._note("query_sleep", self._time.now_s() - before_s)
            before_s = self._time.now_s()
            changes, prompt = step.changes(prompt), step.applied_to(prompt)
            if self._trace.mode is ContextMode.UPDATE:
                counts = {"num_documents": step.num_documents, "pipeline_pool_change": step.num_changed_documents}
                self._note("pipeline_pool_update", None, **counts)
            if changes or is_last or self._stream is None:
                await self._send(step, prompt, due_s, is_last, streams, calls)

    def _steps(self) -> tuple[ScriptStep, ...]:
        script = self._prompt.script
        if self._options.streaming:
            return script.steps
        last, ids = script.steps[-1], script.final_ids()
        return (ScriptStep(last.offset_s, 0, ids, last.num_documents, last.num_documents),)

    async def _send(
        self,
        step: ScriptStep,
        prompt: TokenArray,
        due_s: float,
        is_last: bool,
        streams: AsyncExitStack,
        calls: asyncio.TaskGroup,
    ) -> None:
        number = len(self._sent_s)
        self._due_s.append(due_s)
        self._sent_s.append(self._time.now_s())
        self._taken_s.append(None)
        self._num_tokens.append(len(step.new))
        if is_last:
            self._facts |= {"context_complete_s": self._sent_s[-1], "num_prompt_tokens": len(prompt)}
        if self._stream is None:
            self._stream = await streams.enter_async_context(await self._open(prompt, finished=is_last))
            self._taken_s[number] = self._time.now_s()
            calls.create_task(self._read(self._stream))
        else:
            calls.create_task(self._call(self._stream, step, prompt, is_last, number))

    async def _open(self, prompt: TokenArray, *, finished: bool) -> Stream:
        trace = self._trace
        sampling = {"temperature": 0.0, "max_tokens": trace.max_tokens, "ignore_eos": self._options.ignore_eos}
        return await self._engine.open(
            prompt.tolist(),
            sampling,
            mode=trace.mode,
            finished=finished,
            request_id=self._prompt.request_id,
            tenant=trace.tenant,
            tag=trace.tag,
        )

    async def _call(self, stream: Stream, step: ScriptStep, prompt: TokenArray, is_last: bool, number: int) -> None:
        update: PromptUpdate
        if self._trace.mode is ContextMode.UPDATE:
            update = await stream.replace(prompt.tolist(), final=is_last)
        elif is_last:
            update = await stream.finish(step.new.tolist())
        else:
            update = await stream.append(step.new.tolist())
        assert update.num_tokens == len(prompt), f"{update} differs from what was sent, {len(prompt)} tokens"
        self._taken_s[number] = self._time.now_s()

    # ---- outputs ------------------------------------------------------------------------------------------------

    async def _read(self, stream: Stream) -> None:
        async for output in stream:
            if output.token_ids and not self._num_output_tokens:
                now_s = self._time.now_s()
                self._facts["first_token_s"] = now_s
                self._note("query_ttft", now_s - self._facts["context_complete_s"])
            self._num_output_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                self._facts |= {"finished_s": self._time.now_s(), "finish_reason": output.finish_reason}
        if self._facts["finish_reason"] in _UNASKED_ENDS:
            raise EngineError(f"{stream.request_id}: the engine ended it with {self._facts['finish_reason']!r}")
        self._note("query_e2e_latency", self._facts["finished_s"] - self._facts["arrival_s"])

    async def _take_trail(self) -> None:
        if self._stream is None:
            return
        try:
            self._trail = await self._stream.trail()
        except Stream2LLMError:
            return  # with the engine the trail is lost; what the driver saw is not
        self.events += trail_events(self._trail, self._trail_zero_s())
        self.events.sort(key=lambda event: event.run_s)

    def _trail_zero_s(self) -> float:
        """The run's begin on the trail's clock. That of an engine on another host has another zero: the request was
        queued when it was sent."""
        queued = self._trail.first(EventType.QUEUED)
        zero_s = self._time.zero_s
        if queued is None or self._sent_s[0] - 1 <= queued.monotonic_s - zero_s <= self._time.now_s():
            return zero_s
        return queued.monotonic_s - self._sent_s[0]

    # ---- notes --------------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"
        self._facts |= {"finish_reason": "error", "error": text, "finished_s": self._time.now_s()}
        self._note("error", None, error=text)

    def _note(self, name: str, duration_s: float | None = None, **data: Any) -> None:
        self.events.append(self._time.event(name, duration_s, **data))


def first_failure(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one failure to tell of: a dead engine explains the others."""
    errors = list(_leaves(failures))
    return next((error for error in errors if isinstance(error, EngineDeadError)), errors[0])


def _leaves(failures: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in failures.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
