"""The executor without a model: it passes vLLM's own scheduler, and catches schedulers that are wrong."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stream2llm_sdk.errors import ConfigurationError
from stream2llm_sdk.serving.simulator import (
    KVContentError,
    KVMemory,
    KVWriteError,
    RunnerStateError,
    SamplingRule,
    StepFacts,
    VirtualClock,
)
from stream2llm_sdk.serving.simulator.content import TokenRow, prefix_hashes
from stream2llm_sdk.serving.simulator.invariants import InvariantError
from stream2llm_sdk.serving.simulator.kv_memory import GroupLayout
from stream2llm_sdk.serving.simulator.runner_state import V1RunnerState, V2RunnerState
from stream2llm_sdk.testing.core_driver import CoreDriver

from .tiny_models import (
    FIRST_ORDINARY_TOKEN_ID,
    VOCAB_SIZE,
    make_hybrid,
    make_hybrid_config,
    make_llama,
    make_llama_config,
)

Tamper = Callable[[Any, Any], None]
FULL = GroupLayout(block_size=4)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_llama_config(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_hybrid_config(tmp_path_factory.mktemp("hybrid")))


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_ORDINARY_TOKEN_ID, VOCAB_SIZE) for _ in range(count)]


def tampering_scheduler(tamper: Tamper, *, async_scheduling: bool = False) -> type:
    """vLLM's scheduler, but `tamper(scheduler, scheduler_output)` has its way with every step."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    base: Any = AsyncScheduler if async_scheduling else Scheduler

    class TamperingScheduler(base):  # type: ignore[misc]
        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            output = super().schedule(*args, **kwargs)
            tamper(self, output)
            return output

    return TamperingScheduler


# ---- vLLM's own scheduler passes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", ["full", "hybrid"])
@pytest.mark.parametrize("prefix_caching", [False, True], ids=["plain", "cached"])
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_vllm_scheduler_is_exact_under_preemption(
    llama: str, hybrid: str, async_scheduling: bool, runner: Any, prefix_caching: bool, layers: str
) -> None:
    rng = random.Random(f"{runner}-{prefix_caching}-{layers}")
    shared = random_tokens(rng, 120)
    requests: dict[str, tuple[list[int], int]] = {}
    with CoreDriver(
        hybrid if layers == "hybrid" else llama,
        async_scheduling=async_scheduling,
        runner=runner,
        prefix_caching=prefix_caching,
        num_gpu_blocks=35 if layers == "hybrid" else 26,
        max_num_batched_tokens=96,
        max_num_seqs=8,
        max_model_len=256,
    ) as driver:
        free = driver.num_free_blocks()
        preempted = count_preemptions(driver)
        for index in range(24):
            prompt = shared[: rng.randrange(120)] + random_tokens(rng, rng.randrange(1, 80))
            requests[f"r{index}"] = (prompt, rng.randrange(1, 50))
            driver.add(f"r{index}", prompt, max_tokens=requests[f"r{index}"][1])
            for _ in range(rng.randrange(4)):
                driver.step()
                driver.check_invariants()
        aborted = rng.choice(sorted(set(requests) - set(driver.finish_reasons)))
        driver.abort(aborted)
        driver.step(async_scheduling)  # vLLM would take a result in flight for one of the next request of that id
        driver.outputs[aborted].clear()
        requests[aborted] = (random_tokens(rng, 50), 7)
        driver.add(aborted, requests[aborted][0], max_tokens=7)
        driver.run_until_idle(after_step=driver.check_invariants)

        assert {name: driver.outputs[name] for name in requests} == {
            name: driver.expected_output(prompt, length) for name, (prompt, length) in requests.items()
        }
        assert preempted, "the pool was meant to be too small"
        assert all(preempted) == async_scheduling, "results in flight at a preemption exist when asynchronous only"
        assert driver.num_free_blocks() == free
        assert not driver.executor.sampled_while_held


