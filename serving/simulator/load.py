"""Runs a load on vLLM's real scheduler and KV cache manager in virtual time, without a model.

Policies and ways of preempting are compared here: the decisions are the real ones, the seconds come from a latency
model, and nothing looks at what the KV holds (`CheckedExecutor` does that).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from stream2llm_sdk.errors import ConfigurationError, EngineError
from stream2llm_sdk.serving import vllm_start
from stream2llm_sdk.serving.cost_correction import OnlineCorrection
from stream2llm_sdk.serving.cost_model import CostModel
from stream2llm_sdk.serving.length_prediction import LengthPredictor
from stream2llm_sdk.serving.outlook import Outlook
from stream2llm_sdk.serving.simulator.bare_scheduler import BlockHasher, build_scheduler
from stream2llm_sdk.serving.simulator.clock import LatencyModel, StepFacts, VirtualClock
from stream2llm_sdk.serving.simulator.latency import H200_LLAMA_8B, StepLatency
from stream2llm_sdk.serving.simulator.load_result import RequestResult, SimulationResult
from stream2llm_sdk.serving.simulator.plan_log import PlanLog
from stream2llm_sdk.serving.simulator.workloads import SimulatedRequest, token_ids
from stream2llm_sdk.serving.streaming_prompt import EXTRA_ARGS_KEY
from stream2llm_sdk.trail import EventType

__all__ = ["CopyLatency", "LoadObserver", "simulate"]

CopyLatency = Callable[[int, int], float]
"""`(num_blocks_out, num_blocks_in)` of one step to the seconds that the copies between GPU and host add to it. The
numbers are those of the `outs` and `ins` of the step's `SwapMetadata`."""


class LoadObserver(Protocol):
    """Looks on while a load is simulated. What it raises ends the simulation."""

    def step(self, now_s: float, scheduler: Any) -> None:
        """Called after each step that ran the model."""
        ...

    def ended(self, index: int, result: RequestResult, records: Sequence[Any]) -> None:
        """Called when a request has ended, with its trail's records; vLLM's own scheduler keeps none."""
        ...


_SCHEDULERS = {
    "stream2llm": "stream2llm_sdk.serving.scheduler.Stream2LLMScheduler",
    "published": "stream2llm_sdk.serving.simulator.published_scheduler.PublishedScheduler",
}
_SAMPLED_TOKEN_ID, _STOP_TOKEN_ID = 5, 6
_COUNTERS = ("num_tokens_recomputed", "num_tokens_invalidated", "num_tokens_cached")
# An engine core with work calls the scheduler again at once. So often it may answer with an empty step (one drains
# what has ended, one follows a plan that failed) before nothing but the next message can change its mind.
_MAX_EMPTY_STEPS = 3


