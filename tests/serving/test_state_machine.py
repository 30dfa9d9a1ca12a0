"""Random lives of many requests on vLLM's real scheduler and KV manager, checked after every step.

Hypothesis decides what is sent and after which step, in every configuration; the executor without a model checks the
content of all KV that is read. `STREAM2LLM_EXAMPLES=160` runs that many examples in each configuration, 20,000 requests
and more in all; `STREAM2LLM_SOAK_EXAMPLES=500` so many fresh ones, other ones each time.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from prompt_scripts import FLAGS, SCHEDULER, Prompts, tokens
from scheduler_checks import SchedulerChecks, snapshot
from vllm.v1.core.sched.interface import PauseState

from stream2llm_sdk.serving.policies import POLICIES
from stream2llm_sdk.serving.simulator.clock import VirtualClock
from stream2llm_sdk.serving.simulator.host_memory import CheckedSwap
from stream2llm_sdk.serving.swap import swap_config
from stream2llm_sdk.serving.victims import VICTIM_ORDERS
from stream2llm_sdk.testing.core_driver import CoreDriver

BLOCK_SIZE = 8
MAX_MODEL_LEN = 96
SLIDING_WINDOW = 20
# One request of full length fits; two do not. With two KV cache groups each request takes blocks of both.
NUM_BLOCKS = {"llama": (13, 15, 20), "hybrid": (28, 31, 40)}
EOS_PERIOD = 6
MAX_STEPS = 2_000
MAX_IDLE_STEPS = 4  # results and endings are taken notice of in steps that compute nothing

Pieces = list[tuple[int, int]]

SOAK_EXAMPLES = int(os.environ.get("STREAM2LLM_SOAK_EXAMPLES", "0"))
EXAMPLES = SOAK_EXAMPLES or int(os.environ.get("STREAM2LLM_EXAMPLES", "20"))
CONFIGURATIONS = [
    pytest.param(asynchronous, runner, policies, id=f"{'async' if asynchronous else 'sync'}-{runner}-{name}")
    for asynchronous in (False, True)
    for runner in ("v1", "v2")
    for name, policies in (("published", ("FCFS", "DEFAULT_VLLM")), ("other", tuple(sorted(POLICIES))))
]
# Over all configurations. What is drawn in one of them depends on Hypothesis and on the modules that are loaded.
MIN_TOTALS = {
    "requests": 2_000,
    "answers": 1_000,
    "preemptions": 200,
    "loaded": 1_000,
    "plans": 2_000,
    "more streams than places": 10,
}

# A piece of a prompt: the beginning of one of a few documents, so that prompts share prefixes and meet blocks' edges.
LENGTHS = st.one_of(st.sampled_from([1, 7, 8, 9, 16, 24, 32, 48]), st.integers(1, 60))
PIECES = st.lists(st.tuples(st.integers(0, 3), LENGTHS), min_size=1, max_size=3)
PROMPTS = st.lists(PIECES, min_size=1, max_size=3)
MAX_TOKENS = st.sampled_from([1, 2, 3, 5, 9])
STEPS = st.integers(0, 3)
FINAL = st.sampled_from([False, False, False, True])


@lru_cache
def document(number: int) -> list[int]:
    return tokens(random.Random(number), MAX_MODEL_LEN)


def text(pieces: Pieces, limit: int = MAX_MODEL_LEN - 1) -> list[int]:
    return [token for number, length in pieces for token in document(number)[:length]][:limit]


class StepClock:
    """Time that passes with the steps: what depends on it happens again in the same way."""

    def __init__(self, copies: VirtualClock) -> None:
        self.now_s = 1_000.0
        self.copies = copies  # moved by copies between the device and the host

    def monotonic_s(self) -> float:
        self.now_s += 1e-6
        return self.now_s + self.copies.now_s

    def wall_s(self) -> float:
        return self.now_s + self.copies.now_s


class MixedPrompts(Prompts):
    """Requests with priorities that may end early."""

    priority = 0
    ignore_eos = True

    def _add(self, request_id: str, ids: Sequence[int], max_tokens: int, extra_args: dict[str, Any] | None) -> None:
        self.now[request_id] = list(ids)
        self.max_tokens[request_id] = max_tokens
        self.driver.add(
            request_id,
            ids,
            max_tokens=max_tokens,
            extra_args=extra_args,
            priority=self.priority,
            arrival_time=self.driver.scheduler.now_s(),
            ignore_eos=self.ignore_eos,
        )


class PromptMachine(RuleBasedStateMachine):
    """One engine core from its start to the end of all its requests."""

    models: dict[str, Path]
    async_scheduling: bool
    runner: Any
    policies: tuple[str, ...]
    totals: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.started: CoreDriver | None = None

    @initialize(
        layers=st.sampled_from(["llama", "hybrid"]),
        prefix_caching=st.booleans(),
        pool=st.integers(0, 2),
        num_places=st.integers(1, 3),
        num_active=st.sampled_from([None, None, 2]),
        num_tokens=st.sampled_from([9, 16, 32]),
        queue=st.sampled_from(["fcfs", "priority"]),
        policy=st.integers(0, 1_000),
        victims=st.sampled_from(sorted(VICTIM_ORDERS)),
        num_tenants=st.sampled_from([1, 1, 2, 3]),
        num_host_blocks=st.sampled_from([0, 0, 3, 12, 100]),
        preemption=st.sampled_from(["cost", "swap", "swap", "recompute"]),
        seconds_per_block=st.sampled_from([0.0, 0.5]),
        long_prefill=st.sampled_from([0, 0, 6]),
        watermark=st.sampled_from([0.0, 0.0, 0.1]),
        look_ahead=st.booleans(),
        ends_early=st.booleans(),
        stays_open=st.booleans(),
        prompts=st.lists(PIECES, min_size=1, max_size=5),
    )
    def start(
        self,
        layers: str,
        prefix_caching: bool,
        pool: int,
        num_places: int,
        num_active: int | None,
        num_tokens: int,
        queue: str,
        policy: int,
        victims: str,
        num_tenants: int,
        num_host_blocks: int,
        preemption: str,
        seconds_per_block: float,
        long_prefill: int,
        watermark: float,
        look_ahead: bool,
        ends_early: bool,
        stays_open: bool,
        prompts: list[Pieces],
    ) -> None:
        self.started = CoreDriver(
            self.models[layers],
            scheduler_cls=SCHEDULER,
            async_scheduling=self.async_scheduling,
            runner=self.runner,
            prefix_caching=prefix_caching,
            num_gpu_blocks=NUM_BLOCKS[layers][pool],
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=num_tokens,
            max_num_seqs=num_places,
            max_num_active_seqs=num_active and min(num_active, num_places),
            max_model_len=MAX_MODEL_LEN,
            scheduling_policy=queue,
            long_prefill_token_threshold=long_prefill,
            watermark=watermark,
            scheduler_reserve_full_isl=False,
            hf_overrides={"sliding_window": SLIDING_WINDOW} if layers == "hybrid" else {},
            additional_config={
                "stream2llm": {
                    "policy": self.policies[policy % len(self.policies)],
                    "victims": victims,
                    "tenant_weights": {"tenant-1": 2},
                    "preemption_mode": preemption,
                    "look_ahead": look_ahead,
                }
            },
            **({"kv_transfer_config": swap_config(num_host_blocks=num_host_blocks)} if num_host_blocks else {}),
        )
        copies = self.driver.executor.clock
        self.driver.executor.kv_transfer = CheckedSwap(copies, out_s=seconds_per_block, in_s=seconds_per_block)
        self.clock = self.driver.scheduler.trail.clock = StepClock(copies)
        if ends_early:
            self.driver.executor.sampling_rule = replace(self.driver.executor.sampling_rule, eos_period=EOS_PERIOD)
        self.prompts = MixedPrompts(self.driver)
        self.prompts.ignore_eos = not ends_early
        self.checks = SchedulerChecks(self.prompts)
        # Whether the last open stream is never finished, so that all steps are steps with a stream open.
        self.stays_open = stays_open
        self.num_tenants = num_tenants
        self.num_places = num_places
        self.was_crowded = False
        self.aborted_outputs: dict[str, list[int]] = {}
        for pieces in prompts:
            self.prompts.open_stream(self.new_id(), text(pieces), **self.labels())

    # ---- requests -----------------------------------------------------------------------------------------------

    @rule(prompts=PROMPTS, update=st.booleans(), max_tokens=MAX_TOKENS, priority=st.integers(0, 1), steps=STEPS)
    def open_streams(self, prompts: list[Pieces], update: bool, max_tokens: int, priority: int, steps: int) -> None:
        self.prompts.priority = priority
        for pieces in prompts:
            self.prompts.open_stream(
                self.new_id(), text(pieces), max_tokens=max_tokens, is_prompt_update=update, **self.labels()
            )
        self.take_steps(steps)

    @rule(prompts=PROMPTS, max_tokens=MAX_TOKENS, priority=st.integers(0, 1), steps=STEPS)
    def add_plain(self, prompts: list[Pieces], max_tokens: int, priority: int, steps: int) -> None:
        self.prompts.priority = priority
        for pieces in prompts:
            self.prompts.add_plain(self.new_id(), text(pieces), max_tokens=max_tokens)
        self.take_steps(steps)

    @rule(pieces=PIECES, max_tokens=MAX_TOKENS, steps=STEPS)
    def add_complete(self, pieces: Pieces, max_tokens: int, steps: int) -> None:
        """A request of the SDK whose prompt is whole from the start, as `generate` sends it."""
        flags = {**FLAGS, "is_streaming_prompt": False, "is_streaming_prompt_finished": True, **self.labels()}
        self.prompts.priority = 0
        self.prompts._add(self.new_id(), text(pieces), max_tokens, {"stream2llm": flags})
        self.take_steps(steps)

    # ---- updates ------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.prompts.open)
    @rule(which=st.integers(0, 7), pieces=st.one_of(st.just([]), PIECES), final=FINAL, steps=STEPS)
    def append(self, which: int, pieces: Pieces, final: bool, steps: int) -> None:
        request_id = self.one_open(which)
        now = self.prompts.now[request_id]
        piece = text(pieces, MAX_MODEL_LEN - 1 - len(now))
        self.prompts.append(request_id, piece, final=final and self.may_finish and bool(now or piece))
        self.take_steps(steps)

    @precondition(lambda self: self.prompts.open)
    @rule(
        which=st.integers(0, 7),
        kind=st.sampled_from(["other", "edge", "inside", "shorter", "same", "empty"]),
        at=st.integers(0, MAX_MODEL_LEN),
        pieces=PIECES,
        final=FINAL,
        steps=STEPS,
    )
    def replace(self, which: int, kind: str, at: int, pieces: Pieces, final: bool, steps: int) -> None:
        request_id = self.one_open(which)
        now = self.prompts.now[request_id]
        inside = at % (len(now) + 1)
        new = {
            "other": text(pieces),
            "edge": now[: inside // BLOCK_SIZE * BLOCK_SIZE] + text(pieces),
            "inside": now[:inside] + text(pieces),
            "shorter": now[:inside],
            "same": now,
            "empty": [],
        }[kind][: MAX_MODEL_LEN - 1]
        self.prompts.replace(request_id, new, final=final and self.may_finish and bool(new))
        self.take_steps(steps)

    @precondition(lambda self: self.may_finish and any(map(self.prompts.now.get, self.prompts.open)))
    @rule(which=st.integers(0, 7), steps=STEPS)
    def finish(self, which: int, steps: int) -> None:
        ready = [request_id for request_id in self.prompts.open if self.prompts.now[request_id]]
        self.prompts.finish(ready[which % len(ready)])
        self.take_steps(steps)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 15), during_a_step=st.booleans())
    def abort(self, which: int, during_a_step: bool) -> None:
        request_id = self.live[which % len(self.live)]
        if during_a_step and self.driver.has_work():
            self.driver.core.aborts_queue.put_nowait([request_id])
            self.driver.step()  # takes it between the model's run and the use of its result, if it comes so far
        self.prompts.abort(request_id)
        self.aborted_outputs[request_id] = list(self.driver.outputs[request_id])

    @rule(which=st.integers(0, 7), why=st.sampled_from(["unknown", "plain", "finished", "empty", "too_long"]))
    def refused(self, which: int, why: str) -> None:
        kind, ids, final = "append", [5, 6], False
        candidates = list(self.prompts.open)
        if why == "unknown":
            candidates = ["nobody", *self.prompts.aborted, *self.driver.finish_reasons]
        elif why == "plain":
            candidates = [name for name in self.live if name not in self.driver.scheduler.prompts]
        elif why == "finished":
            candidates = [name for name in self.live if name in self.driver.scheduler.prompts]
            candidates = [name for name in candidates if name not in self.prompts.open]
        elif why == "empty":
            kind, ids, final = "replace", [], True
        else:
            kind, ids = "replace", [5] * MAX_MODEL_LEN
        if not candidates:
            return
        request_id = candidates[which % len(candidates)]
        before = snapshot(self.prompts)
        packed = bytes(4 * len(ids)) if why == "too_long" else ids
        answer = self.driver.call("update", [request_id, kind, packed, final, 0.0])
        assert answer == {"error": "unknown" if why == "plain" else why}
        assert snapshot(self.prompts) == before

    # ---- steps --------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        self.take_steps(count)

    def take_steps(self, count: int) -> None:
        for _ in range(count):
            self.clock.now_s += 0.3
            self.driver.step()
            self.checks.between_steps()

    @rule()
    def run_until_idle(self) -> None:
        num_idle = 0
        for _ in range(MAX_STEPS):
            if not self.driver.has_work():
                break
            self.clock.now_s += 0.3
            num_idle = 0 if self.driver.step() else num_idle + 1
            assert num_idle <= MAX_IDLE_STEPS, "steps are taken, but nothing is computed"
            self.checks.between_steps()
        assert not self.driver.has_work(), f"still busy after {MAX_STEPS} steps"
        if self.driver.scheduler.pause_state is PauseState.UNPAUSED:
            self.checks.idle()

    @rule(state=st.sampled_from(list(PauseState)))
    def pause(self, state: PauseState) -> None:
        self.driver.scheduler.set_pause_state(state)

    @rule(evict=st.booleans())
    def reset_prefix_cache(self, evict: bool) -> None:
        done = self.driver.scheduler.reset_prefix_cache(reset_running_requests=evict)
        assert done or not evict

    # ---- always -------------------------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        if self.started is not None:
            self.checks.between_steps()
            self.was_crowded |= len(self.driver.scheduler.parked) > self.num_places

    def teardown(self) -> None:
        if self.started is None:
            return
        with self.started:
            if sys.exc_info()[0] is None:  # otherwise a check has failed, and this one could only hide it
                self.end()

    def end(self) -> None:
        self.driver.scheduler.set_pause_state(PauseState.UNPAUSED)
        for request_id in list(self.prompts.open):
            self.prompts.append(request_id, [] if self.prompts.now[request_id] else [5], final=True)
        self.run_until_idle()
        self.checks.ended()
        assert {name: self.driver.outputs[name] for name in self.aborted_outputs} == self.aborted_outputs
        self.totals["requests"] += len(self.prompts.now)
        self.totals["answers"] += self.checks.num_answered
        self.totals["preemptions"] += self.checks.num_preemptions
        self.totals["loaded"] += self.checks.num_tokens_loaded
        self.totals["plans"] += self.checks.num_plans
        self.totals["decoded together"] += self.checks.num_in_run
        self.totals["more streams than places"] += self.was_crowded

    # ---- what the machine knows ---------------------------------------------------------------------------------

    @property
    def driver(self) -> CoreDriver:
        assert self.started is not None, "the first rule starts it"
        return self.started

    @property
    def live(self) -> list[str]:
        ended = self.prompts.aborted | self.driver.finish_reasons.keys()
        return [request_id for request_id in self.prompts.now if request_id not in ended]

    @property
    def may_finish(self) -> bool:
        return len(self.prompts.open) > self.stays_open

    def one_open(self, which: int) -> str:
        return self.prompts.open[which % len(self.prompts.open)]

    def labels(self) -> dict[str, str]:
        number = len(self.prompts.now)
        return {"tenant": f"tenant-{number % self.num_tenants}", "tag": f"tag-{number % 2}"}

    def new_id(self) -> str:
        return f"r{len(self.prompts.now)}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "llama": tiny_models.make_llama_config(folder / "llama"),
        "hybrid": tiny_models.make_hybrid_config(folder / "hybrid"),
    }


@pytest.fixture(scope="module")
def totals() -> list[Counter[str]]:
    """What each configuration came to see."""
    return []


@pytest.mark.timeout(0 if SOAK_EXAMPLES else 900)
@pytest.mark.parametrize(("async_scheduling", "runner", "policies"), CONFIGURATIONS)
def test_every_life_ends_right(
    models: dict[str, Path],
    totals: list[Counter[str]],
    async_scheduling: bool,
    runner: str,
    policies: tuple[str, ...],
) -> None:
    seen: Counter[str] = Counter()

    @seed(f"{async_scheduling} {runner} {policies}" if not SOAK_EXAMPLES else os.urandom(8))
    class Machine(PromptMachine):
        pass

    Machine.models, Machine.totals = models, seen
    Machine.async_scheduling, Machine.runner, Machine.policies = async_scheduling, runner, policies
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            report_multiple_bugs=False,
            derandomize=not SOAK_EXAMPLES,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        ),
    )
    print(dict(seen))
    totals.append(seen)


def test_the_lives_were_many_and_hard(totals: list[Counter[str]]) -> None:
    if len(totals) < len(CONFIGURATIONS):
        pytest.skip("needs the lives of all configurations")
    total = sum(totals, Counter())
    print(dict(total))
    scale = max(1.0, EXAMPLES / 20)
    assert {name: total[name] for name, minimum in MIN_TOTALS.items() if total[name] < minimum * scale} == {}