def count_preemptions(driver: CoreDriver) -> list[int]:
    """A list that grows by each preemption's number of tokens in flight."""
    in_flight: list[int] = []
    preempt = driver.scheduler._preempt_request

    def recording(request: Any, *args: Any, **kwargs: Any) -> None:
        preempt(request, *args, **kwargs)
        in_flight.append(request.num_stale_output_tokens)

    driver.scheduler._preempt_request = recording
    return in_flight


# ---- wrong schedulers are caught ------------------------------------------------------------------------------------


def skip_a_token_of_a_new_request(scheduler: Any, output: Any) -> None:
    for data in output.scheduled_new_reqs:
        data.num_computed_tokens += 1


def skip_a_token_of_a_running_request(scheduler: Any, output: Any) -> None:
    cached = output.scheduled_cached_reqs
    cached.num_computed_tokens = [count + 1 for count in cached.num_computed_tokens]


def swap_the_first_two_blocks(scheduler: Any, output: Any) -> None:
    for data in output.scheduled_new_reqs:
        blocks = data.block_ids[0]
        blocks[0], blocks[1] = blocks[1], blocks[0]


def write_into_the_first_request(scheduler: Any, output: Any) -> None:
    blocks = scheduler.kv_cache_manager.get_block_ids("r0")[0]
    for data in output.scheduled_new_reqs:
        if data.req_id != "r0":
            data.block_ids[0][-1] = blocks[0]


def lose_the_new_blocks(scheduler: Any, output: Any) -> None:
    cached = output.scheduled_cached_reqs
    cached.new_block_ids = [None] * len(cached.req_ids)


def forget_that_requests_are_resumed(scheduler: Any, output: Any) -> None:
    output.scheduled_cached_reqs.resumed_req_ids.clear()