def simulate(
    requests: Sequence[SimulatedRequest],
    *,
    policy: str | None = "DEFAULT_VLLM",
    system: Literal["stream2llm", "published"] = "stream2llm",
    streaming: bool = True,
    num_gpu_blocks: int = 100_000,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 1024,
    max_model_len: int = 131_072,
    block_size: int = 16,
    prefix_caching: bool = False,
    latency: LatencyModel = H200_LLAMA_8B,
    copy_latency: CopyLatency | None = None,
    cost_model: CostModel | None = None,
    length_predictor: LengthPredictor | None = None,
    scheduler_options: Mapping[str, Any] | None = None,
    observer: LoadObserver | None = None,
    plans: PlanLog | None = None,
    num_host_blocks: int = 0,
    **engine_args: Any,
) -> SimulationResult:
    """Serves `requests` from an idle engine until all have ended. The same arguments give the same result.

    Args:
        requests: the load, in any order.
        policy: a name of `POLICIES`; None for vLLM's own scheduler, which cannot stream.
        system: 'stream2llm', or 'published' for the published system's own decisions (`PublishedScheduler`), which
            needs no `kv_transfer_config` to swap and knows the options of `PublishedOptions`.
        streaming: whether prompts are sent chunk by chunk, or whole when their last chunk is there.
        num_gpu_blocks: KV blocks in all; one of them is vLLM's null block.
        max_num_batched_tokens: the token budget of a step.
        max_num_seqs: requests that may run at once.
        max_model_len: of prompt and output.
        block_size: tokens per KV block.
        prefix_caching: hashing blocks makes simulations several times slower.
        latency: seconds per step. The messaging time of a `StepLatency` delays what clients see.
        copy_latency: seconds that a step's copies take; with host memory for them.
        cost_model: what the scheduler believes that recompute and copies cost; left out, its own estimate.
        length_predictor: what the scheduler expects of outputs; it answers at once, where a trained one that is named
            in `scheduler_options` would run in a thread, and results would depend on the machine.
        scheduler_options: more of `additional_config["stream2llm"]`.
        observer: who is told of steps and of requests that have ended.
        plans: keeps what the scheduler plans, and why.
        num_host_blocks: KV blocks that host memory has room for; 0 for no swapping. It is short for a
            `kv_transfer_config` among `engine_args`.
        engine_args: more of vLLM's `EngineArgs`.

    Raises:
        ConfigurationError: an option is wrong, or a request could never fit.
        EngineError: the scheduler makes no progress.
    """
    if policy is None and streaming:
        raise ConfigurationError("vLLM's own scheduler (policy=None) cannot stream prompts; use streaming=False")
    if system not in _SCHEDULERS:
        raise ConfigurationError(f"unknown system {system!r}: choose one of {', '.join(_SCHEDULERS)}")
    if num_host_blocks:
        engine_args = {"kv_transfer_config": _swap_config(num_host_blocks), **engine_args}
    _check_fit(requests, min(max_model_len, (num_gpu_blocks - 1) * block_size))
    options = {**(scheduler_options or {}), "policy": policy}
    scheduler, block_hasher = build_scheduler(
        None if policy is None else _SCHEDULERS[system],
        num_gpu_blocks,
        {
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_seqs": max_num_seqs,
            "max_model_len": max_model_len,
            "block_size": block_size,
            "enable_prefix_caching": prefix_caching,
            "additional_config": {} if policy is None else {EXTRA_ARGS_KEY: options},
            **engine_args,
        },
    )
    if length_predictor is not None:
        scheduler.outlook = Outlook(length_predictor, max_model_len=max_model_len)
    if cost_model is not None:
        scheduler.costs = OnlineCorrection(cost_model, frozen=scheduler.costs.frozen)
    run = _Run(scheduler, block_hasher, requests, streaming=streaming, latency=latency, copy_latency=copy_latency)
    run.observer = observer
    if plans is not None:
        plans.attach(scheduler)
    started_s = time.perf_counter()
    run.run()
    return run.result(time.perf_counter() - started_s)


def _swap_config(num_host_blocks: int) -> Any:
    vllm_start.quieten()
    from stream2llm_sdk.serving.swap import swap_config  # it imports vLLM, which says much at its start

    return swap_config(num_host_blocks=num_host_blocks)


def _check_fit(requests: Sequence[SimulatedRequest], capacity: int) -> None:
    for index, request in enumerate(requests):
        needed = max(request.longest_prompt_tokens, request.num_prompt_tokens + request.max_tokens)
        if needed > capacity:
            raise ConfigurationError(
                f"request {index} needs {needed} tokens for prompt and answer, but max_model_len and num_gpu_blocks "
                f"allow {capacity}: raise them, or leave such requests out"
            )


