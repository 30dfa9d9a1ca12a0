"""Swapping on vLLM's real engine core: what comes back from the host is what went there, whatever the scheduler does
in between. The executor checks the content of every block that is read."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stream2llm_sdk.errors import ConfigurationError, UnsupportedFeatureError
from stream2llm_sdk.serving.simulator import KVCheckError
from stream2llm_sdk.serving.simulator.host_memory import CheckedSwap
from stream2llm_sdk.serving.streaming_prompt import EXTRA_ARGS_KEY
from stream2llm_sdk.serving.swap import swap_config
from stream2llm_sdk.testing.core_driver import CoreDriver

from .tiny_models import FIRST_ORDINARY_TOKEN_ID, VOCAB_SIZE, make_hybrid_config, make_llama_config

MODES = [
    pytest.param(model, runner, asynchronous, caching, id=f"{model}-{runner}-{how}-{cache}")
    for model in ("llama", "hybrid")
    for runner, asynchronous, how in (("v1", False, "sync"), ("v1", True, "async"), ("v2", True, "async"))
    for caching, cache in ((False, "uncached"), (True, "cached"))
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "llama": make_llama_config(tmp_path_factory.mktemp("llama")),
        "hybrid": make_hybrid_config(tmp_path_factory.mktemp("hybrid")),
    }


def swapping(asynchronous: bool) -> type:
    """vLLM's own scheduler, except that every preemption is a swap; `preempt(request_id)` forces one."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    base: Any = AsyncScheduler if asynchronous else Scheduler

    class SwappingScheduler(base):  # type: ignore[misc]
        def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
            self.connector.swap_out(request)
            super()._preempt_request(request, timestamp, drop_stale_output)

        def preempt(self, request_id: str, drop_stale_output: bool = False) -> None:
            request = self.requests[request_id]
            self.running.remove(request)
            self._preempt_request(request, 0.0, drop_stale_output)

    return SwappingScheduler


def streaming(asynchronous: bool) -> type:
    """The same of our scheduler, which changes prompts: their copies are cut at the longest common prefix."""
    from stream2llm_sdk.serving.scheduler import AsyncStream2LLMScheduler, Stream2LLMScheduler

    base: Any = AsyncStream2LLMScheduler if asynchronous else Stream2LLMScheduler

    class SwappingStreams(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.connector.num_held_back = lambda request_id: int(self.prompts[request_id].is_open)

        def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
            self.connector.swap_out(request)
            super()._preempt_request(request, timestamp, drop_stale_output)

        def _set_tokens(self, request: Any, new: Any, lcp: int) -> None:
            self.connector.truncate(request.request_id, lcp)
            super()._set_tokens(request, new, lcp)

        def preempt(self, request_id: str) -> None:
            self._preempt_victim(self.requests[request_id])

    return SwappingStreams


@contextmanager
def engine(
    model: Path, scheduler: type, asynchronous: bool = False, num_host_blocks: int = 128, **options: Any
) -> Iterator[Any]:
    """A core with swap space, and its parts: `driver`, `connector`, `pool`, `swap` and `preempt`."""
    arguments = {"scheduler_reserve_full_isl": False, **options}
    config = swap_config(num_host_blocks=num_host_blocks)
    with CoreDriver(
        model, scheduler_cls=scheduler, async_scheduling=asynchronous, kv_transfer_config=config, **arguments
    ) as driver:
        swap = driver.executor.kv_transfer = CheckedSwap()
        connector = driver.scheduler.connector
        yield SimpleNamespace(
            driver=driver,
            connector=connector,
            pool=connector.pool,
            swap=swap,
            statistics=connector.statistics,
            preempt=driver.scheduler.preempt,
        )


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_ORDINARY_TOKEN_ID, VOCAB_SIZE) for _ in range(count)]


def check(parts: Any) -> None:
    parts.driver.check_invariants()
    parts.pool.check()


def open_stream(parts: Any, request_id: str, prompt: list[int]) -> None:
    parts.driver.add(request_id, prompt, extra_args={EXTRA_ARGS_KEY: {"is_streaming_prompt": True}})


def update(parts: Any, request_id: str, prompt: list[int], final: bool) -> None:
    reply = parts.driver.call("update", [request_id, "replace", prompt, final, 0.0])
    assert "error" not in reply, reply