@pytest.mark.parametrize(
    ("tamper", "runner", "error", "words"),
    [
        (skip_a_token_of_a_new_request, "v1", KVContentError, "position 0, in block .* holds nothing"),
        (skip_a_token_of_a_new_request, "v2", KVContentError, "position 0, in block .* holds nothing"),
        (skip_a_token_of_a_running_request, "v1", KVContentError, "position 90, in block .* holds nothing"),
        (skip_a_token_of_a_running_request, "v2", RunnerStateError, "counts 91 computed tokens, the runner 90"),
        (write_into_the_first_request, "v1", KVWriteError, "'r0'.* position 0, .* overwritten by 'r1'"),
        (write_into_the_first_request, "v2", KVWriteError, "'r0'.* position 0, .* overwritten by 'r1'"),
        (lose_the_new_blocks, "v1", KVWriteError, "no block to write position 96"),
        (forget_that_requests_are_resumed, "v1", KVWriteError, "was overwritten by 'r2' while"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_wrong_scheduler_is_caught(llama: str, tamper: Tamper, runner: Any, error: type, words: str) -> None:
    rng = random.Random(3)
    with CoreDriver(
        llama,
        scheduler_cls=tampering_scheduler(tamper),
        runner=runner,
        prefix_caching=False,
        num_gpu_blocks=30,
        max_num_batched_tokens=90,
        max_model_len=256,
    ) as driver:
        for index in range(3):
            driver.add(f"r{index}", random_tokens(rng, 200), max_tokens=50)
        with pytest.raises(error, match=words):
            driver.run_until_idle()


def test_swapped_blocks_are_found_by_the_next_request_and_in_the_prefix_cache(llama: str) -> None:
    prompt = random_tokens(random.Random(4), 100)
    with CoreDriver(llama, scheduler_cls=tampering_scheduler(swap_the_first_two_blocks)) as driver:
        driver.add("first", prompt, max_tokens=4)
        driver.step()  # consistent with itself: it reads what it wrote
        with pytest.raises(InvariantError, match="does not hold that prefix"):
            driver.check_invariants()
        driver.add("second", prompt, max_tokens=4)
        driver.scheduler.schedule = super(type(driver.scheduler), driver.scheduler).schedule
        with pytest.raises(KVContentError, match="'second', group 0: position 0"):
            driver.step()


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_changing_a_prompt_behind_the_runner_gives_the_old_prompts_answer(llama: str, runner: Any) -> None:
    rng = random.Random(5)
    old = random_tokens(rng, 90)
    new = old[:80] + random_tokens(rng, 10)
    with CoreDriver(llama, runner=runner, prefix_caching=False, max_num_batched_tokens=64) as driver:
        driver.add("r0", old, max_tokens=6)
        driver.step()
        request = driver.scheduler.requests["r0"]
        request._all_token_ids[:] = new
        request.prompt_token_ids = new
        driver.run_until_idle()
        assert driver.outputs["r0"] == driver.expected_output(old, 6) != driver.expected_output(new, 6)


def rewind_a_decoding_request(scheduler: Any, output: Any) -> None:
    """Let the runner compute its last two tokens again, both of which it sampled itself."""
    cached = output.scheduled_cached_reqs
    for index, request_id in enumerate(cached.req_ids):
        if cached.num_output_tokens[index] == 3:
            cached.num_computed_tokens[index] -= 1
            output.num_scheduled_tokens[request_id] += 1
            output.total_num_scheduled_tokens += 1


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_sampled_tokens_are_on_the_host_only_when_synchronous(llama: str, async_scheduling: bool) -> None:
    scheduler = tampering_scheduler(rewind_a_decoding_request, async_scheduling=async_scheduling)
    prompt = random_tokens(random.Random(6), 40)
    with CoreDriver(llama, scheduler_cls=scheduler, async_scheduling=async_scheduling) as driver:
        driver.add("r0", prompt, max_tokens=8)
        if async_scheduling:
            with pytest.raises(RunnerStateError, match="never reached the host"):
                driver.run_until_idle()
        else:
            driver.step(4)
            assert driver.outputs["r0"] == driver.expected_output(prompt, 4)


@pytest.mark.parametrize("copied", [True, False])
def test_block_copies_are_carried_out(llama: str, copied: bool) -> None:
    """Redirect the first block of a prefix hit to a spare one, as copy-on-write does."""

    def redirect(scheduler: Any, output: Any) -> None:
        for data in output.scheduled_new_reqs:
            if data.num_computed_tokens:
                spare = scheduler.kv_cache_manager.block_pool.get_new_blocks(1)[0].block_id
                output.kv_cache_block_copies = [(data.block_ids[0][0], spare)] if copied else None
                data.block_ids[0][0] = spare

    prompt = random_tokens(random.Random(7), 60)
    with CoreDriver(llama, scheduler_cls=tampering_scheduler(redirect)) as driver:
        driver.add("first", prompt, max_tokens=4)
        driver.run_until_idle()
        driver.add("second", prompt, max_tokens=4)
        if copied:
            driver.run_until_idle()
            assert driver.outputs["second"] == driver.outputs["first"] == driver.expected_output(prompt, 4)
        else:
            with pytest.raises(KVContentError, match=r"position 0, in block .* holds nothing"):
                driver.run_until_idle()


# ---- the invariants -------------------------------------------------------------------------------------------------


@contextmanager
def a_leaked_block(scheduler: Any) -> Iterator[None]:
    pool = scheduler.kv_cache_manager.block_pool
    blocks = pool.get_new_blocks(1)
    yield
    pool.free_blocks(blocks)


@contextmanager
def a_block_freed_while_in_use(scheduler: Any) -> Iterator[None]:
    block = blocks_of(scheduler, "r0")[-1]
    scheduler.kv_cache_manager.block_pool.free_blocks([block])
    yield
    scheduler.kv_cache_manager.block_pool.touch([block])


@contextmanager
def a_block_missing_from_its_table(scheduler: Any) -> Iterator[None]:
    block = blocks_of(scheduler, "r0").pop()
    yield
    blocks_of(scheduler, "r0").append(block)


@contextmanager
def a_token_counted_that_is_not_there(scheduler: Any) -> Iterator[None]:
    request = scheduler.requests["r0"]
    request.num_computed_tokens += 2
    yield
    request.num_computed_tokens -= 2


@contextmanager
def a_changed_token(scheduler: Any) -> Iterator[None]:
    tokens = scheduler.requests["r0"]._all_token_ids
    tokens[3] += 1
    yield
    tokens[3] -= 1


@contextmanager
def another_prefix_under_the_hash(scheduler: Any) -> Iterator[None]:
    blocks = blocks_of(scheduler, "r0")
    blocks[0], blocks[1] = blocks[1], blocks[0]
    yield
    blocks[0], blocks[1] = blocks[1], blocks[0]


@contextmanager
def a_broken_free_queue(scheduler: Any) -> Iterator[None]:
    head = scheduler.kv_cache_manager.block_pool.free_block_queue.fake_free_list_head
    first = head.next_free_block
    head.next_free_block = first.next_free_block
    yield
    head.next_free_block = first


def blocks_of(scheduler: Any, request_id: str) -> list[Any]:
    blocks: list[Any] = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks[request_id]
    return blocks


@pytest.fixture(scope="module")
def half_done(llama: str) -> Iterator[CoreDriver]:
    """A core with one request in the middle of its answer."""
    with CoreDriver(llama, num_gpu_blocks=40) as driver:
        driver.add("r0", random_tokens(random.Random(8), 50), max_tokens=50)
        driver.step(3)
        yield driver


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (a_leaked_block, "counts 1 references, 0 tables hold it"),
        (a_block_freed_while_in_use, "counts 0 references, 1 tables hold it"),
        (a_block_missing_from_its_table, "counts 1 references, 0 tables hold it"),
        (a_token_counted_that_is_not_there, "has 54 computed tokens of 53"),
        (a_changed_token, "its block hashes are not those of its tokens"),
        (another_prefix_under_the_hash, "has another prefix's hash"),
        (a_broken_free_queue, "points back to the wrong block"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_invariants_see_damage(half_done: CoreDriver, damage: Any, words: str) -> None:
    half_done.check_invariants()
    with damage(half_done.scheduler), pytest.raises(InvariantError, match=words):
        half_done.check_invariants()


# ---- sampling, counting, time ---------------------------------------------------------------------------------------


def test_eos_comes_only_when_asked_for(llama: str) -> None:
    rng = random.Random(9)
    prompts = {f"r{index}": random_tokens(rng, 20) for index in range(6)}
    with CoreDriver(llama) as driver:
        rule = driver.executor.sampling_rule
        for name, prompt in prompts.items():
            driver.add(name, prompt, max_tokens=60, ignore_eos=False)
        driver.run_until_idle()
        assert set(driver.finish_reasons.values()) == {"length"}
        assert all(
            rule.special_token_ids.isdisjoint(output) and max(output) < VOCAB_SIZE for output in driver.outputs.values()
        )

        driver.outputs.clear()
        driver.executor.sampling_rule = replace(rule, eos_period=10)
        for name, prompt in prompts.items():
            driver.add(name, prompt, max_tokens=60, ignore_eos=False)
        driver.run_until_idle()
        assert driver.outputs == {name: driver.expected_output(prompt, 60) for name, prompt in prompts.items()}
        assert "stop" in driver.finish_reasons.values()


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_sampling_a_held_request_is_recorded(llama: str, runner: Any) -> None:
    with CoreDriver(llama, runner=runner, max_num_batched_tokens=32) as driver:
        driver.executor.held_requests.add("r0")
        driver.add("r0", random_tokens(random.Random(10), 40), max_tokens=2)
        driver.step()
        assert not driver.executor.sampled_while_held, "a partial prefill samples nothing"
        driver.step()
        assert driver.executor.sampled_while_held == ["r0"]


def test_virtual_time_and_token_counts(llama: str) -> None:
    facts: list[StepFacts] = []

    def latency(step: StepFacts) -> float:
        facts.append(step)
        return 0.25

    with CoreDriver(llama, max_num_batched_tokens=32) as driver:
        driver.executor.latency_model = latency
        driver.add("r0", random_tokens(random.Random(11), 50), max_tokens=3)
        driver.run_until_idle()
        assert driver.executor.clock.now_s == 1.0
        assert driver.executor.tokens_computed == {"r0": 52}, "the last sampled token is never run"
    assert [step.spans for step in facts] == [((0, 32),), ((32, 50),), ((50, 51),), ((51, 52),)]
    assert [step.num_sampled for step in facts] == [0, 1, 1, 1]
    assert (facts[1].num_tokens, facts[1].num_context_tokens, facts[1].num_requests) == (18, 50, 1)


@pytest.mark.parametrize("duration_s", [-1.0, float("nan"), float("inf")])
def test_clock_refuses_impossible_durations(duration_s: float) -> None:
    with pytest.raises(ValueError, match="a step cannot take"):
        VirtualClock().advance(duration_s)


# ---- KV memory and runner state, alone ------------------------------------------------------------------------------


def test_sliding_window_reads_only_its_window() -> None:
    memory = KVMemory(8, [GroupLayout(block_size=4, window=5)])
    row = TokenRow(range(20))
    table = memory.new_table("r0")
    memory.append_blocks(table, [[1, 2, 3, 4]])
    memory.write(table, row, 0, 14)
    memory.check(table, row, 0, 14)
    memory.replace_blocks(table, [[0, 0, 3, 4]])  # position 14 attends to 10 .. 14
    memory.write(table, row, 14, 15)
    memory.check(table, row, 14, 15)
    memory.replace_blocks(table, [[0, 0, 0, 4]])
    memory.write(table, row, 15, 16)
    with pytest.raises(KVContentError, match="position 11, in block 0, has been given up"):
        memory.check(table, row, 15, 16)


def test_groups_do_not_take_each_others_content_for_their_own() -> None:
    memory = KVMemory(8, [FULL, FULL])
    row = TokenRow(range(4))
    table = memory.new_table("r0")
    memory.append_blocks(table, [[1], [2]])
    memory.write(table, row, 0, 3)
    memory.replace_blocks(table, [[2], [1]])
    memory.write(table, row, 3, 4)
    with pytest.raises(KVContentError, match="group 0: position 0, in block 2, holds KV of other tokens"):
        memory.check(table, row, 3, 4)


def test_same_step_write_into_a_shared_block_is_seen_before_anybody_samples() -> None:
    memory = KVMemory(8, [FULL])
    reader, writer = memory.new_table("reader"), memory.new_table("writer")
    memory.append_blocks(reader, [[1, 2]])
    memory.append_blocks(writer, [[1, 3]])
    rows = TokenRow([5, 6, 7, 8, 9]), TokenRow([5, 6, 7, 1, 2])
    memory.write(reader, rows[0], 0, 5)
    memory.write(writer, rows[1], 0, 5)
    with pytest.raises(KVWriteError, match="'reader', group 0: position 3, in block 1, was overwritten by 'writer'"):
        memory.check(reader, rows[0], 0, 5)


def test_blocks_moved_out_and_in_again_keep_their_content() -> None:
    memory = KVMemory(8, [FULL])
    row = TokenRow(range(9))
    table = memory.new_table("r0")
    memory.append_blocks(table, [[1, 2]])
    memory.write(table, row, 0, 8)
    saved = memory.read_blocks([1, 2])
    memory.zero_blocks([1, 2])
    memory.replace_blocks(table, [[5, 6, 7]])
    memory.store_blocks([5, 6], saved)
    memory.write(table, row, 8, 9)
    memory.check(table, row, 8, 9)
    memory.zero_blocks([6])
    with pytest.raises(KVWriteError, match="position 4, in block 6, was overwritten by a block copy"):
        memory.check(table, row, 8, 9)


def new_request(request_id: str, token_ids: list[int], num_computed: int = 0) -> Any:
    return SimpleNamespace(
        req_id=request_id,
        prompt_token_ids=token_ids,
        prefill_token_ids=token_ids,
        num_computed_tokens=num_computed,
        block_ids=([1],),
    )


def message(*new: Any, cached: Any = None, finished: tuple[str, ...] = (), preempted: tuple[str, ...] = ()) -> Any:
    nothing = SimpleNamespace(
        req_ids=[], resumed_req_ids=set(), num_computed_tokens=[], num_output_tokens=[], new_block_ids=[]
    )
    return SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached or nothing,
        finished_req_ids=set(finished),
        preempted_req_ids=set(preempted),
        num_scheduled_tokens={data.req_id: 1 for data in new},
    )


def continued(request_id: str, num_computed: int, num_outputs: int = 0) -> Any:
    return SimpleNamespace(
        req_ids=[request_id],
        resumed_req_ids=set(),
        all_token_ids={},
        num_computed_tokens=[num_computed],
        num_output_tokens=[num_outputs],
        new_block_ids=[None],
    )


def test_v1_keeps_preempted_requests_and_v2_forgets_them() -> None:
    v1 = V1RunnerState(KVMemory(4, [FULL]), 8, 64, async_scheduling=False)
    v2 = V2RunnerState(KVMemory(4, [FULL]), 8, 64)
    for state in (v1, v2):
        state.update(message(new_request("r0", [5, 6, 7])))
        state.update(message(preempted=("r0",)))
    v1.update(message(cached=continued("r0", 0)))
    with pytest.raises(RunnerStateError, match="never sent to the runner, or dropped since"):
        v2.update(message(cached=continued("r0", 0)))


def test_v2_has_one_slot_for_every_request_it_was_not_told_to_forget() -> None:
    state = V2RunnerState(KVMemory(4, [FULL]), 2, 64)
    state.update(message(new_request("r0", [5]), new_request("r1", [5])))
    state.update(message(new_request("r1", [5, 6])))  # the same request again takes no second slot
    with pytest.raises(RunnerStateError, match=r"all 2 \(max_num_seqs\) are held"):
        state.update(message(new_request("r2", [5])))


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_sending_a_live_request_again_replaces_all_the_runner_knew(runner: str) -> None:
    memory = KVMemory(4, [FULL])
    state: V1RunnerState | V2RunnerState = (
        V1RunnerState(memory, 8, 64, async_scheduling=True) if runner == "v1" else V2RunnerState(memory, 8, 64)
    )
    state.update(message(new_request("r0", [5, 6])))
    request, _, stop = state.span("r0", 2)
    state.finish_step([(request, stop, 9)])  # sampled; the device would feed 9 to the next step
    state.update(message(new_request("r0", [5, 7, 8], num_computed=1)))
    request, start, stop = state.span("r0", 2)
    assert (start, stop) == (1, 3)
    assert request.row.tokens.tolist() == [5, 7, 8]


def test_a_sample_in_flight_must_not_land_in_the_prompt() -> None:
    state = V1RunnerState(KVMemory(4, [FULL]), 8, 64, async_scheduling=True)
    state.update(message(new_request("r0", [5, 6])))
    request, _, stop = state.span("r0", 2)
    state.finish_step([(request, stop, 9)])
    again = message(cached=continued("r0", 0, num_outputs=1))
    again.num_scheduled_tokens = {"r0": 2}
    state.update(again)  # rewound to recompute the prompt, without being sent again
    with pytest.raises(RunnerStateError, match="replaces token 6 at position 1"):
        state.span("r0", 2)


def test_tokens_that_change_while_a_request_rests_make_its_kv_stale() -> None:
    memory = KVMemory(4, [FULL])
    state = V1RunnerState(memory, 8, 64, async_scheduling=True)
    state.update(message(new_request("r0", [5, 6])))
    request, start, stop = state.span("r0", 2)
    memory.write(request.table, request.row, start, stop)
    memory.check(request.table, request.row, start, stop)
    state.finish_step([(request, stop, 9)])
    running = message(cached=continued("r0", 2, num_outputs=1))
    running.num_scheduled_tokens = {"r0": 1}
    state.update(running)
    request, start, stop = state.span("r0", 1)
    memory.write(request.table, request.row, start, stop)
    memory.check(request.table, request.row, start, stop)
    state.finish_step([(request, stop, 10)])
    state.update(message())  # one step without it
    again = message(cached=continued("r0", 3, num_outputs=2))
    again.num_scheduled_tokens = {"r0": 1}
    again.scheduled_cached_reqs.all_token_ids = {"r0": [5, 6, 8, 10]}  # 8 was 9
    state.update(again)
    request, start, stop = state.span("r0", 1)
    memory.write(request.table, request.row, start, stop)
    with pytest.raises(KVContentError, match="position 2, in block 1, holds KV of other tokens"):
        memory.check(request.table, request.row, start, stop)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 10), min_size=1, max_size=30), st.data())
