"""A replay in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stream2llm_sdk.context import ContextMode
from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.simulator.load import simulate
from stream2llm_sdk.serving.simulator.load_result import RequestResult
from stream2llm_sdk.serving.simulator.workloads import SimulatedRequest
from stream2llm_sdk.tasks import uncancelled
from stream2llm_sdk.traces.live_replay import ReplayProgress
from stream2llm_sdk.traces.replay_options import ReplayOptions
from stream2llm_sdk.traces.replayed_request import (
    DRIVER,
    ReplayedRequest,
    ReplayEvent,
    trail_counters,
    trail_events,
)
from stream2llm_sdk.traces.run_journal import RunJournal
from stream2llm_sdk.traces.simulated import simulated_requests
from stream2llm_sdk.traces.simulation import Simulation
from stream2llm_sdk.traces.trace import Trace
from stream2llm_sdk.trail import EventTrail, EventType

__all__ = ["run_simulated"]

_PROGRESS_S = 0.1


async def run_simulated(
    simulation: Simulation,
    traces: Sequence[Trace],
    request_ids: Sequence[str],
    options: ReplayOptions,
    journal: RunJournal,
    *,
    tell: Callable[[ReplayProgress], None] = lambda progress: None,
) -> None:
    """Replays traces in virtual time, in a thread. If it is cancelled, the simulation ends with its next step.

    Args:
        simulation: what serves them.
        traces: with their final times, in the order of their arrivals.
        request_ids: a name for the request of each.
        options: the run's.
        journal: what takes down what happens.
        tell: called about ten times a second.

    Raises:
        ConfigurationError: an option cannot be simulated, or a trace could never fit.
        EngineError: the scheduler makes no progress.
    """
    if options.concurrency is not None:
        raise ConfigurationError(
            f"concurrency={options.concurrency} cannot be simulated: leave it out; max_num_seqs bounds what may run"
        )
    requests = simulated_requests(traces, tokenizer=simulation.tokenizer, max_tokens=options.max_tokens)
    observer = _Observer(traces, requests, request_ids, options, journal)
    arguments = {**simulation.arguments, "policy": simulation.policy, "streaming": options.streaming}
    run = asyncio.ensure_future(asyncio.to_thread(simulate, requests, observer=observer, **arguments))
    journal.event(ReplayEvent(DRIVER, "replay_start", 0.0, 0.0, 0.0, None, {}))
    try:
        while not run.done():
            await asyncio.wait({run}, timeout=_PROGRESS_S)
            tell(observer.progress())
        run.result()
    except asyncio.CancelledError:
        observer.is_stopped.set()
        await uncancelled(_ended(run))
        observer.abort_others()
        raise
    finally:
        end_s = observer.now_s
        journal.event(ReplayEvent(DRIVER, "replay_end", end_s, end_s, end_s, end_s, {}))


class _Stopped(Exception):
    """Ends a simulation that nobody waits for any more."""


async def _ended(run: asyncio.Future[Any]) -> None:
    await asyncio.wait({run})
    error = run.exception()
    if error is not None and not isinstance(error, _Stopped):
        raise error


class _Observer:
    """Takes down what a simulation does."""

    def __init__(
        self,
        traces: Sequence[Trace],
        requests: Sequence[SimulatedRequest],
        request_ids: Sequence[str],
        options: ReplayOptions,
        journal: RunJournal,
    ) -> None:
        self.is_stopped = threading.Event()
        self.now_s = 0.0
        self._traces, self._requests, self._request_ids = traces, requests, request_ids
        self._options, self._journal = options, journal
        self._ended: set[int] = set()
        self._next_sample_s = 0.0

    def step(self, now_s: float, scheduler: Any) -> None:
        self.now_s = now_s
        if self.is_stopped.is_set():
            raise _Stopped
        if now_s >= self._next_sample_s:
            self._next_sample_s = now_s + self._options.sample_every_s
            found = scheduler("snapshot", []) if callable(scheduler) else {}
            names = ("num_free_blocks", "num_host_blocks_used", "num_parked")
            self._journal.sample(now_s, {name: found[name] for name in names if name in found})

    def ended(self, index: int, result: RequestResult, records: Sequence[Any]) -> None:
        self._ended.add(index)
        self.now_s = max(self.now_s, result.finished_s)
        trail = EventTrail.from_records(self._request_ids[index], records)
        counters = {
            name: getattr(result, name)
            for name in ReplayedRequest.__dataclass_fields__
            if name.startswith("num_") and hasattr(result, name)
        }
        request = self._request(
            index,
            **{**counters, **trail_counters(trail)},
            first_token_s=result.first_token_s,
            finished_s=result.finished_s,
            finish_reason="length" if result.num_output_tokens == self._requests[index].max_tokens else "stop",
            send_taken_s=self._taken(index, trail),
        )
        events = [*self._driver_events(index, request), *trail_events(trail, 0.0)]
        self._journal.request(request, sorted(events, key=lambda event: event.run_s))

    def abort_others(self) -> None:
        """Takes down the requests that had arrived and not ended when the simulation was stopped."""
        for index, request in enumerate(self._requests):
            if index not in self._ended and request.arrival_s <= self.now_s:
                self._journal.request(self._request(index, finish_reason="abort"), ())

    def progress(self) -> ReplayProgress:
        num_arrived = sum(request.arrival_s <= self.now_s for request in self._requests)
        num_ended = len(self._ended)
        return ReplayProgress(len(self._requests), num_ended, max(0, num_arrived - num_ended), 0, self.now_s)

    # ---- one request --------------------------------------------------------------------------------------------

    def _request(self, index: int, **facts: Any) -> ReplayedRequest:
        simulated, trace = self._requests[index], self._traces[index]
        due_s, num_tokens = self._sends(simulated)
        own = {
            "request_id": self._request_ids[index],
            "query_id": trace.trace_id,
            "tenant": trace.tenant,
            "tag": trace.tag,
            "mode": trace.mode.value,
            "is_streaming": self._options.streaming,
            "arrival_due_s": simulated.arrival_s,
            "arrival_s": simulated.arrival_s,
            "context_complete_due_s": simulated.context_complete_s,
            "context_complete_s": simulated.context_complete_s,
            "send_due_s": due_s,
            "send_s": due_s,
            "send_taken_s": (None,) * len(due_s),
            "send_tokens": num_tokens,
        }
        return ReplayedRequest(**{**own, **facts})

    def _sends(self, simulated: SimulatedRequest) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """When each message was sent, and how many new tokens it had."""
        if not self._options.streaming:
            return (simulated.context_complete_s,), (simulated.num_prompt_tokens,)
        chunks = simulated.chunks
        times_s = tuple(simulated.arrival_s + chunk.offset_s for chunk in chunks)
        new = [chunks[0].num_tokens]
        for before, chunk in itertools.pairwise(chunks):
            common = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before.spans, chunk.spans, strict=False))
            num_kept = sum(span[1] for span, _ in common) if chunk.kind == "replace" else 0
            new.append(chunk.num_tokens - num_kept)
        return times_s, tuple(new)

    def _taken(self, index: int, trail: EventTrail) -> tuple[float | None, ...]:
        """When the engine took each message; of the first, which opens the request, the trail does not tell."""
        taken = [event.monotonic_s for event in trail if event.type is EventType.PROMPT_UPDATED]
        num_sends = len(self._sends(self._requests[index])[0])
        return (None, *taken) if len(taken) + 1 == num_sends else (None,) * num_sends

    def _driver_events(self, index: int, request: ReplayedRequest) -> Iterator[ReplayEvent]:
        arrival_s, trace = request.arrival_s, self._traces[index]
        yield _event("query_delay", arrival_s, arrival_s - (self._requests[index - 1].arrival_s if index else 0.0))
        yield _event("query_start", arrival_s)
        before_s, documents = arrival_s, frozenset[str]()
        for timed in trace.updates if self._options.streaming else trace.updates[-1:]:
            now_s = arrival_s + timed.offset_s
            yield _event("query_sleep", now_s, now_s - before_s)
            before_s = now_s
            if trace.mode is ContextMode.UPDATE:
                names = frozenset(chunk.source or chunk.text for chunk in timed.update.chunks)
                counts = {"num_documents": len(names), "pipeline_pool_change": len(names - documents)}
                yield _event("pipeline_pool_update", now_s, None, **counts)
                documents = names
        if request.first_token_s is not None:
            yield _event("query_ttft", request.first_token_s, request.ttft_from_context_complete_s)
        if request.finished_s is not None:
            yield _event("query_e2e_latency", request.finished_s, request.e2e_latency_s)


def _event(name: str, run_s: float, duration_s: float | None = None, **data: Any) -> ReplayEvent:
    return ReplayEvent(DRIVER, name, run_s, run_s, run_s, duration_s, data)