class _TrailClock:
    """The trail's clock, in virtual time."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def monotonic_s(self) -> float:
        return self._clock.now_s

    def wall_s(self) -> float:
        return self._clock.now_s


@dataclass(slots=True)
class _Live:
    """A request that the scheduler has."""

    index: int
    num_computed: int = 0
    num_output: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    first_token_s: float = 0.0


class _Run:
    """The state of one simulation."""

    def __init__(
        self,
        scheduler: Any,
        block_hasher: BlockHasher | None,
        requests: Sequence[SimulatedRequest],
        *,
        streaming: bool,
        latency: LatencyModel,
        copy_latency: CopyLatency | None,
    ) -> None:
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

        self._empty_output, self._model_output = EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
        self._scheduler, self._block_hasher = scheduler, block_hasher
        self._requests = requests
        self._streaming = streaming
        self._latency, self._copy_latency = latency, copy_latency
        self._messaging_s = latency.messaging_s if isinstance(latency, StepLatency) else 0.0
        self._clock = VirtualClock()
        self._traced = hasattr(scheduler, "trail")
        if self._traced:
            scheduler.trail.clock = _TrailClock(self._clock)
        self._messages = _messages(requests, streaming)
        self._next_message = 0
        self._live: dict[str, _Live] = {}
        self._results: dict[int, RequestResult] = {}
        self._num_steps, self._busy_s, self._peak_kv_usage = 0, 0.0, 0.0
        self.observer: LoadObserver | None = None

    def run(self) -> None:
        num_empty = 0
        while len(self._results) < len(self._requests):
            self._deliver_messages()
            if num_empty < _MAX_EMPTY_STEPS and self._scheduler.has_requests():
                num_empty = 0 if self._step() else num_empty + 1
            elif self._next_message < len(self._messages):
                self._clock.advance_to(self._messages[self._next_message][0])
                num_empty = 0
            else:
                raise EngineError(f"the scheduler makes no progress; unfinished requests: {sorted(self._live)[:10]}")

    def result(self, wall_s: float) -> SimulationResult:
        return SimulationResult(
            requests=tuple(self._results[index] for index in range(len(self._requests))),
            num_steps=self._num_steps,
            virtual_s=self._clock.now_s,
            busy_s=self._busy_s,
            peak_kv_usage=self._peak_kv_usage,
            wall_s=wall_s,
        )

    # ---- messages to the scheduler ------------------------------------------------------------------------------

    def _deliver_messages(self) -> None:
        """Sends what has arrived by now: a step is not interrupted by a message."""
        messages, now_s = self._messages, self._clock.now_s
        while self._next_message < len(messages) and messages[self._next_message][0] <= now_s:
            sent_s, index, chunk = messages[self._next_message]
            self._next_message += 1
            if chunk == 0:
                self._open(index, sent_s)
            else:
                self._update(index, chunk, sent_s)

    def _open(self, index: int, sent_s: float) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        simulated, request_id = self._requests[index], str(index)
        spans = simulated.chunks[0].spans if self._streaming else simulated.final_spans
        params = SamplingParams(
            temperature=0.0,
            max_tokens=simulated.max_tokens,
            ignore_eos=True,
            stop_token_ids=[_STOP_TOKEN_ID],
            extra_args={EXTRA_ARGS_KEY: self._flags(simulated, sent_s)} if self._traced else None,
        )
        request = Request(
            request_id=request_id,
            prompt_token_ids=token_ids(spans).tolist(),
            sampling_params=params,
            pooling_params=None,
            arrival_time=sent_s,
            block_hasher=self._block_hasher,
        )
        if self._block_hasher is None:
            request.prefill_stats = None  # no cache to report on: vLLM would look through all blocks in vain
        self._live[request_id] = _Live(index)
        self._scheduler.add_request(request)

    def _flags(self, simulated: SimulatedRequest, sent_s: float) -> dict[str, Any]:
        return {
            "is_streaming_prompt": self._streaming,
            "is_streaming_prompt_finished": not self._streaming or len(simulated.chunks) == 1,
            "is_prompt_update": self._streaming and any(chunk.kind == "replace" for chunk in simulated.chunks),
            "sent_s": sent_s,
            "tenant": simulated.tenant,
            "tag": simulated.tag,
        }

    def _update(self, index: int, number: int, sent_s: float) -> None:
        chunks = self._requests[index].chunks
        final = number == len(chunks) - 1
        new = token_ids(chunks[number].spans)
        answer = self._scheduler("update", [str(index), chunks[number].kind, new, final, sent_s])
        if "error" in answer:
            raise EngineError(f"request {index}: the scheduler refused chunk {number}: {answer['error']}")

    # ---- steps --------------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        """Takes one step; returns whether it ran the model."""
        output = self._scheduler.schedule()
        if not self._traced:
            for request_id in output.preempted_req_ids or ():
                self._live[request_id].num_preemptions += 1
        if not output.num_scheduled_tokens:
            self._scheduler.update_from_output(output, self._empty_output)
            return False
        spans, sampled = self._forward(output.num_scheduled_tokens)
        self._num_steps += 1
        self._pass_time(output, spans, sum(map(len, sampled)))
        self._peak_kv_usage = max(self._peak_kv_usage, self._scheduler.kv_cache_manager.usage)
        request_ids = list(output.num_scheduled_tokens)
        results = self._scheduler.update_from_output(
            output,
            self._model_output(
                req_ids=request_ids,
                req_id_to_index={request_id: position for position, request_id in enumerate(request_ids)},
                sampled_token_ids=sampled,
            ),
        )
        for result in results.values():
            for request_output in result.outputs:
                self._collect(request_output)
        if self.observer is not None:
            self.observer.step(self._clock.now_s, self._scheduler)
        return True

    def _forward(self, num_scheduled_tokens: Mapping[str, int]) -> tuple[list[tuple[int, int]], list[list[int]]]:
        """What the step computes of each request, and what it samples: a token where nothing is left to compute,
        which an open prompt, whose last token is held back, never gets to."""
        spans, sampled = [], []
        requests, live = self._scheduler.requests, self._live
        for request_id, num_tokens in num_scheduled_tokens.items():
            request = requests[request_id]
            stop = request.num_computed_tokens
            spans.append((stop - num_tokens, stop))
            if stop == request.num_tokens:
                ends = request.num_output_tokens + 1 == self._requests[live[request_id].index].stops_after
                sampled.append([_STOP_TOKEN_ID if ends else _SAMPLED_TOKEN_ID])
            else:
                sampled.append([])
            live[request_id].num_computed += num_tokens
        return spans, sampled

    def _pass_time(self, output: Any, spans: list[tuple[int, int]], num_sampled: int) -> None:
        duration_s = self._latency(StepFacts(self._num_steps, tuple(spans), num_sampled))
        copies = output.kv_connector_metadata
        if copies is not None and self._copy_latency is not None:
            duration_s += self._copy_latency(len(copies.outs), len(copies.ins))
            if self._scheduler.swap is not None:
                self._report_copies(copies, self._copy_latency)
        self._clock.advance(duration_s)
        self._busy_s += duration_s

    def _report_copies(self, copies: Any, copy_latency: CopyLatency) -> None:
        """Tells the scheduler what the copies took, as workers do."""
        from stream2llm_sdk.serving.swap.messages import CopySample

        num_out, num_in = len(copies.outs), len(copies.ins)
        samples = []
        if num_out:
            samples.append(CopySample("out", num_out, copies.num_tokens_out, copy_latency(num_out, 0)))
        if num_in:
            samples.append(CopySample("in", num_in, copies.num_tokens_in, copy_latency(0, num_in)))
        self._scheduler.swap.add_samples(samples)

    def _collect(self, output: Any) -> None:
        live = self._live[output.request_id]
        if output.new_token_ids and not live.num_output:
            live.first_token_s = self._clock.now_s + self._messaging_s
        live.num_output += len(output.new_token_ids)
        if output.prefill_stats is not None:
            live.num_cached = output.prefill_stats.num_cached_tokens
        if output.finish_reason is not None:
            del self._live[output.request_id]
            self._results[live.index] = self._result_of(output.request_id, live)

    def _result_of(self, request_id: str, live: _Live) -> RequestResult:
        simulated = self._requests[live.index]
        records = self._scheduler("trail", [[request_id]])[request_id] if self._traced else ()
        result = RequestResult(
            arrival_s=simulated.arrival_s,
            context_complete_s=simulated.context_complete_s,
            first_token_s=live.first_token_s,
            finished_s=self._clock.now_s + self._messaging_s,
            tenant=simulated.tenant,
            tag=simulated.tag,
            num_prompt_tokens=simulated.num_prompt_tokens,
            num_output_tokens=live.num_output,
            num_tokens_computed=live.num_computed,
            **(_traced_counters(records) if self._traced else _own_counters(simulated, live)),
        )
        if self.observer is not None:
            self.observer.ended(live.index, result, records)
        return result


def _traced_counters(records: Sequence[Any]) -> dict[str, int]:
    """What the scheduler's trail says of a request that has ended."""
    kinds = Counter(event for event, *_ in records)
    counters = records[-1][-1] or {}
    return {
        **{name: counters[name] for name in _COUNTERS},
        "num_recompute_preemptions": kinds[EventType.PREEMPTED_RECOMPUTE],
        "num_swap_preemptions": kinds[EventType.PREEMPTED_SWAP],
    }


def _own_counters(simulated: SimulatedRequest, live: _Live) -> dict[str, int]:
    """The same for vLLM's own scheduler, which drops KV only, and where all that exceeds one pass over the tokens (the
    last output token is never computed) was computed before."""
    num_once = simulated.num_prompt_tokens + live.num_output - 1 - live.num_cached
    return {
        "num_tokens_recomputed": max(0, live.num_computed - num_once),
        "num_tokens_invalidated": 0,
        "num_tokens_cached": live.num_cached,
        "num_recompute_preemptions": live.num_preemptions,
        "num_swap_preemptions": 0,
    }


def _messages(requests: Sequence[SimulatedRequest], streaming: bool) -> list[tuple[float, int, int]]:
    """`(time, request, chunk)` of every message, by time; a whole prompt counts as chunk 0."""
    if not streaming:
        return sorted((request.context_complete_s, index, 0) for index, request in enumerate(requests))
    return sorted(
        (request.arrival_s + chunk.offset_s, index, number)
        for index, request in enumerate(requests)
        for number, chunk in enumerate(request.chunks)
    )