def test_prefix_hashes_follow_every_change(tokens: list[int], data: st.DataObject) -> None:
    row = TokenRow(tokens)
    for _ in range(data.draw(st.integers(1, 8))):
        change = data.draw(st.sampled_from(["append", "put", "truncate"]))
        if change == "append":
            token = data.draw(st.integers(-1, 10))
            tokens = [*tokens, token]
            row.append(token)
        elif change == "put" and tokens:
            position = data.draw(st.integers(0, len(tokens) - 1))
            tokens = [*tokens[:position], 11, *tokens[position + 1 :]]
            row.put(position, 11)
        else:
            tokens = tokens[: data.draw(st.integers(0, len(tokens)))]
            row.truncate(len(tokens))
    assert row.tokens.tolist() == tokens
    assert np.array_equal(row.hashes, prefix_hashes(tokens))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(0, 19))
def test_every_token_counts_in_every_later_hash(tokens: list[int], position: int) -> None:
    position %= len(tokens)
    changed = [*tokens]
    changed[position] += 1
    same = prefix_hashes(tokens) == prefix_hashes(changed)
    assert same.tolist() == [index < position for index in range(len(tokens))]


def test_sampling_rule_needs_an_ordinary_token() -> None:
    with pytest.raises(ValueError, match="no ordinary token"):
        SamplingRule(3, special_token_ids=frozenset({0, 1, 2}))


