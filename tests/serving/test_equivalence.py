"""On a real model in float32, a streamed prompt gives the tokens of the same prompt sent whole."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
from prompt_scripts import SCHEDULER, Prompts, run_script, tokens

from stream2llm_sdk.serving.preemption import PreemptionMode
from stream2llm_sdk.serving.swap import swap_config
from stream2llm_sdk.testing.core_driver import CoreDriver

pytestmark = pytest.mark.engine

SCRIPTS = 9


@pytest.fixture(scope="module", params=["llama", "hybrid"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make = {"llama": tiny_models.make_llama, "hybrid": tiny_models.make_hybrid}[request.param]
    return make(tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module", params=[True, False], ids=["prefix-caching", "no-prefix-caching"])
def driver(model: Path, request: pytest.FixtureRequest) -> Iterator[CoreDriver]:
    # 448 tokens of model length take 14 blocks of a pool of 16 (28 of 32 with two groups): two long streams do not
    # fit beside each other.
    blocks = 32 if model.name == "hybrid" else 16
    with CoreDriver(
        model,
        executor="model",
        scheduler_cls=SCHEDULER,
        prefix_caching=request.param,
        num_gpu_blocks=blocks,
        block_size=32,
        max_num_batched_tokens=128,
        max_model_len=448,
        max_num_seqs=16,
        kv_cache_memory_bytes=64 << 20,
        scheduler_reserve_full_isl=False,
        additional_config={"stream2llm": {"policy": "FCFS"}},
        kv_transfer_config=swap_config(num_host_blocks=64),
    ) as driver:
        yield driver
        assert driver.scheduler.swap.pool.num_free == 64


def reset_cache(driver: CoreDriver) -> None:
    driver.run_until_idle()
    assert driver.scheduler.reset_prefix_cache()


def sent_whole(driver: CoreDriver, request_id: str, prompt: list[int], max_tokens: int) -> list[int]:
    reset_cache(driver)
    driver.add(request_id, prompt, max_tokens=max_tokens)
    driver.run_until_idle()
    return driver.outputs[request_id]


def test_streamed_tokens_are_the_whole_prompts(driver: CoreDriver) -> None:
    num_free = driver.num_free_blocks()
    preemptions: Counter[str] = Counter()
    num_checked = 0
    for script in range(SCRIPTS):
        driver.scheduler.preemption_mode = PreemptionMode.SWAP if script % 2 else PreemptionMode.RECOMPUTE
        prompts = Prompts(driver)
        run_script(prompts, random.Random(script), f"s{script}", max_prompt=400)
        for records in driver.call("trail", [list(prompts.now)]).values():
            preemptions.update(record[0] for record in records if record[0].startswith("PREEMPTED"))
        for request_id in prompts.to_answer:
            streamed = driver.outputs[request_id]
            max_tokens = prompts.max_tokens[request_id]
            assert len(streamed) == max_tokens
            whole = sent_whole(driver, f"whole-{request_id}", prompts.now[request_id], max_tokens)
            assert streamed == whole, request_id
            num_checked += 1
        reset_cache(driver)
        assert driver.num_free_blocks() == num_free
    assert num_checked > 3 * SCRIPTS
    assert len(preemptions) == 2, f"both kinds of preemption must happen, or this proves less: {preemptions}"


def test_swapped_kv_comes_back_and_nothing_is_computed_again(driver: CoreDriver) -> None:
    driver.scheduler.preemption_mode = PreemptionMode.SWAP
    rng, (shared, held) = random.Random(5), (200, 330)
    reset_cache(driver)
    prompts, names = Prompts(driver), [f"{name}-{id(driver)}" for name in ("open", "complete")]
    prompts.open_stream(names[0], tokens(rng, held), is_prompt_update=False)
    driver.run_until_idle()
    prompts.add_plain(names[1], tokens(rng, held + shared - 120))
    driver.run_until_idle()
    prompts.append(names[0], tokens(rng, 50), final=True)
    driver.run_until_idle()
    (records,) = driver.call("trail", [[names[0]]]).values()
    by_type = {record[0]: record[3] for record in records}
    assert by_type["PREEMPTED_SWAP"]["num_tokens"] == held - 1
    resumed, end = by_type["RESUMED"], by_type["FINISHED"]
    assert resumed["num_loaded"] + resumed["num_found"] == held - 1
    assert resumed["num_recomputed"] == end["num_tokens_recomputed"] == end["num_tokens_cached"] == 0
    assert end["num_tokens_loaded"] == resumed["num_loaded"] > 0
    for name in names:
        assert driver.outputs[name] == sent_whole(driver, f"whole-{name}", prompts.now[name], 8)


@pytest.mark.parametrize("lcp", [0, 1, 31, 32, 33, 100, 319])
def test_replace_keeps_the_common_prefix(driver: CoreDriver, lcp: int) -> None:
    rng = random.Random(lcp)
    reset_cache(driver)
    prompts, request_id = Prompts(driver), f"lcp{lcp}-{id(driver)}"
    prompts.open_stream(request_id, tokens(rng, 320))
    driver.run_until_idle()
    answer = prompts.replace(request_id, prompts.now[request_id][:lcp] + tokens(rng, 60), final=True)
    assert answer["lcp"] == lcp
    assert answer["num_invalidated"] == 319 - lcp
    driver.run_until_idle()
    whole = sent_whole(driver, f"whole-{request_id}", prompts.now[request_id], 8)
    assert driver.outputs[request_id] == whole