@pytest.mark.parametrize(("model", "runner", "asynchronous", "caching"), MODES)
def test_more_requests_than_fit_swap_and_answer_as_if_alone(
    models: dict[str, Path], model: str, runner: str, asynchronous: bool, caching: bool
) -> None:
    rng = random.Random(5)
    shared = tokens(rng, 40)
    prompts = {f"r{index}": shared + tokens(rng, rng.randrange(60, 200)) for index in range(8)}
    options = {"runner": runner, "prefix_caching": caching, "num_gpu_blocks": 60 if model == "llama" else 70}
    with engine(models[model], swapping(asynchronous), asynchronous, max_num_seqs=8, **options) as parts:
        driver, num_free = parts.driver, parts.driver.num_free_blocks()
        for request_id, prompt in prompts.items():
            driver.add(request_id, prompt, max_tokens=120)
            driver.step()
        driver.run_until_idle(after_step=lambda: check(parts))
        for request_id, prompt in prompts.items():
            assert driver.outputs[request_id] == driver.expected_output(prompt, 120)
        assert parts.statistics.num_swapped_in > 0
        assert parts.swap.num_blocks == {"out": parts.statistics.num_blocks_out, "in": parts.statistics.num_blocks_in}
        assert parts.pool.is_empty
        assert driver.num_free_blocks() == num_free


@pytest.mark.parametrize(("model", "runner", "asynchronous", "caching"), MODES)
def test_random_preemptions_keep_every_answer(
    models: dict[str, Path], model: str, runner: str, asynchronous: bool, caching: bool
) -> None:
    rng = random.Random(11)
    prompts = {f"r{index}": tokens(rng, rng.randrange(20, 260)) for index in range(12)}
    waiting = list(prompts)
    with engine(
        models[model],
        swapping(asynchronous),
        asynchronous,
        num_host_blocks=14 if model == "llama" else 24,
        runner=runner,
        prefix_caching=caching,
        num_gpu_blocks=100,
        max_num_batched_tokens=64,
    ) as parts:
        driver = parts.driver
        while driver.has_work() or waiting:
            if waiting and rng.random() < 0.2:
                driver.add(waiting[-1], prompts[waiting.pop()], max_tokens=24)
            running = [r.request_id for r in driver.scheduler.running]
            if running and rng.random() < 0.3:
                parts.preempt(rng.choice(running))
            driver.step()
            check(parts)
        for request_id, prompt in prompts.items():
            assert driver.outputs[request_id] == driver.expected_output(prompt, 24)
        assert parts.statistics.num_refused > 0
        assert parts.statistics.num_blocks_reused > 0
        assert parts.statistics.num_swapped_in > 0
        assert parts.pool.is_empty
        assert parts.pool.num_free == parts.pool.num_blocks


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_victim_computes_nothing_again_but_its_last_token(models: dict[str, Path], asynchronous: bool) -> None:
    prompt = tokens(random.Random(1), 200)
    with engine(models["llama"], swapping(asynchronous), asynchronous, prefix_caching=False) as parts:
        driver = parts.driver
        driver.add("a", prompt, max_tokens=8)
        driver.step(4)
        parts.preempt("a")
        driver.run_until_idle()
        assert driver.outputs["a"] == driver.expected_output(prompt, 8)
        assert parts.statistics.num_swapped_in == 1
        recomputed = driver.executor.tokens_computed["a"] - (200 + 8 - 1)
        assert recomputed <= 1 + asynchronous


def test_a_token_that_was_sampled_in_vain_is_not_taken_for_saved(models: dict[str, Path]) -> None:
    prompt = tokens(random.Random(14), 100)
    with engine(models["llama"], swapping(True), True, prefix_caching=False) as parts:
        driver = parts.driver
        driver.add("a", prompt, max_tokens=8)
        driver.step(4)
        request = driver.scheduler.requests["a"]
        assert request.num_in_flight_tokens
        parts.preempt("a", drop_stale_output=True)
        driver.scheduler.prev_step_scheduled_req_ids.clear()  # as vLLM does where it drops output
        assert parts.connector.num_swapped("a") == request.num_tokens
        assert parts.connector.num_loadable(request, 0) == request.num_tokens - 1
        driver.run_until_idle(after_step=lambda: check(parts))
        assert driver.outputs["a"] == driver.expected_output(prompt, 8)


@pytest.mark.parametrize("final", [False, True])
def test_a_prompt_that_shrinks_to_what_the_host_holds_leaves_a_token_to_compute(
    models: dict[str, Path], final: bool
) -> None:
    old = tokens(random.Random(15), 203)
    with engine(models["llama"], streaming(False), prefix_caching=False) as parts:
        driver = parts.driver
        open_stream(parts, "a", old)
        driver.run_until_idle()
        parts.preempt("a")
        before = driver.executor.tokens_computed["a"]
        update(parts, "a", old[:101], final)
        driver.run_until_idle(after_step=lambda: check(parts))
        assert parts.statistics.num_tokens_in == (100 if final else 99)
        if not final:
            assert driver.executor.tokens_computed["a"] == before + 1
            update(parts, "a", old[:101], final=True)
            driver.run_until_idle()
        assert driver.outputs["a"] == driver.expected_output(old[:101], 8)