# ---- the driver -----------------------------------------------------------------------------------------------------


def test_driver_leaves_the_process_as_it_was(llama: str) -> None:
    from vllm import envs

    before = dict(os.environ)
    runners: tuple[Literal["v1", "v2"], ...] = ("v2", "v1")
    for runner in runners:
        with CoreDriver(llama, runner=runner) as driver:
            assert driver.scheduler.use_v2_model_runner == (runner == "v2")
        driver.close()
        assert dict(os.environ) == before
        assert not envs._is_envs_cache_enabled()


def test_driver_says_who_makes_no_progress(llama: str) -> None:
    with CoreDriver(llama) as driver:
        driver.add("stuck", [5, 6, 7], max_tokens=100)
        with pytest.raises(TimeoutError, match="'stuck'"):
            driver.run_until_idle(10)
        driver.abort("stuck")
        assert driver.run_until_idle() <= 2
        assert not driver.scheduler.requests


def test_driver_names_the_value_it_refuses() -> None:
    with pytest.raises(ConfigurationError, match="'v3'"):
        CoreDriver("nowhere", runner="v3")  # type: ignore[arg-type]


def test_importing_the_simulator_imports_no_vllm() -> None:
    code = "import sys, stream2llm_sdk.serving.simulator; sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.engine
@pytest.mark.parametrize("make_model", [make_llama, make_hybrid])
def test_tiny_models_answer_from_the_whole_prompt_however_it_is_cut(
    make_model: Callable[[Path], Path], tmp_path: Path
) -> None:
    """What makes the tiny models fit to test with: vLLM's own executor, one step for a prompt or many."""
    first = random_tokens(random.Random(12), 150)
    second = [first[0] + 1, *first[1:]]
    answers = []
    for max_num_batched_tokens in (512, 64):
        with CoreDriver(
            make_model(tmp_path),
            executor="model",
            block_size=32,
            max_num_batched_tokens=max_num_batched_tokens,
        ) as driver:
            for name, prompt in (("first", first), ("second", second)):
                driver.add(name, prompt, max_tokens=12)
                driver.run_until_idle(after_step=driver.check_invariants)
            answers.append(dict(driver.outputs))
    assert answers[0] == answers[1]
    assert answers[0]["first"] != answers[0]["second"]
