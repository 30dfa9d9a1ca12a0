"""A replay on an engine in real time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from stream2llm_sdk.errors import EngineDeadError, Stream2LLMError
from stream2llm_sdk.serving.engine import Engine
from stream2llm_sdk.traces.live_request import LiveRequest, RunTime, ScheduledPrompt, first_failure
from stream2llm_sdk.traces.pacing import ReplayClock
from stream2llm_sdk.traces.replay_options import OnError, ReplayOptions
from stream2llm_sdk.traces.run_journal import RunJournal

__all__ = ["LiveReplay", "ReplayProgress"]


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """How far a replay is.

    Attributes:
        num_requests: of the whole run.
        num_ended: ended so far, in earlier segments too.
        num_under_way: arrived and not ended.
        num_failed: ended with an error, in this segment.
        run_s: seconds since the run began; of virtual time in a simulation.
    """

    num_requests: int
    num_ended: int = 0
    num_under_way: int = 0
    num_failed: int = 0
    run_s: float = 0.0


class LiveReplay:
    """Replays prompts on an engine, each when it is due.

    Args:
        engine: what serves them; it is left running.
        prompts: in the order of their arrivals.
        options: the run's.
        journal: what takes down what happens.
        clock: what is paced by.
        tell: called when the progress changes.
        num_ended: requests that ended in earlier segments.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[ScheduledPrompt],
        options: ReplayOptions,
        journal: RunJournal,
        clock: ReplayClock,
        *,
        tell: Callable[[ReplayProgress], None] = lambda progress: None,
        num_ended: int = 0,
    ) -> None:
        self._engine, self._prompts, self._options, self._journal = engine, prompts, options, journal
        self._time = RunTime(clock, clock.monotonic_s() - journal.start_s)
        self._tell = tell
        self._num_before = num_ended
        self._num_ended = self._num_under_way = self._num_failed = 0
        self._asks_engine = callable(getattr(engine, "call", None))

    async def run(self) -> None:
        """Returns when all have ended. If it is cancelled, those under way are aborted and taken down as such.

        Raises:
            EngineDeadError: the engine ended.
            Stream2LLMError: a request failed, and `on_error` is 'stop'.
        """
        self._journal.event(self._time.event("replay_start"))
        try:
            async with asyncio.TaskGroup() as group:
                sampler = group.create_task(self._sample())
                await self._run_requests()
                sampler.cancel()
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None
        finally:
            self._journal.event(self._time.event("replay_end", self._time.now_s()))

    async def _run_requests(self) -> None:
        places = nullcontext() if self._options.concurrency is None else asyncio.Semaphore(self._options.concurrency)
        async with asyncio.TaskGroup() as requests:
            for prompt in self._prompts:
                await self._time.sleep_until(prompt.arrival_s)
                request = LiveRequest(self._engine, prompt, self._options, self._time, self._journal.segment)
                requests.create_task(self._replay(request, places), name=f"replay-{prompt.request_id}")

    async def _replay(self, request: LiveRequest, places: Any) -> None:
        self._num_under_way += 1
        self._tell_progress()
        try:
            async with places:
                await request.run()
        except Stream2LLMError as error:
            self._num_failed += 1
            if self._options.on_error is OnError.STOP or isinstance(error, EngineDeadError):
                raise
        finally:
            self._num_under_way -= 1
            self._num_ended += 1
            self._journal.request(request.result(), request.events)
            self._tell_progress()

    def _tell_progress(self) -> None:
        self._tell(
            ReplayProgress(
                self._num_before + len(self._prompts),
                self._num_before + self._num_ended,
                self._num_under_way,
                self._num_failed,
                self._time.now_s(),
            )
        )

    # ---- samples ------------------------------------------------------------------------------------------------

    async def _sample(self) -> None:
        due_s = self._time.now_s()
        while True:
            found = await self._snapshot()
            now_s = self._time.now_s()
            self._journal.sample(now_s, found)
            self._tell_progress()
            due_s = max(due_s + self._options.sample_every_s, now_s)
            await self._time.sleep_until(due_s)

    async def _snapshot(self) -> Mapping[str, Any]:
        """How the engine stands; nothing of an engine that does not say."""
        if not self._asks_engine:
            return {}
        try:
            found = await self._engine.call("snapshot", [])  # type: ignore[attr-defined]
        except EngineDeadError:
            return {}  # its requests tell of it
        except (Stream2LLMError, ValueError, TypeError, KeyError):
            self._asks_engine = False
            return {}
        names = ("num_free_blocks", "num_host_blocks_used", "num_parked")
        return {name: found[name] for name in names if name in found}