def test_the_blocks_of_a_victim_are_free_at_once_while_steps_are_in_flight(models: dict[str, Path]) -> None:
    with engine(models["llama"], swapping(True), True) as parts:
        driver = parts.driver
        num_free = driver.num_free_blocks()
        driver.add("a", tokens(random.Random(2), 100), max_tokens=20)
        driver.step(3)
        assert driver.scheduler.requests["a"].num_in_flight_tokens
        parts.preempt("a")
        assert driver.num_free_blocks() == num_free
        driver.run_until_idle()


def test_only_what_the_prefix_cache_lost_is_loaded(models: dict[str, Path]) -> None:
    rng = random.Random(3)
    prompt = tokens(rng, 200)
    with engine(models["llama"], swapping(False), num_gpu_blocks=21, max_model_len=256, max_num_seqs=1) as parts:
        driver = parts.driver
        driver.add("a", prompt, max_tokens=4)
        driver.step()
        parts.preempt("a")
        driver.scheduler.waiting.remove_requests([request := driver.scheduler.requests["a"]])
        driver.add("b", tokens(rng, 180), max_tokens=1)  # takes some of the blocks, the last ones first
        while "b" not in driver.finish_reasons:
            driver.step()
        driver.scheduler.waiting.add_request(request)
        hit = driver.scheduler.kv_cache_manager.get_computed_blocks(request)[1]
        assert 0 < hit < 192
        driver.run_until_idle()
        assert parts.statistics.num_tokens_in == 200 - hit
        assert driver.outputs["a"] == driver.expected_output(prompt, 4)


def test_an_aborted_victim_leaves_nothing_behind(models: dict[str, Path]) -> None:
    with engine(models["llama"], swapping(False)) as parts:
        driver = parts.driver
        driver.add("a", tokens(random.Random(4), 100), max_tokens=8)
        driver.step(2)
        parts.preempt("a")
        assert not parts.pool.is_empty
        driver.abort("a")
        check(parts)
        driver.run_until_idle()
        assert parts.pool.is_empty
        assert parts.pool.num_free == parts.pool.num_blocks


def test_a_reset_of_the_caches_forgets_every_copy(models: dict[str, Path]) -> None:
    prompt = tokens(random.Random(6), 100)
    with engine(models["llama"], swapping(False)) as parts:
        driver = parts.driver
        driver.add("a", prompt, max_tokens=8)
        driver.step(2)
        assert driver.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        assert parts.pool.is_empty
        driver.run_until_idle()
        assert parts.statistics.num_swapped_in == 0
        assert driver.outputs["a"] == driver.expected_output(prompt, 8)


@pytest.mark.parametrize("lost", ["out", "in"])
def test_a_copy_that_does_not_arrive_is_noticed(models: dict[str, Path], lost: Any) -> None:
    with engine(models["llama"], swapping(False), prefix_caching=False) as parts:
        driver = parts.driver
        parts.swap.lost.add(lost)
        driver.add("a", tokens(random.Random(7), 100), max_tokens=8)
        driver.step(2)
        parts.preempt("a")
        driver.add("b", tokens(random.Random(8), 100), max_tokens=8)
        with pytest.raises(KVCheckError):
            driver.run_until_idle()


def test_slow_copies_take_virtual_time_and_report_it(models: dict[str, Path]) -> None:
    with engine(models["llama"], swapping(False), prefix_caching=False) as parts:
        driver = parts.driver
        parts.swap.clock = driver.executor.clock
        parts.swap.seconds_per_block.update({"out": 0.5, "in": 0.25})
        driver.add("a", tokens(random.Random(9), 90), max_tokens=2)
        driver.step()
        parts.preempt("a")
        driver.run_until_idle()
        samples = {sample.direction: sample for sample in parts.connector.take_samples()}
        assert samples["out"].num_blocks == samples["in"].num_blocks == 6
        assert samples["out"].elapsed_s == 3.0
        assert samples["in"].num_tokens == 90
        assert driver.executor.clock.now_s == 4.5
        assert not parts.connector.take_samples()


@pytest.mark.parametrize(("model", "runner", "asynchronous", "caching"), MODES)
def test_a_prompt_replaced_on_the_host_is_cut_at_the_common_prefix(
    models: dict[str, Path], model: str, runner: str, asynchronous: bool, caching: bool
) -> None:
    rng = random.Random(12)
    old = tokens(rng, 203)
    # In chunks of 64 tokens, or the sliding window's early blocks would all be there yet.
    options = {"runner": runner, "prefix_caching": caching, "num_gpu_blocks": 130, "max_num_batched_tokens": 64}
    with engine(models[model], streaming(asynchronous), asynchronous, **options) as parts:
        driver = parts.driver
        for request_id, keep in (("end", 203), ("middle", 101), ("start", 0)):
            new = old[:keep] + tokens(rng, 80)
            open_stream(parts, request_id, old)
            driver.run_until_idle()
            parts.preempt(request_id)
            assert parts.connector.num_swapped(request_id) == 202
            update(parts, request_id, new, final=False)
            assert parts.connector.num_swapped(request_id) == min(keep, 202)
            driver.run_until_idle(after_step=lambda: check(parts))
            update(parts, request_id, new, final=True)
            driver.run_until_idle(after_step=lambda: check(parts))
            assert driver.outputs[request_id] == driver.expected_output(new, 8)
        assert parts.pool.is_empty
        if not caching:
            assert parts.statistics.num_tokens_in == 202 + (101 if model == "llama" else 0)


@pytest.mark.parametrize(("model", "runner", "asynchronous", "caching"), MODES)
def test_streams_that_change_and_swap_at_random_answer_their_last_prompt(
    models: dict[str, Path], model: str, runner: str, asynchronous: bool, caching: bool
) -> None:
    rng = random.Random(13)
    with engine(
        models[model],
        streaming(asynchronous),
        asynchronous,
        num_host_blocks=60,
        runner=runner,
        prefix_caching=caching,
        num_gpu_blocks=400,
        max_model_len=1500,
    ) as parts:
        driver = parts.driver
        for _ in range(4):
            prompts = {f"s{len(driver.finish_reasons) + index}": tokens(rng, 150) for index in range(3)}
            for request_id, prompt in prompts.items():
                open_stream(parts, request_id, prompt)
            for _ in range(25):
                request_id = rng.choice(sorted(prompts))
                request = driver.scheduler.requests[request_id]
                if rng.random() < 0.4 and driver.scheduler.kv.holds(request_id):
                    parts.preempt(request_id)
                elif rng.random() < 0.5:
                    prompt = prompts[request_id]
                    keep = rng.choice((len(prompt), rng.randrange(len(prompt) + 1)))
                    prompts[request_id] = prompt[:keep] + tokens(rng, rng.randrange(1, 40))
                    update(parts, request_id, prompts[request_id], final=False)
                driver.step(rng.randrange(3))
                check(parts)
                assert request.num_computed_tokens < request.num_prompt_tokens
            for request_id, prompt in prompts.items():
                update(parts, request_id, prompt, final=True)
            driver.run_until_idle(after_step=lambda: check(parts))
            for request_id, prompt in prompts.items():
                assert driver.outputs[request_id] == driver.expected_output(prompt, 8)
        assert parts.statistics.num_swapped_in > 0
        assert parts.statistics.num_blocks_reused > 0
        assert parts.pool.is_empty


def test_a_size_in_bytes_is_counted_in_blocks(models: dict[str, Path]) -> None:
    # 2 layers × 2 heads × 32 dimensions × keys and values × 4 bytes × 16 tokens
    block = 2 * 2 * 32 * 2 * 4 * 16
    config = swap_config(host_bytes=5 * block + block // 2)
    with CoreDriver(models["llama"], kv_transfer_config=config) as driver:
        assert driver.scheduler.connector.pool.num_blocks == 5
    with pytest.raises(ConfigurationError, match="one takes"):
        CoreDriver(models["llama"], kv_transfer_config=swap_config(host_bytes=block - 1))


@pytest.mark.parametrize("sizes", [{}, {"num_host_blocks": 4, "host_bytes": 4}, {"num_host_blocks": 0}])
def test_a_size_that_says_nothing_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError):
        swap_config(**sizes)


def test_a_role_that_keeps_blocks_back_is_refused(models: dict[str, Path]) -> None:
    config = swap_config(num_host_blocks=4)
    config.kv_role = "kv_both"
    with pytest.raises(ConfigurationError, match="kv_producer"):
        CoreDriver(models["llama"], kv_transfer_config=config)


def test_caches_that_cannot_be_swapped_are_refused() -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

    from stream2llm_sdk.serving.swap.kv_regions import check_supported

    one_device = SimpleNamespace(parallel_config=SimpleNamespace())
    state = MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,))
    with pytest.raises(UnsupportedFeatureError, match="MambaSpec"):
        check_supported(one_device, KVCacheConfig(8, [], [KVCacheGroupSpec(["layer"], state)]))
    groups = [
        KVCacheGroupSpec([name], FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=dtype))
        for name, dtype in (("a", torch.float32), ("b", torch.bfloat16))
    ]
    with pytest.raises(UnsupportedFeatureError, match="precisions"):
        check_supported(one_device, KVCacheConfig(8, [], groups))
    piped = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=2))
    with pytest.raises(UnsupportedFeatureError, match="pipeline_parallel_size=2"):
        check_supported(piped, KVCacheConfig(8, [], groups[:1]))
